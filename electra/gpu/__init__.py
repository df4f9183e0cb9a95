"""What a GPU runs in place of `encoder.Block` and its neighbours: the same numbers, sooner.

`fused` makes operators with gradients out of `kernels`, which are Triton's. Nothing else in electra
needs them: without a GPU, or without Triton, plain PyTorch computes everything.
"""
