"""Models on the disk: other people's in, ours out.

`layout` has the names of tensors here and in transformers, `hf` reads what transformers loads and
`hf_export` writes it, `tf_checkpoint` reads Google's checkpoints, `unpickle` opens a `.bin` in a
process of its own, `onnx_export` writes ONNX, `extend` adds words to a model, and `card` tells what
a model is.
"""
