"""Ranks that disagree get the same `SyncMismatchError` on all of them, before any data moved."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import EVEN, LAYOUTS, build_model, local_of
from tier import num_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchtitan_ext as tte
from torchtitan_ext.errors import Problem, SyncMismatchError, WrongArgumentError
from torchtitan_ext.sync import sync_state_dict
from torchtitan_ext.sync.same_call import CallTable, compare_tables

NUM_FUZZED = num_cases(1_000, 0.1)


def base(rank: int) -> dict[str, Any]:
    tensors = [torch.full((4, 6), float(rank)), torch.full((70_000,), float(rank)), torch.full((3,), rank)]
    return {"tensors": tensors}


def replace(position: int, tensor: Tensor) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        call["tensors"][position] = tensor

    return change


# What rank 1 does otherwise, and what the error must say.
MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (replace(0, torch.zeros(5, 6)), r"tensors\[0\]: shape is \(4, 6\) on rank"),
    "same-numel shape": (replace(0, torch.zeros(6, 4)), r"\(6, 4\) on rank 1"),
    "dtype of the same size": (replace(0, torch.zeros(4, 6, dtype=torch.int32)), r"dtype is torch.float32 on rank"),
    "dtype of another size": (replace(0, torch.zeros(4, 6, dtype=torch.bfloat16)), r"torch.bfloat16 on rank 1"),
    "one more": (
        lambda call: call["tensors"].append(torch.zeros(1)),
        r"tensors\[3\]: is a replica on cpu on rank 1, not",
    ),
    "one missing": (lambda call: call["tensors"].pop(), r"tensors\[2\]: is a replica .* not on rank 1"),
    "order": (lambda call: call["tensors"].reverse(), r"tensors\[0\]: shape is"),
    "empty list": (lambda call: call["tensors"].clear(), r"tensors\[0\]: is a replica"),
    "bucket boundary": (replace(1, torch.zeros(2**21 + 1)), r"tensors\[1\]: shape is \(70000,\) on rank"),
    "bucket size": (
        lambda call: call.update(bucket_bytes=1024),
        r"bucket_bytes: is 33554432 on rank.*, 1024 on rank 1",
    ),
    "other source": (lambda call: call.update(src=1), r"src: is 0 on rank.*, 1 on rank 1"),
    "source out of range": (lambda call: call.update(src=9), r"src: got 9, expected a rank of the group, 0 to"),
    "source of a wrong type": (lambda call: call.update(src="0"), r"src: got '0', expected a rank"),
    "bucket of no size": (lambda call: call.update(bucket_bytes=0), r"bucket_bytes: got 0, expected a positive int64"),
    "no list": (lambda call: call.update(tensors=torch.zeros(3)), r"tensors: is a Tensor, expected a list of tensors"),
    "expanded": (replace(0, torch.zeros(6).expand(4, 6)), r"tensors\[0\]: cannot be received into: several"),
    "overlapping": (
        lambda call: call["tensors"].__setitem__(2, call["tensors"][1][:6].view(torch.int64)),
        r"share memory and would both be received into",
    ),
    "meta": (replace(0, torch.zeros(4, 6, device="meta")), r"tensors\[0\]: is on the meta device"),
    "sparse": (replace(0, torch.zeros(4, 6).to_sparse()), r"tensors\[0\]: is sparse_coo"),
    "quantized": (
        replace(0, torch.quantize_per_tensor(torch.zeros(4, 6), 1.0, 0, torch.qint8)),
        r"tensors\[0\]: is quantized",
    ),
    "nested": (replace(0, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])), r"tensors\[0\]: is nested"),
    "conjugated": (replace(0, torch.zeros(4, 6, dtype=torch.cfloat).conj()), r"tensors\[0\]: is a lazily conjugated"),
    "negated": (replace(0, torch.zeros(4, 6, dtype=torch.cfloat).conj().imag), r"tensors\[0\]: is a lazily conjugated"),
    "uninitialized": (replace(0, nn.UninitializedParameter()), r"tensors\[0\]: cannot be read: ValueError"),
    "source in a tensor": (lambda call: call.update(src=torch.tensor(0)), r"src: got tensor\(0\), expected a rank"),
    "no tensor": (replace(0, "weights"), r"tensors\[0\]: is a str, expected a tensor"),  # type: ignore[arg-type]
    "one tied to another": (
        lambda call: call["tensors"].append(call["tensors"][0]),
        r"tensors: is a list of 3 .*, of 4 ",
    ),
    "two at once": (
        lambda call: (call["tensors"].pop(), call.update(bucket_bytes=64)),
        r"(?s)bucket_bytes: is .*tensors\[2\]: is a replica",
    ),
}


def run_mismatches(rank: int, world_size: int) -> dict[str, str]:
    texts = {}
    for name, (change, _) in MISMATCHES.items():
        call = base(rank)
        if rank == 1:
            change(call)
        tensors = call.pop("tensors")
        with pytest.raises(WrongArgumentError if name == "no list" else SyncMismatchError) as caught:
            tte.sync.broadcast_tensors(tensors, **call)
        texts[name] = str(caught.value)
        if rank != 1:
            assert all(bool((tensor == rank).all()) for tensor in tensors)
    # The group is still good, and the largest bucket no overflow.
    tensors = base(rank)["tensors"]
    tte.sync.broadcast_tensors(tensors, bucket_bytes=2**63 - 1)
    assert not any(tensor.any() for tensor in tensors)
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mismatch_is_the_same_error_everywhere(run_world, world_size: int) -> None:
    answers = run_world(world_size, run_mismatches)
    assert all(answer == answers[0] for answer in answers)
    for name, (_, pattern) in MISMATCHES.items():
        text = answers[0][name]
        assert text.startswith("broadcast_tensors refused, nothing was changed"), (name, text)
        assert re.search(pattern, text), (name, text)


DTYPES = [torch.float32, torch.int32, torch.bfloat16, torch.bool, torch.complex64]


def random_list(source: random.Random) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [
        (tuple(source.randint(0, 5) for _ in range(source.randint(0, 3))), source.choice(DTYPES))
        for _ in range(source.randint(1, 6))
    ]


def mutate(source: random.Random, specs: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Any]:
    """Another list: a dim, a dtype, an order, a count."""
    while True:
        changed = list(specs)
        at = source.randrange(len(changed))
        shape, dtype = changed[at]
        kind = source.randrange(5)
        if kind == 0 and shape:
            dim = source.randrange(len(shape))
            changed[at] = ((*shape[:dim], shape[dim] + source.choice([1, 2]), *shape[dim + 1 :]), dtype)
        elif kind == 1:
            changed[at] = (shape, source.choice(DTYPES))
        elif kind == 2:
            source.shuffle(changed)
        elif kind == 3:
            del changed[at]
        else:
            changed.insert(at, random_list(source)[0])
        if changed != specs:
            return changed


def fuzz(rank: int, world_size: int) -> list[str]:
    texts = []
    for seed in range(NUM_FUZZED):
        source = random.Random(seed)
        specs = random_list(source)
        odd_rank, changed = source.randrange(world_size), mutate(source, specs)
        mine = changed if rank == odd_rank else specs
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in mine]
        with pytest.raises(SyncMismatchError) as caught:
            tte.sync.broadcast_tensors(tensors, src=source.randrange(world_size))
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_fuzzed_mismatches(run_world, world_size: int) -> None:
    answers = run_world(world_size, fuzz)
    assert len(answers[0]) == NUM_FUZZED
    assert all(answer == answers[0] for answer in answers)


def module_mismatches(rank: int, world_size: int) -> list[str]:
    """Of modules: on rank 3 something is otherwise; the ranks of the other replica group hear of it too."""
    layout = next(layout for layout in LAYOUTS if layout.name == "hsdp2x2")
    texts = []

    def attempt(call: Callable[[], Any]) -> None:
        with pytest.raises(SyncMismatchError) as caught:
            call()
        texts.append(str(caught.value))

    model = build_model(layout, EVEN)
    before = {name: local_of(param).detach().clone() for name, param in model.named_parameters()}
    attempt(lambda: tte.sync_module_states(model, src=int(rank == 3)))
    attempt(lambda: tte.sync_module_states(model, buffers="none" if rank == 3 else "all"))
    attempt(lambda: tte.sync_module_states(model) if rank != 3 else tte.check_replicas(model))
    attempt(lambda: tte.sync_module_states(model, ignore=["head.*"] if rank == 3 else []))
    attempt(lambda: tte.sync_module_states(nn.Module() if rank == 3 else model))
    attempt(lambda: tte.sync_module_states(model, buffers=3 if rank == 3 else "all"))  # type: ignore[arg-type]
    attempt(lambda: tte.sync_module_states(model, ignore="head" if rank == 3 else []))
    attempt(lambda: tte.check_replicas({"w": torch.zeros(2 + (rank == 3))}, init_device_mesh("cpu", (4,))))
    if rank == 3:
        model.register_buffer("extra", torch.zeros(1))
    attempt(lambda: tte.sync_module_states(model))
    state = model.state_dict()
    attempt(lambda: sync_state_dict({} if rank == 3 else {"head": state["head.weight"]}))
    assert all(torch.equal(local_of(param), before[name]) for name, param in model.named_parameters())
    return texts


def test_modules_that_differ(run_world) -> None:
    answers = run_world(4, module_mismatches)
    assert all(answer == answers[0] for answer in answers)
    patterns = ["src: is 0 on ranks 0, 1, 2, 1 on rank 3", "buffers: is 'all' on ranks", "operation: is", "ignore: is"]
    patterns += [
        "embed.weight .and 9 more: .*: is a replica",
        "buffers is 3",
        "ignore is 'head'",
        r"w: shape is \(2,\) on ranks 0, 1, 2, \(3,\) on rank 3",
    ]
    patterns += ["extra: is a replica on cpu on rank 3, not on", "head: is a replica on cpu on rank 1, not on rank 3"]
    for text, pattern in zip(answers[0], patterns, strict=True):
        assert re.search(pattern, text), text


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="there is no process group"):
        tte.sync.broadcast_tensors([torch.zeros(1)])


def table(arguments: dict[str, str] | None = None, **changes: Any) -> CallTable:
    rows = [("a", {"shape": "(2,)"}), ("b", {"shape": "(3,)"})]
    return CallTable(
        **{
            "arguments": arguments or {"operation": "sync", "src": "0"},
            "problems": (),
            "batches": {KEY: rows},
            **changes,
        }
    )


KEY = (0, (4, 6), "cpu")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (table(), []),
        (table({"operation": "sync", "src": "1"}), ["src: is 0 on rank 4, 1 on rank 6"]),
        (table({"operation": "check"}), ["operation: is sync on rank 4, check on rank 6"]),
        (
            table(batches={KEY: [("a", {"shape": "(9,)"}), ("b", {"shape": "(3,)"})]}),
            ["a: shape is (2,) on rank 4, (9,)"],
        ),
        (table(batches={KEY: [("a", {"shape": "(2,)"})]}), ["b: is a replica on cpu on rank 4, not on rank 6"]),
        (
            table(batches={KEY: [("a", {"shape": "(2,)"})]}, tied={"b": "a"}),
            ["b: has the memory of a on rank 6, memory of"],
        ),
        (table(batches={KEY: table().batches[KEY][::-1]}), ["a: is at position 0 on rank 4, in other order on rank 6"]),
        (table(problems=(Problem("cannot_sync", "c", "is sparse"),)), ["c: is sparse"]),
    ],
)
def test_compared_tables(other: CallTable, expected: list[str]) -> None:
    found = compare_tables({4: table(), 6: other})
    assert len(found) == len(expected)
    assert all(str(problem).startswith(text) for problem, text in zip(found, expected, strict=True))


def test_a_rank_of_the_group_that_is_not_asked() -> None:
    (problem,) = compare_tables({4: table()})
    assert str(problem) == "group: rank 6 of the group ranks 4, 6 take no part in this call"
