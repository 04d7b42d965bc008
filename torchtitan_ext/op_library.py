"""The compiled library behind ``ops``: loading it, calling it, and what LibTorch's stable ABI cannot express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ext import _core


def _load_library() -> None:
    path = Path(_core.__file__).with_name("_ops.so")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"torchtitan_ext: {path} does not load beside torch {torch.__version__}. Likely causes: torch older than "
            "2.11, or the package was built on another machine or for another Python; install it again where it runs. "
            f"The loader says: {error}"
        ) from error


def full_abi_path() -> Path:
    """The library for this minor version of torch: collectives, and what autograd must know of ops in place."""
    major, minor = torch.__version__.split(".")[:2]
    return Path(_core.__file__).with_name(f"_full_abi_{major}_{minor}.so")


_load_library()
has_full_abi = full_abi_path().exists()
if has_full_abi:
    torch.ops.load_library(full_abi_path())
kernels = torch.ops.torchtitan_ext
_library = torch.library.Library("torchtitan_ext", "IMPL")


def bump_version_of(name: str, argument: int) -> None:
    """Makes an in-place op known to autograd where ``csrc/autograd``, which does it faster, is of another torch."""
    if has_full_abi:
        return
    op = getattr(kernels, name).default

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> None:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise RuntimeError(
                f"{name} is not differentiable: an argument requires grad; call it under torch.no_grad(), "
                "or use the form without the final underscore"
            )
        op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version(args[argument])

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def call(name: str, args: tuple[Any, ...]) -> Any:
    """Calls an op; where it fails, the error is one sentence."""
    try:
        return getattr(kernels, name)(*args)
    except RuntimeError as error:
        if torch.compiler.is_compiling():
            raise
        raise _explained(name, args, error) from None


def call_differentiable(name: str, args: tuple[Any, ...]) -> Any:
    """As ``call``, past the op's Python autograd kernel (5 us) where nothing requires grad."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
        return call(name, args)
    with torch._C._AutoDispatchBelowAutograd():
        return call(name, args)


def _explained(name: str, args: tuple[Any, ...], error: RuntimeError) -> Exception:
    """The error of a call that failed, in one sentence. Looked for only now, so that good calls do not pay for it."""
    schema = getattr(kernels, name).default._schema
    for argument, value in zip(schema.arguments, args, strict=True):
        kind = str(argument.type)
        values = value if "List" in kind and isinstance(value, (list, tuple)) else [value]
        for item in values:
            if "Tensor" in kind and not isinstance(item, Tensor):
                return ValueError(f"{name}: got a {type(item).__name__} as {argument.name}, expected a tensor")
            if isinstance(item, Tensor) and item.is_nested:
                return ValueError(f"{name}: got a nested tensor as {argument.name}; pass the tensor of its values")
            if isinstance(item, DTensor):
                return ValueError(f"{name}: got a DTensor as {argument.name}; pass the rank's own tensor, .to_local()")
            if isinstance(item, Tensor) and argument.is_write and (item.is_conj() or item.is_neg()):
                return ValueError(f"{name}: {argument.name} is a lazily conjugated or negated view; pass what it views")
            # A dtype is an int to the schema.
            if "int" in kind and not isinstance(item, torch.dtype) and not _is_int64(item):
                return ValueError(f"{name}: got {item!r} in {argument.name}, expected an int64")
    return error


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63
