"""Every kind of value that the installed torch's default planners take for a tensor, saved by stock's and our planner.

What stock asks of a value is read from its source: a question that this file has no kinds for fails the first test, as
a torch that lets another kind of value describe itself would (2.14 did, with ``CheckpointableTensor``).
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from boxed_tensors import CASES, cut, parts, whole_of
from reference import same_bits
from states import without_strides
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import default_planner, planner_helpers, utils
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchtitan_ext as tte

# Where stock asks what kind of value it has, and what the value is called there.
ASKED = {
    planner_helpers._create_write_items: "object",
    planner_helpers._create_default_metadata_only_plan: "obj",
    planner_helpers._create_chunk_list: "tensor",
    planner_helpers._create_read_items: "obj",
    planner_helpers._iterate_state_dict: "iter_object",
    default_planner.create_default_local_save_plan: "obj",
    default_planner.create_default_local_load_plan: "obj",
    utils.find_state_dict_object: "obj",
    utils.find_tensor_shard: "tensor",
}

WHOLE = whole_of((7, 4))


class Hooked(torch.Tensor):
    """Holds the rows from ``begin`` on of ``WHOLE``, and says so through DCP's hooks."""

    begin: int

    @staticmethod
    def of(begin: int, end: int) -> "Hooked":
        tensor = WHOLE[begin:end].clone().as_subclass(Hooked)
        tensor.begin = begin
        return tensor

    def size(self, *dim: int) -> Any:
        return torch.Size(WHOLE.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((self.begin, 0)), torch.Size(self.as_subclass(torch.Tensor).shape))]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(WHOLE.shape))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets, 0), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def hooked(rank: int) -> dict[str, Any]:
    return {"hooked": Hooked.of(*((0, 3), (3, 7))[rank])}


def sharded(rank: int) -> dict[str, Any]:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    made = {"sharded": sharded_tensor.empty(spec, *WHOLE.shape)}
    for tensor in made.values():
        for shard in tensor.local_shards():
            begin, _ = shard.metadata.shard_offsets
            shard.tensor.copy_(WHOLE[begin : begin + shard.metadata.shard_sizes[0]])
    return made


def dtensors(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    made = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE.to(torch.bfloat16), mesh, [Shard(1)]),
        "replicated": distribute_tensor(WHOLE, mesh, [Replicate()]),
        "trained": distribute_tensor(WHOLE, mesh, [Shard(0)]),
    }
    made["trained"].requires_grad_()
    return made


def plain(rank: int) -> dict[str, Any]:
    attributed: Any = WHOLE.clone()
    attributed.global_shape = (1, 2)  # alone it describes nothing
    dtypes = {str(dtype): WHOLE.to(dtype) for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64)}
    return {"parameter": torch.nn.Parameter(WHOLE.clone()), "scalar": WHOLE[2, 1], "attributed": attributed, **dtypes}


def checkpointable(rank: int) -> dict[str, Any]:
    cases = {case: boxes for case, (_, boxes) in CASES.items() if len(boxes) == 2}
    made = {case: cut(whole_of(CASES[case][0]), boxes[rank]) for case, boxes in cases.items()}
    made["trained"] = cut(WHOLE, [[((0, 0), (3, 4))], [((3, 0), (4, 4))]][rank]).requires_grad_()
    return made


# What stock asks of a value, and values of which it is true; those that are no tensors have none.
KINDS: dict[str, Callable[[int], dict[str, Any]] | None] = {
    "hasattr __create_write_items__": hooked,
    "hasattr __create_chunk_list__": hooked,
    "hasattr __get_tensor_shard__": hooked,
    "isinstance ShardedTensor": sharded,
    "isinstance DTensor": dtensors,
    "_is_checkpointable_tensor": checkpointable,
    "isinstance torch.Tensor": plain,
    "isinstance dict": None,
    "isinstance list": None,
    "isinstance tuple": None,
    "isinstance int": None,
    "isinstance float": None,
    "isinstance str": None,
    "isinstance bytes": None,
    "isinstance io.BytesIO": None,
    "getattr size": None,  # of what a value's shape is compared with
}


