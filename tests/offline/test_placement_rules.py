"""How tensors of a checkpoint are placed on a mesh of which names and sizes are known."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext.checkpoint.tables.component import WORLD_KEY
from torchtitan_ext.errors import LayoutError
from torchtitan_ext.layout.layout import local_shards
from torchtitan_ext.offline.placement_rules import PlacementRules, parse_mesh, parse_rules
from torchtitan_ext.storage.metadata.dcp_objects import saved_chunks, state_of

FSDP_TP = [(1, 0, 1), (0, 0, 1)]  # tp on dim 0, then dp on dim 0
ROWWISE = [(1, 1, 1), (0, 0, 1)]
FSDP_ALONE = [(0, 0, 1)]


def metadata_of(tensors: Mapping[str, tuple[tuple[int, ...], Any]], mesh: Mapping[str, int] | None) -> Metadata:
    """A checkpoint of tensors (shape, steps) that a mesh saved; a list of boxes for steps stands for itself."""
    entries = {}
    for fqn, (shape, steps) in tensors.items():
        sizes = (4, 2) if mesh is None else tuple(mesh.values())
        boxes = {(c.offsets, c.sizes) for shard in local_shards(shape, sizes, steps) for c in shard.chunks}
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in sorted(boxes)]
        entries[fqn] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
    world = {} if mesh is None else {WORLD_KEY: {"size": torch.Size(mesh.values()).numel(), "mesh": dict(mesh)}}
    return Metadata(entries, planner_data=world)


def placed(metadata: Metadata, mesh: Mapping[str, int], rules: Any = None) -> dict[str, Any]:
    found = PlacementRules(mesh, rules, saved=state_of(metadata))
    chunks = saved_chunks(metadata)
    return {fqn: found.place(fqn, entry.size, chunks.find(fqn)) for fqn, entry in metadata.state_dict_metadata.items()}


SAVED = metadata_of(
    {
        "wq": ((9, 6), FSDP_TP),  # uneven, so that only the nested order has these boxes
        "wo": ((8, 6), ROWWISE),
        "norm": ((16,), FSDP_ALONE),
        "router": ((8, 4), FSDP_ALONE),
        "step": ((), ()),
        "freqs": ((32, 2), ()),
    },
    {"dp": 4, "tp": 2},
)


def test_axes_cut_the_dims_that_they_cut_in_the_save() -> None:
    found = placed(SAVED, {"dp": 2, "tp": 4})
    assert found["wq"].placements == ((0, 4), (0, 1))
    assert found["wq"].steps == ((1, 0, 1), (0, 0, 1))
    assert found["wo"].placements == ((0, 1), (1, 1))
    assert found["norm"].placements == found["router"].placements == ((0, 1), (-1, 1))
    assert found["step"].placements is None
    assert found["freqs"].placements is None  # four ranks saved it whole: no parameter
    assert not any(one.is_assumed for one in found.values())


def test_a_tp_axis_that_the_save_had_not_is_assumed_to_cut_rows_of_matrices() -> None:
    saved = metadata_of({"w": ((8, 6), FSDP_ALONE), "norm": ((16,), FSDP_ALONE)}, {"dp": 4})
    found = placed(saved, {"dp": 2, "tp": 2})
    assert found["w"].placements == ((0, 2), (0, 1))
    assert found["norm"].placements == ((0, 1), (-1, 1))
    assert found["w"].is_assumed
    stated = placed(saved, {"dp": 2, "tp": 2}, {"w": {"tp": 1}})
    assert stated["w"].placements == ((0, 1), (1, 1))
    assert not stated["w"].is_assumed


def test_a_save_of_stock_shows_its_grid_alone() -> None:
    saved = metadata_of({"wo": ((8, 6), ROWWISE), "w": ((8, 6), FSDP_TP)}, None)
    found = placed(saved, {"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert found["wo"].placements == ((-1, 1), (0, 1), (1, 1))
    assert found["w"].placements == ((-1, 1), (0, 2), (0, 1))
    assert found["w"].is_assumed
    assert not found["wo"].is_assumed


def test_rules_win_and_reach_optimizer_state() -> None:
    shape = (8, 6)
    saved = metadata_of({f"optimizer.state.layers.0.{name}.exp_avg": (shape, FSDP_TP) for name in ("wo", "w1")}, None)
    found = placed(saved, {"dp": 2, "tp": 2}, {"wo": {"tp": 1}, "layers.*": {"tp": None, "dp": -1}})
    assert found["optimizer.state.layers.0.wo.exp_avg"].placements == ((0, 1), (1, 1))
    assert found["optimizer.state.layers.0.w1.exp_avg"].placements == ((1, 1), (-1, 1))


def test_shards_are_those_of_the_ranks_in_order() -> None:
    rules = PlacementRules({"dp": 4, "tp": 2})
    shards = local_shards((9, 3), rules.mesh.shape, rules.place("w", (9, 3)).steps)
    assert [shard.sizes[0] for shard in shards] == [2, 1, 2, 1, 1, 1, 0, 1]
    assert shards[1].chunks[0].offsets == (5, 0)


def test_axes_of_several_meshes_are_not_taken_for_one() -> None:
    saved = metadata_of({"w": ((8, 6), FSDP_TP)}, {"dp": 4, "tp": 2})
    saved.planner_data[WORLD_KEY]["mesh"] = {"dp": 4, "tp": 2, "dp_mod_ep": 1 << 40, "ep": 8}
    assert placed(saved, {"dp": 2, "tp": 2})["w"].is_assumed


@pytest.mark.parametrize("record", [7, {"size": "many", "mesh": 3}, {"size": 8, "mesh": {3: 4, "dp": -1}}, [], None])
def test_a_world_that_is_none_is_unknown(record: object) -> None:
    saved = metadata_of({"w": ((8, 6), FSDP_TP)}, {"dp": 4, "tp": 2})
    saved.planner_data[WORLD_KEY] = record
    assert placed(saved, {"dp": 2, "tp": 2})["w"].placements == ((0, 2), (0, 1))


def test_meshes_and_rules_as_text() -> None:
    assert parse_mesh("dp=8, tp=2") == {"dp": 8, "tp": 2}
    assert parse_rules(["*.wo.weight=tp:1,dp:0", "*norm*=tp:none"]) == {
        "*.wo.weight": {"tp": 1, "dp": 0},
        "*norm*": {"tp": None},
    }
    for text in ("", "dp", "dp=x", "dp=2,dp=4", "dp=-1"):
        with pytest.raises(ValueError, match="expected axes and sizes such as dp=8,tp=2"):
            parse_mesh(text)
    for text in ("", "w", "w=tp", "=tp:1", "w=tp:x"):
        with pytest.raises(ValueError, match="expected a glob, axes and dims"):
            parse_rules([text])


@pytest.mark.parametrize(
    ("mesh", "rules", "error", "words"),
    [
        ({}, None, ValueError, "got no axes"),
        ({"dp": 0}, None, ValueError, "got dp=0, expected at least 1"),
        ({"dp": True}, None, TypeError, "sizes of named axes"),
        ("dp=8", None, TypeError, "sizes of named axes"),
        ({"pp": 2, "dp": 2}, None, ValueError, "stages of a pipeline hold different keys; leave it out"),
        ({"ring": 2}, None, ValueError, "nothing says what the axis 'ring' cuts"),
        ({"dp": 2}, {"w": {"tp": 1}}, ValueError, "names axis 'tp', the mesh has dp"),
        ({"dp": 2}, {"w": 1}, TypeError, "dims of axes by glob"),
        ({"dp": 2}, {"w": {"dp": "0"}}, TypeError, "dims of axes by glob"),
    ],
)
def test_descriptions_that_are_refused(mesh: Any, rules: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PlacementRules(mesh, rules)


def test_a_rule_skips_what_lacks_its_dim() -> None:
    """AdamW has a step without dims beside the moments of each parameter."""
    rules = PlacementRules({"dp": 2, "tp": 2}, {"w": {"tp": 1}})
    rules.check_used({"state.w.exp_avg": (4, 4), "state.w.step": (), "note": None})
    assert rules.place("state.w.exp_avg", (4, 4)) == PlacementRules({"dp": 2, "tp": 2}, {"w": {"tp": -1}}).place(
        "w", (4, 4)
    )
    for shape in ((), (4,)):
        assert rules.place("state.w.step", shape) == PlacementRules({"dp": 2, "tp": 2}).place("w", shape)


def test_rules_for_nothing_are_refused() -> None:
    rules = PlacementRules({"ring": 2, "dp": 2}, {"w": {"ring": 2, "dp": 0}, "note": {"ring": 0, "dp": None}})
    with pytest.raises(LayoutError) as caught:
        rules.check_used({"layers.w": (4, 4), "note": None})
    assert [problem.detail for problem in caught.value.problems] == [
        "cuts nothing by ring: no tensor that it matches has dim 2; it matches layers.w [4, 4]",
        "cuts nothing by ring: no tensor that it matches has dim 0; it matches values that are no tensors",
    ]
    with pytest.raises(LayoutError, match="note: matches no key"):
        rules.check_used({"layers.w": (4, 4, 4), "layers.wo": (4,)})
