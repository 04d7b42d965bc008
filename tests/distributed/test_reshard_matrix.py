"""Models with their optimizer saved on every mesh and loaded on every other, to the bit.

Each layout saves once in one world; each target then loads all of these checkpoints within one world. The truth is the
unsharded model after the same steps, trained in one process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    BY_NAME,
    EVEN,
    LAYOUTS,
    UNEVEN,
    Layout,
    Sizes,
    build_mesh,
    build_model,
    build_optimizer,
    build_whole,
    differences,
    poison,
    refused_by_fsdp,
    shard_index,
    trained,
    training_state,
    training_truth,
)
from tier import TIER
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import torchtitan_ext as tte

# One process without any process group.
WHOLE = Layout("whole", (1,), ())


@dataclass(frozen=True)
class Row:
    """One model on one mesh."""

    layout: Layout
    sizes: Sizes

    def __str__(self) -> str:
        return f"{self.layout.name}-{self.sizes.name}"


EVERY_ROW = [
    Row(layout, sizes) for sizes in (EVEN, UNEVEN) for layout in [WHOLE, *LAYOUTS] if not refused_by_fsdp(layout, sizes)
]
# The one row of eight ranks at commit: some of them hold empty shards of uneven dims.
OF_EIGHT = Row(BY_NAME["fsdp4_tp2"], UNEVEN)
FEW = {"whole-uneven", "fsdp4-uneven", "tp2-uneven", "fsdp2_tp2-uneven", "hsdp2x2-uneven", str(OF_EIGHT)}
FEW |= {"fsdp2-even", "fsdp2_tp2_dim1-even", "tp4-even"}
ROWS = [row for row in EVERY_ROW if TIER != "commit" or str(row) in FEW]


def build(row: Row, seed: int) -> nn.Module:
    return build_whole(row.sizes, seed) if not row.layout.axes else build_model(row.layout, row.sizes, seed)


def save_row(rank: int, world_size: int, row: Row, path: Path) -> list[str]:
    state = trained(build(row, seed=0))
    lines = differences(state, training_truth(row.sizes))
    dcp.save(state, checkpoint_id=path, planner=tte.SavePlanner())
    return lines


def load_rows(rank: int, world_size: int, row: Row, paths: dict[str, Path]) -> list[str]:
    model = build(row, seed=1)
    optimizer = build_optimizer(model, lr=0.5)
    truth = training_truth(row.sizes)
    lines = []
    for source, path in paths.items():
        state = training_state(model, optimizer)
        poison(state)
        dcp.load(state, checkpoint_id=path, planner=tte.LoadPlanner())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        lines += [f"from {source}: {line}" for line in differences(training_state(model, optimizer), truth)]
    return lines


def run_row(run_world: Any, function: Any, row: Row, *args: Any) -> list[str]:
    """All differences of all ranks."""
    has_group = row.layout.axes != ()
    answers = run_world(row.layout.world_size, function, row, *args, process_group=has_group)
    return [f"rank {rank} {line}" for rank, lines in enumerate(answers) for line in lines]


@pytest.fixture(scope="module")
def saved(run_world, tmp_path_factory) -> dict[Row, Path | BaseException]:
    """The checkpoint of every row, or the error that its save raised."""
    folder = tmp_path_factory.mktemp("matrix")
    outcomes: dict[Row, Path | BaseException] = {}
    for row in ROWS:
        try:
            assert run_row(run_world, save_row, row, folder / str(row)) == []
            outcomes[row] = folder / str(row)
        except BaseException as error:  # noqa: B036 (DCP's own error is no Exception)
            if isinstance(error, KeyboardInterrupt):
                raise
            outcomes[row] = error
    return outcomes


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_save(saved: dict[Row, Path | BaseException], row: Row) -> None:
    outcome = saved[row]
    if not isinstance(outcome, Path):
        raise outcome


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_load_from_every_other(run_world, saved: dict[Row, Path | BaseException], row: Row) -> None:
    paths = {
        str(source): outcome
        for source, outcome in saved.items()
        if source.sizes == row.sizes and isinstance(outcome, Path)
    }
    assert paths, "no layout could be saved"
    assert run_row(run_world, load_rows, row, paths) == []


VOCABS = [50257, 32001, 128257]


def vocab_truth(vocab: int) -> dict[str, torch.Tensor]:
    return {"0.weight": torch.arange(2.0 * vocab).view(vocab, 2)}


def embedding(layout: Layout, vocab: int) -> dict[str, DTensor]:
    """The embedding of a model whose other tensors are tiny, with the values of the truth."""
    mesh = build_mesh(layout)
    model = nn.Sequential(nn.Embedding(vocab, 2))
    model.load_state_dict(vocab_truth(vocab))
    if "tp" in layout.axes:
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    if "dp" in layout.axes:
        fully_shard(model, mesh=mesh["dp"])
    return model.state_dict()


def save_vocabs(rank: int, world_size: int, layout: Layout, folder: Path) -> None:
    for vocab in VOCABS:
        dcp.save(embedding(layout, vocab), checkpoint_id=folder / str(vocab), planner=tte.SavePlanner())


def load_vocabs(rank: int, world_size: int, layout: Layout, folder: Path) -> list[str]:
    lines = []
    for vocab in VOCABS:
        state = embedding(layout, vocab)
        poison(state)
        dcp.load(state, checkpoint_id=folder / str(vocab), planner=tte.LoadPlanner())
        lines += [f"{vocab}: {line}" for line in differences(state, vocab_truth(vocab))]
    return lines


def local_shapes(rank: int, world_size: int, row: Row) -> list[tuple[int, ...]]:
    return [tuple(shard_index(tensor).shape) for tensor in build(row, seed=0).state_dict().values()]


def test_the_row_of_eight_ranks_has_empty_shards(run_world) -> None:
    shapes = [shape for answer in run_world(8, local_shapes, OF_EIGHT) for shape in answer]
    assert any(0 in shape for shape in shapes)


def test_real_vocabularies_at_dp2_tp2(run_world, tmp_path: Path) -> None:
    run_world(4, save_vocabs, BY_NAME["fsdp2_tp2"], tmp_path)
    for name in ["fsdp2_tp2", "fsdp4", "tp2"]:
        world_size = BY_NAME[name].world_size
        assert run_world(world_size, load_vocabs, BY_NAME[name], tmp_path) == [[]] * world_size
    for vocab in VOCABS:
        state = {"0.weight": torch.zeros(vocab, 2)}
        dcp.load(state, checkpoint_id=tmp_path / str(vocab), planner=tte.LoadPlanner(), no_dist=True)
        assert differences(state, vocab_truth(vocab)) == []
