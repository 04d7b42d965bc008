"""The compiled library behind ``ops``: loading it, calling it, and what LibTorch's stable ABI cannot express."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchtitan_ext import _core
from torchtitan_ext.errors import argument_error

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _load_library() -> None:
    path = Path(_core.__file__).with_name("_ops.so")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"torchtitan_ext: {path} does not load beside torch {torch.__version__}. Likely causes: torch older than "
            "2.11, or the package was built on another machine or for another Python; install it again where it runs. "
            f"The loader says: {error.__cause__ or error}"
        ) from error


def full_abi_path(version: str) -> Path:
    """The library for a version of torch: collectives, and what autograd must know of ops in place.

    Releases of one minor version share a library; a pre-release has one of its own (``cmake/full_abi_name.cmake``).
    """
    name = re.sub(r"^(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?$", r"\1", version)
    return Path(_core.__file__).with_name(f"_full_abi_{re.sub('[^A-Za-z0-9]+', '_', name)}.so")


def load_full_abi(path: Path) -> str:
    """Loads it; returns why it cannot be loaded, or an empty text. Most ops work without it, so it must not raise."""
    if not path.exists():
        return f"this installation has no {path.name}, which is built for one minor version or pre-release of torch"
    try:
        torch.ops.load_library(path)
    except OSError as error:  # built beside a torch whose sources differ
        return (
            f"{path.name} does not load beside torch {torch.__version__} (the loader says: {error.__cause__ or error})"
        )
    return ""


_load_library()
full_abi_is_missing = load_full_abi(full_abi_path(torch.__version__))
"""Why the library on the full ABI is missing, in one sentence; empty where it is there."""
kernels = torch.ops.torchtitan_ext
classes = torch.classes.torchtitan_ext
_library = torch.library.Library("torchtitan_ext", "IMPL")


def bump_version_of(name: str, *arguments: int) -> None:
    """Makes an in-place op known to autograd where ``csrc/autograd``, which does it faster, is missing.

    ``arguments`` are the places of those that it writes.
    """
    if not full_abi_is_missing:
        return
    op = getattr(kernels, name).default

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise RuntimeError(
                f"{name} is not differentiable: an argument requires grad; call it under torch.no_grad(), "
                "or use the form without the final underscore"
            )
        if any(_has_forward_gradient(tensor) for value in args for tensor in _tensors_in(value)):
            raise RuntimeError(
                f"{name} is not differentiable: an argument has a forward gradient; use the form without the final "
                "underscore"
            )
        written = [tensor for argument in arguments for tensor in _tensors_in(args[argument])]
        if any(tensor.is_conj() or tensor.is_neg() for tensor in written):
            raise ValueError(f"{name}: an argument is a lazily conjugated or negated view; pass what it views")
        if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in written):
            raise RuntimeError(
                f"{name} cannot write: a tensor was made in inference mode and is written outside of it; call under "
                "torch.inference_mode(), or clone() it first"
            )
        result = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)
        torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])
        return result

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def register_in_place(name: str, *arguments: int) -> None:
    """The fake kernel of an op that gives nothing, and its version bump, as ``bump_version_of``."""
    register_fake(name)(lambda *args: None)
    bump_version_of(name, *arguments)


def register_fake(name: str) -> Callable[[Kernel], Kernel]:
    """Decorates the fake kernel of an op.

    As torch's own decorator; but torch looks up the source of its caller, which takes 5 ms in each module that calls.
    """

    def register(kernel: Kernel) -> Kernel:
        torch.library.register_fake(f"torchtitan_ext::{name}")(kernel)
        return kernel

    return register


def keep_out_of_cuda_graphs(*names: str) -> None:
    """Tells inductor that a CUDA graph cannot hold these ops: with ``mode="reduce-overhead"`` it makes graphs of what
    lies between them. LibTorch's stable ABI has tags from torch 2.12 on."""
    for name in names:
        getattr(kernels, name).default.tags.append(torch.Tag.cudagraph_unsafe)


def listed(name: str, argument: str, values: Iterable[Tensor]) -> list[Tensor]:
    """An argument of an op as a list. Raises TypeError for a single tensor, too, although one can iterate over it."""
    if not isinstance(values, (list, tuple)):
        if isinstance(values, (Tensor, Mapping, str)) or not isinstance(values, Iterable):
            raise argument_error(name, argument, values, "a list of tensors")
    return list(values)


