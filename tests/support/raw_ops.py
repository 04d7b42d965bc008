"""What direct calls of `torch.ops.torchtitan_ext` raise: torch chooses the class, as `torchtitan_ext.ops` does not."""

import torch

_IS_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
# Of a std::invalid_argument of a kernel.
RAW_REFUSAL: type[Exception] = RuntimeError if _IS_2_15 else ValueError