def questions(function: Callable[..., Any], value: str) -> set[str]:
    """What a function of stock asks of the value of this name: what it calls with it in conditions, and its class,
    attributes and type anywhere but in messages of errors."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    conditions = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    in_conditions = {id(node) for condition in conditions for node in ast.walk(condition)}
    in_errors = {id(node) for error in ast.walk(tree) if isinstance(error, ast.Raise) for node in ast.walk(error)}
    asked = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Match) and ast.unparse(node.subject) == value:
            asked.add("match")
        if not isinstance(node, ast.Call) or not node.args or ast.unparse(node.args[0]) != value:
            continue
        called = ast.unparse(node.func)
        if called == "isinstance":
            classes = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            asked |= {f"isinstance {ast.unparse(one)}" for one in classes}
        elif called in ("hasattr", "getattr"):
            asked.add(f"{called} {ast.literal_eval(node.args[1])}")
        elif id(node) in in_conditions or (called == "type" and id(node) not in in_errors):
            asked.add(called)
    return asked


def all_questions() -> set[str]:
    return set().union(*(questions(function, value) for function, value in ASKED.items()))


def test_all_that_stock_asks_of_a_value_is_known_here() -> None:
    asked = all_questions()
    unknown = asked - KINDS.keys()
    assert not unknown, (
        f"torch {torch.__version__} knows more kinds of values: {unknown}; add them, and follow or refuse them"
    )
    # What each of these functions must ask: a question that moves elsewhere must not go unseen.
    assert {"isinstance ShardedTensor", "isinstance torch.Tensor"} <= questions(
        planner_helpers._create_write_items, "object"
    )
    assert {"hasattr __create_chunk_list__", "isinstance torch.Tensor"} <= questions(
        planner_helpers._create_chunk_list, "tensor"
    )
    assert "hasattr __get_tensor_shard__" in questions(utils.find_tensor_shard, "tensor")


def test_a_question_that_nobody_knows_is_found() -> None:
    asked = {"_is_new", "types.is_newer", "isinstance A", "isinstance B", "hasattr c", "type", "match"}
    assert questions(_a_later_stock, "value") == asked


def _a_later_stock(value: Any, other: Any) -> Any:
    if _is_new(value) or (other and not types.is_newer(value, 1)):  # type: ignore[name-defined]  # noqa: F821
        return [isinstance(value, (A, B)), hasattr(value, "c")]  # type: ignore[name-defined]  # noqa: F821
    match value:
        case 1:
            return known[type(value)]  # type: ignore[name-defined]  # noqa: F821
    return write(value), isinstance(other, D)  # type: ignore[name-defined]  # noqa: F821


def values_of(rank: int) -> dict[str, dict[str, Any]]:
    makers = {KINDS[question] for question in all_questions()} - {None}
    return {maker.__name__: maker(rank) for maker in sorted(makers, key=lambda maker: maker.__name__)}


def planned(rank: int, planner: Any, state: dict[str, Any]) -> tuple[list[Any], Any]:
    """What all ranks write, in the order of keys and boxes, and the metadata."""
    planner.set_up_planner(state, is_coordinator=rank == 0)
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan(plans)
    finals: list[Any] = [None, None]
    dist.all_gather_object(finals, planner.finish_plan(global_plans[rank]))
    items = sorted(
        (item.index.fqn, tuple(item.index.offset), item.type.name, data.chunk.sizes, str(data))
        for final in finals
        for item in final.items
        for data in [replace(item.tensor_data, properties=without_strides(item.tensor_data.properties))]
    )
    return [item for item in items if item[3].numel() > 0], metadata.state_dict_metadata


def described(entry: Any) -> tuple[Any, ...]:
    chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks if chunk.sizes.numel() > 0}
    return entry.size, without_strides(entry.properties), chunks


def compare_with_stock(rank: int, world_size: int, path: Path) -> list[str]:
    differences = []
    state = values_of(rank)
    theirs, their_metadata = planned(rank, DefaultSavePlanner(), state)
    ours, our_metadata = planned(rank, tte.SavePlanner(), state)
    differences += [f"items {one}" for one in {*theirs} ^ {*ours}]
    differences += [f"only one metadata has {fqn}" for fqn in their_metadata.keys() ^ our_metadata.keys()]
    for fqn in their_metadata.keys() & our_metadata.keys():
        if described(their_metadata[fqn]) != described(our_metadata[fqn]):
            differences.append(f"metadata of {fqn}: {their_metadata[fqn]}, ours {our_metadata[fqn]}")
    dcp.save(state, checkpoint_id=path / "stock", planner=DefaultSavePlanner())
    dcp.save(state, checkpoint_id=path / "ours", planner=tte.SavePlanner())
    for folder in ("stock", "ours"):
        for planner in (DefaultLoadPlanner, tte.LoadPlanner):
            targets = emptied(values_of(rank))
            dcp.load(targets, checkpoint_id=path / folder, planner=planner())
            differences += [
                f"{planner.__module__} reads {kind}.{name} of {folder}"
                for kind, members in state.items()
                for name, value in members.items()
                if not all(same_bits(*pair) for pair in zip(memory(value), memory(targets[kind][name]), strict=True))
            ]
    return differences


def emptied(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for local in (local for members in state.values() for value in members.values() for local in memory(value)):
        local.zero_()
    return state


def memory(value: Any) -> list[torch.Tensor]:
    """This rank's memory of a value: of one with boxes of its own these, as padding is nobody's."""
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    if hasattr(value, "local_sizes"):
        return parts(value)
    local = value.to_local() if hasattr(value, "to_local") else value
    return [local.detach().as_subclass(torch.Tensor)]


def test_our_items_metadata_and_values_are_those_of_stock(run_world, tmp_path: Path) -> None:
    for differences in run_world(2, compare_with_stock, tmp_path):
        assert differences == []