def call(name: str, args: tuple[Any, ...]) -> Any:
    """Calls an op; where it fails, the error is one sentence."""
    try:
        return getattr(kernels, name)(*args)
    except RuntimeError as error:
        if torch.compiler.is_compiling():
            raise
        raise _explained(name, args, error) from None


def call_collective(name: str, args: tuple[Any, ...]) -> Any:
    """As ``call``, of an op that only the library on the full ABI has."""
    check_full_abi()
    return call(name, args)


def check_full_abi() -> None:
    """Raises ImportError where the library on the full ABI is missing."""
    if full_abi_is_missing:
        raise ImportError(
            f"torchtitan_ext: no collectives: {full_abi_is_missing}; this is torch {torch.__version__}: install the "
            "package again beside it"
        )


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """What the C++ of an op refuses becomes the error that its wrapper promises."""
    try:
        yield
    except RuntimeError as error:
        raise _in_python(name, error) from None


class DifferentiableOp:
    """An op that is linear in its tensors, with its backward formula: called as ``op(args)``.

    ``backward(ctx, grad)``, with a list of gradients where the op gives a list, gives a gradient, a list or None for
    each argument. ``setup_context(ctx, inputs, output)`` keeps constants and shapes alone.
    """

    def __init__(
        self, name: str, backward: Callable[..., tuple[Any, ...]], *, setup_context: Callable[..., None]
    ) -> None:
        torch.library.register_autograd(f"torchtitan_ext::{name}", backward, setup_context=setup_context)
        self.name = name

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """As ``call``, past the op's Python autograd kernel (5 us) where nothing requires grad."""
        _refuse_transforms(self.name)
        if torch.compiler.is_compiling():
            return call(self.name, args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return call(self.name, args)
        with torch._C._AutoDispatchBelowAutograd():
            return call(self.name, args)


def is_transformed() -> bool:
    """Under forward-mode AD or a transform of ``torch.func``, unknown to the dispatcher's autograd kernels."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _refuse_transforms(name: str) -> None:
    if is_transformed():
        raise RuntimeError(
            f"{name} knows neither forward-mode AD nor the transforms of torch.func (grad, jvp, jacfwd, vmap, ...); "
            "call it outside of them, and take gradients by backward() or torch.autograd.grad"
        )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return value if isinstance(value, list) and value and isinstance(value[0], Tensor) else []


def _has_forward_gradient(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _explained(name: str, args: tuple[Any, ...], error: RuntimeError) -> Exception:
    """Why a call failed, in one sentence. Looked for after a failure only, so that good calls do not pay for it."""
    schema = getattr(kernels, name).default._schema
    # Importing DTensor takes half a second; where nobody has, no argument can be one.
    dtensor_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for argument, value in zip(schema.arguments, args, strict=True):
        kind = str(argument.type)
        values = value if "List" in kind and isinstance(value, (list, tuple)) else [value]
        for item in values:
            if "Tensor" in kind and not isinstance(item, Tensor):
                return ValueError(f"{name}: got a {type(item).__name__} as {argument.name}, expected a tensor")
            if isinstance(item, Tensor) and item.is_nested:
                return ValueError(f"{name}: got a nested tensor as {argument.name}; pass the tensor of its values")
            if isinstance(item, dtensor_class):
                return ValueError(f"{name}: got a DTensor as {argument.name}; pass the rank's own tensor, .to_local()")
            if isinstance(item, Tensor) and argument.is_write and (item.is_conj() or item.is_neg()):
                return ValueError(f"{name}: {argument.name} is a lazily conjugated or negated view; pass what it views")
            if isinstance(item, torch.dtype) and "Not yet supported ScalarType" in str(error):
                return ValueError(
                    f"{name}: got {argument.name}={item}, which LibTorch's stable ABI does not pass on; leave it out, "
                    "and take a view of the bytes as that dtype"
                )
            # A dtype is an int to the schema.
            if "int" in kind and not isinstance(item, torch.dtype):
                if not isinstance(item, int) or not -(2**63) <= item < 2**63:
                    return ValueError(f"{name}: got {item!r} in {argument.name}, expected an int64")
    return _in_python(name, error)


def _in_python(name: str, error: RuntimeError) -> Exception:
    if type(error) is not RuntimeError:  # torch's own kinds: a lost peer is a DistBackendError
        return error
    # From torch 2.15 on a std::invalid_argument or std::overflow_error of C++ (csrc/core/check.h) is a RuntimeError.
    text = str(error)
    if " overflows int64: " in text:
        return OverflowError(text)
    return ValueError(text) if text.startswith(f"{name}: ") and "CUDA says" not in text else error
