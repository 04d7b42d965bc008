"""What others set by `torch.set_default_device` and `torch.set_default_dtype` is nothing that ours follow."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, IndexedStreams, PackedTokens, RngState
from torchtitan_ext.elastic.rng import _bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn]


@contextmanager
def other_defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def state_of(mesh: DeviceMesh, fill: int) -> dict[str, Any]:
    """Sharded, replicated and plain tensors; more keys than the first message has room for."""
    numbers = torch.arange(21).reshape(7, 3) * fill
    model: dict[str, Any] = {
        f"{str(dtype).removeprefix('torch.')}.{name}": tte.full.distribute_tensor(numbers.to(dtype), mesh, [placement])
        for dtype in DTYPES
        for name, placement in (("rows", Shard(0)), ("replicated", Replicate()))
    }
    model |= {f"plain.{i}": torch.full((5,), float(fill + i)) for i in range(40)}
    strided = torch.arange(40.0).reshape(4, 10)[:, ::2] * fill
    return {"model": model, "strided": strided, "scalar": torch.tensor(fill), "step": fill, "lr": 0.1 * fill}


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The bytes of all tensors, and the values of the rest."""

    def bytes_of(tensor: torch.Tensor) -> bytes:
        full = tte.full_tensor(tensor)
        assert full.device.type == "cpu"
        return full.reshape(-1).view(torch.uint8).numpy().tobytes()

    flat = {**state, **state["model"]}
    del flat["model"]
    return {key: bytes_of(value) if isinstance(value, torch.Tensor) else value for key, value in flat.items()}


def everything(rank: int, world_size: int, folder: Path) -> None:
    # A mesh in another order of ranks: rows are sorted by an index.
    mesh = DeviceMesh("cpu", list(reversed(range(world_size))))
    state, other = state_of(mesh, 3), state_of(mesh, 1)
    expected, fingerprint = whole(state), tte.fingerprint(state).total
    module = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40))
    with other_defaults():
        assert whole(state) == expected
        assert tte.fingerprint(state).total == fingerprint
        tte.save(state, folder / "step-1")
        tte.load(other, folder / "step-1")
        assert whole(other) == expected
        tte.async_save(state, folder / "step-2").result()
        tte.load(other, folder, step="last-good")
        assert whole(other) == expected
        assert tte.check_replicas(state, mesh=mesh) == ()
        with torch.no_grad():
            module[0].weight += rank
        assert len(tte.check_replicas(module, mesh)) == 1
        tte.sync_module_states(module, mesh, verify=True)
        made = tte.full.distribute_tensor(state["strided"], mesh, [Shard(1)])
        assert isinstance(made, DTensor)
        assert torch.equal(tte.full_tensor(made), state["strided"])
        full = tte.full.get_full_state_dict(module)
        tte.full.set_full_state_dict(module, full)
        # A model that was built where nothing has memory.
        built = nn.Linear(3, 2)
        assert built.weight.is_meta
        weights = {"weight": torch.ones(2, 3, device="cpu"), "bias": torch.zeros(2, device="cpu")}
        tte.save({"built": weights}, folder / "step-3")
        tte.load({"built": built}, folder / "step-3")
        assert built.weight.device.type == "cpu" and built.weight.sum().item() == 6


def test_saves_loads_syncs_and_proofs_on_two_ranks(run_world, tmp_path: Path) -> None:
    run_world(2, everything, tmp_path)


def test_a_load_without_a_process_group_gives_memory(tmp_path: Path) -> None:
    tte.save({"w": torch.ones(3)}, tmp_path)
    with other_defaults():
        state = {"w": torch.empty(3)}
        tte.load(state, tmp_path)
        assert state["w"].tolist() == [1, 1, 1]


def served(data: Any, **options: Any) -> list[Any]:
    return list(ElasticDataLoader(data, batch_size=2, collate_fn=list, **options))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_and_their_order(num_workers: int) -> None:
    expected = served(range(9), shuffle=True)
    with other_defaults():
        assert served(range(9), shuffle=True, num_workers=num_workers) == expected


def test_packed_tokens_and_generators() -> None:
    documents = IndexedStreams([[1, 2, 3], [4, 5, 6, 7]], num_shards=1)
    rng = RngState(seed=1, world_size=1, rank=0)
    before = _bytes(torch.get_rng_state())
    with other_defaults():
        ((packed, labels),) = served(PackedTokens(documents, seq_len=2))[0][:1]
        assert packed["input"].tolist() == [1, 2] and labels.dtype == torch.int64
        state = rng.state_dict()
        rng.reset(step=3)
        rng.load_state_dict(state)
    assert _bytes(torch.get_rng_state()) == before
