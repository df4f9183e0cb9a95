"""Models on the disk: other people's in, ours out.

`hf` writes and reads what transformers loads, `tf_checkpoint` reads Google's checkpoints,
`unpickle` opens a `.bin` in a process of its own, `onnx_export` writes ONNX, `extend` adds words to
a model, and `card` tells what a model is.
"""
