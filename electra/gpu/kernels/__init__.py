"""Triton kernels for what PyTorch would do in several passes over memory.

In: contiguous CUDA tensors, bfloat16 (or float32); out: the tensors each function names, without
autograd, so that who calls them decides what is kept (`fused`). Arithmetic is float32; column sums
(gradients of biases and layer norms) are partial sums in a fixed order, without atomics, so a step
is bitwise repeatable. Each function has a fixed `config`; benchmarks/kernels.py tries others.

    B sequences · T tokens · H heads · K head size · N rows · D hidden · F feed-forward ·
    V vocabulary · E embedding
"""

# pyright: reportUnusedImport=false

from .attend import ATTENTION, ATTENTION_BACKWARD, attention, attention_backward
from .feed import (
    GELU,
    GELU_BACKWARD,
    PRODUCT_GELU,
    PRODUCT_GELU_BACKWARD,
    gelu,
    gelu_backward,
    product_gelu,
    product_gelu_backward,
)
from .launch import MOST_TOKENS, NOTHING, Dropout, Drops, available, column_sums
from .norms import (
    ADD_NORM,
    ADD_NORM_BACKWARD,
    PRODUCT_ADD_NORM,
    add_norm,
    add_norm_backward,
    product_add_norm,
)
from .update import (
    ADAM,
    CHUNK,
    MOST_PLACES,
    ORTHOGONAL,
    SQUARES,
    SYMMETRIC,
    adam,
    orthogonal,
    sums_of_squares,
    symmetric,
    turns,
)
from .vocabulary import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    TABLE_GRADIENT,
    cross_entropy_and_sample,
    cross_entropy_backward,
    table_gradient,
)
from .whole_layer import LAYER, LAYER_BACKWARD, layer, layer_backward
