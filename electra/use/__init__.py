"""What a trained model is for.

`detect` finds replaced words and `embed` makes vectors; `web` is the guard of everything that
listens, `serve` the HTTP service and `ui` the page; `demo` is `make demo`, on `demo_text`.
"""
