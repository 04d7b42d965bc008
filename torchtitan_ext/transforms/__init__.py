"""Other people's weights: which tensors of a checkpoint become which tensors of a state, as data.

``rules`` says what a transform is, ``mapped`` shows a checkpoint through it, ``mapped_reads`` and ``reader`` read what
a rank needs of it. The mapping and its proof are in ``csrc/core/tensor_map.h`` and ``csrc/core/transform.h``.
"""

from torchtitan_ext.transforms.ready import ready, ready_models
from torchtitan_ext.transforms.rules import (
    Rule,
    Step,
    Transform,
    cast,
    concat,
    crop,
    dequantize,
    pad,
    permute,
    place,
    reshape,
    slice_dim,
    split,
    stack,
    transpose,
    unstack,
)

__all__ = [
    "Rule",
    "Step",
    "Transform",
    "cast",
    "concat",
    "crop",
    "dequantize",
    "pad",
    "permute",
    "place",
    "ready",
    "ready_models",
    "reshape",
    "slice_dim",
    "split",
    "stack",
    "transpose",
    "unstack",
]
