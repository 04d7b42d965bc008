"""What stock PyTorch does with these layouts: the oracle agrees with FSDP2, and stock DCP is still wrong.

A newer torch may do better: then the test of the fault is skipped, and what the package works around can be looked at
again. https://github.com/pytorch/pytorch/issues/168134
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    EVEN,
    LAYOUTS,
    UNEVEN,
    Layout,
    Sizes,
    build_handmade,
    build_model,
    build_whole,
    differences,
    left_to_right,
    poison,
    refused_by_fsdp,
    strided,
)
from tier import TIER
from torch.distributed.checkpoint.api import CheckpointException

BUILT = [layout for layout in LAYOUTS if TIER != "commit" or layout.world_size <= 4]


def differences_of_built_model(rank: int, world_size: int, layout: Layout, sizes: Sizes) -> list[str]:
    return differences(build_model(layout, sizes).state_dict(), build_whole(sizes).state_dict())


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("layout", BUILT, ids=lambda layout: layout.name)
def test_oracle_knows_what_fsdp_and_tp_build(run_world, layout: Layout, sizes: Sizes) -> None:
    if refused_by_fsdp(layout, sizes):
        with pytest.raises(NotImplementedError, match="FSDP does not support uneven sharding on dim 1"):
            run_world(layout.world_size, differences_of_built_model, layout, sizes)
    else:
        for lines in run_world(layout.world_size, differences_of_built_model, layout, sizes):
            assert lines == []


def save_with_stock(rank: int, world_size: int, layout: Layout, sizes: Sizes, path: Path) -> None:
    dcp.save({"model": build_model(layout, sizes).state_dict()}, checkpoint_id=path)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("vocab", [33, 9, 17])
def test_stock_cannot_save_or_cannot_load_uneven_2d(run_world, tmp_path: Path, vocab: int) -> None:
    layout = Layout("fsdp4_tp2", (4, 2), ("dp", "tp"))
    sizes = Sizes("uneven_vocab", vocab=vocab, hidden=16, feed_forward=32)
    state = build_whole(sizes).state_dict()
    poison(state)
    try:
        run_world(8, save_with_stock, layout, sizes, tmp_path)
        dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    except CheckpointException:
        # 33 rows are refused by the save; 9 and 17 rows are written, and then no other mesh can load them.
        assert (tmp_path / ".metadata").exists() == (vocab != 33)
    else:
        assert differences(state, build_whole(sizes).state_dict()) == []
        pytest.skip("stock DCP of this torch saves and loads uneven 2D")


def stock_round_trip_of_several_boxes(rank: int, world_size: int, path: Path) -> list[str]:
    truth = {"weight": torch.arange(36.0).view(12, 3)}
    if rank == 0:
        dcp.save(truth, checkpoint_id=path, no_dist=True)
    torch.distributed.barrier()
    layout = left_to_right("strided_1d", (2,), strided(0, 3))
    state = build_handmade(layout, truth)
    poison(state)
    dcp.load(state, checkpoint_id=path)
    return differences(state, truth, list(layout.steps))


def test_stock_loads_several_boxes_silently_wrong(run_world, tmp_path: Path) -> None:
    lines = run_world(2, stock_round_trip_of_several_boxes, tmp_path)
    if lines == [[], []]:
        pytest.skip("stock DCP of this torch loads shards of several boxes")
    assert any("elements differ" in line for line in sum(lines, []))
