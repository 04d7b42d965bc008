"""Worlds for bench_plan.py: what each rank of them holds. Tensors are described; memory is had only by ``state``."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from llama_405b import SIZES, Placements, list_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.tables.key_table import (
    SMALL_TENSOR_BYTES,
    EncodedTable,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    RankTable,
    TensorEntry,
    encode_table,
    local_bytes,
    pack,
)
from torchtitan_ext.layout.layout import MeshLayout, ShardReport, candidate_steps, is_on_part, is_replicated, shard_of

TP = 8
NUM_STAGES = 8
NUM_EXPERTS = 128
MODELS = [*SIZES, "MoE"]
Standing = tuple[MeshLayout, tuple[int, ...]]
"""A mesh, and where a rank stands on it."""


class Held(NamedTuple):
    """A tensor of which a rank holds a part; a plain one where there are no placements."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    placements: Placements = ()
    mesh: str = ""


@dataclass(frozen=True)
class Case:
    """A state on a world. Ranks of one group hold alike: they differ in where they stand only.

    Attributes:
        name: As the table has it.
    """

    name: str
    num_ranks: int

    def group(self, rank: int) -> Any:
        """Equal on ranks with equal keys."""
        return 0

    def replica(self, rank: int) -> Any:
        """Equal on ranks of a group whose replicated values are of the same shards."""
        return 0

    def tensors(self, rank: int) -> Iterator[Held]:
        """The tensors of a rank."""
        return iter(())

    def objects(self, rank: int) -> Mapping[tuple[str, ...], Any]:
        """Other values of a rank, by path."""
        return {}

    def standings(self, rank: int) -> Mapping[str, Standing]:
        """The meshes of a rank's tensors, by name."""
        return {}

    def table(self, rank: int, tensors: Iterable[Held] | None = None) -> KeyTable:
        """What a rank holds, or these tensors of it; without digests."""
        entries: dict[str, KeyEntry] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        standings = self.standings(rank)
        known: dict[Any, TensorEntry] = {}
        for path, *kind in self.tensors(rank) if tensors is None else tensors:
            if tuple(kind) not in known:
                known[tuple(kind)] = _entry(*kind, standings)
            entries[".".join(path)], paths[".".join(path)] = known[tuple(kind)], path
        for path in self.objects(rank) if tensors is None else ():
            entries[".".join(path)], paths[".".join(path)] = ObjectEntry(), path
        return KeyTable(entries, stock_paths=paths)

    def digests(self, rank: int, table: KeyTable) -> dict[str, bytes]:
        """Digests as a planner takes them, of values that are equal where they should be."""
        digests: dict[str, bytes] = {}
        for name, entry in table.entries.items():
            if isinstance(entry, ObjectEntry):
                digests[name] = hashlib.blake2b(f"{name} {self.group(rank)}".encode(), digest_size=16).digest()
            elif isinstance(entry, TensorEntry) and entry.report.mesh is None:
                digests[name] = b"plain tensors: 3"
            elif isinstance(entry, TensorEntry):
                is_on_several = is_on_part(entry.report, self.num_ranks)
                is_small = is_replicated(entry.report) and local_bytes(entry) <= SMALL_TENSOR_BYTES
                if is_on_several or is_small:
                    shard = [
                        at
                        for at, (dim, _) in zip(entry.report.coordinate, entry.report.placements, strict=True)
                        if dim >= 0
                    ]
                    digests[name] = hashlib.blake2b(f"{name} {shard}".encode(), digest_size=16).digest()
        return digests

    def messages(self, *, with_digests: bool = True) -> list[RankTable]:
        """What all ranks send. The part of each rank is made for itself, what ranks have in common once."""
        encoded: dict[Any, EncodedTable] = {}
        kinds: dict[Any, list[Held]] = {}
        digests: dict[Any, tuple[bytes, ...]] = {}
        messages: list[RankTable] = []
        for rank in range(self.num_ranks):
            group, replica = self.group(rank), (self.group(rank), self.replica(rank))
            if group not in encoded:
                encoded[group] = encode_table(self.table(rank))
                kinds[group] = _one_of_each_kind(self.tensors(rank))
            if with_digests and replica not in digests:
                digests[replica] = _pack_digests(encoded[group], self.digests(rank, self.table(rank)))
            # A tensor of each kind has all that is the rank's own.
            part = encode_table(self.table(rank, kinds[group])).message.part
            messages.append(replace(encoded[group].message, part=part, digests=digests.get(replica, ())))
        for rank in (0, self.num_ranks // 3, self.num_ranks - 1):
            whole = self.table(rank)
            sent = encode_table(replace(whole, digests=self.digests(rank, whole))).message
            assert messages[rank] == (sent if with_digests else replace(sent, digests=()))
        return messages

    def state(self, rank: int) -> dict[str, Any]:
        """The nested state dict of one rank; the memory of its tensors is never touched."""
        meshes = {name: _device_mesh(mesh, rank) for name, (mesh, _) in self.standings(rank).items()}
        state: dict[str, Any] = {}
        table = self.table(rank)
        for path, shape, placements, mesh in self.tensors(rank):
            entry = table.entries[".".join(path)]
            assert isinstance(entry, TensorEntry)
            if not placements:
                _put(state, path, torch.zeros(shape))
                continue
            value = DTensor.from_local(
                torch.empty(entry.report.local_sizes),
                meshes[mesh],
                [_placement(*one) for one in placements],
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
            _put(state, path, value)
        for path, value in self.objects(rank).items():
            _put(state, path, value)
        return state


@dataclass(frozen=True)
class Training(Case):
    """Llama or a mixture of experts with AdamW: parameters, exp_avg and exp_avg_sq, and a step of each parameter, a
    plain tensor that all ranks hold.

    Attributes:
        model: Of MODELS. The weights of experts are 3-d, on a mesh of their own: expert parallel, then FSDP2.
        parallel: FSDP2 x TP 8 ("fsdp"), with the norms and embeddings on a mesh per TP rank, which the TP plan leaves
            out ("unplanned"), replicas of it ("hsdp"), or one such mesh per pipeline stage of eight ("pp").
    """

    model: str = "405B"
    parallel: str = "fsdp"

    def group(self, rank: int) -> Any:
        return rank // (self.num_ranks // NUM_STAGES) if self.parallel == "pp" else 0

    def replica(self, rank: int) -> Any:
        _, coordinate = self.standings(rank)["dense"]
        if self.parallel == "pp":  # each tensor is compared
            return coordinate
        return coordinate[1:] if self.parallel == "hsdp" else coordinate[:-1]

    def tensors(self, rank: int) -> Iterator[Held]:
        parameters = list(self._parameters(rank))
        yield from (Held(("model", name), *rest) for name, *rest in parameters)
        for name, *rest in parameters:
            yield Held(("optimizer", "state", name, "step"), ())
            yield Held(("optimizer", "state", name, "exp_avg"), *rest)
            yield Held(("optimizer", "state", name, "exp_avg_sq"), *rest)

    def standings(self, rank: int) -> Mapping[str, Standing]:
        size = self.num_ranks // (NUM_STAGES if self.parallel == "pp" else 1)
        shape: tuple[int, ...] = (2, size // TP // 2, TP) if self.parallel == "hsdp" else (size // TP, TP)
        names = ("dp_replicate", "dp_shard", "tp") if self.parallel == "hsdp" else ("dp", "tp")
        standings = {"dense": _standing(rank, shape, names)}
        if self.parallel == "unplanned":
            ranks = tuple(range(rank % TP, size, TP))
            standings["unplanned"] = MeshLayout((len(ranks),), ranks, ("dp",)), (rank // TP,)
        if self.model == "MoE":
            standings["experts"] = _standing(
                rank, (size // self._num_expert_ranks, self._num_expert_ranks), ("dp_mod_ep", "ep")
            )
        return standings

    @property
    def _num_expert_ranks(self) -> int:
        return min(64, self.num_ranks // TP)

    def _parameters(self, rank: int) -> Iterator[tuple[str, tuple[int, ...], Placements, str]]:
        replicas: Placements = ((-1, 1),) if self.parallel == "hsdp" else ()
        is_moe = self.model == "MoE"
        num_layers = SIZES["70B" if is_moe else self.model].num_layers
        stage = rank // (self.num_ranks // NUM_STAGES)
        first, last = stage * num_layers // NUM_STAGES, (stage + 1) * num_layers // NUM_STAGES
        for fqn, shape, placements in _dense_tensors("70B" if is_moe else self.model):
            layer = int(fqn.split(".")[1]) if fqn.startswith("layers") else 0
            if self.parallel == "pp" and not first <= layer < last:
                continue
            if is_moe and "feed_forward" in fqn and layer % 2:
                yield self._experts(fqn.replace("feed_forward", "moe.experts"), shape)
            elif self.parallel == "unplanned" and ("norm" in fqn or "embedding" in fqn):
                yield fqn, shape, ((0, 1),), "unplanned"
            else:
                yield fqn, shape, (*replicas, *placements), "dense"

    def _experts(self, fqn: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], Placements, str]:
        """One weight of all experts of a layer. FSDP2 shards experts while there are enough, then their rows."""
        num_expert_ranks = self._num_expert_ranks
        is_enough = self.num_ranks <= NUM_EXPERTS
        placements: Placements = ((0, num_expert_ranks), (0, 1)) if is_enough else ((1, 1), (0, 1))
        return fqn, (NUM_EXPERTS, *(size // 4 for size in shape)), placements, "experts"


@dataclass(frozen=True)
class ManyChunks(Case):
    """One tensor on a square mesh, a chunk per rank."""

    side: int = 100

    def tensors(self, rank: int) -> Iterator[Held]:
        yield Held(("w",), (self.side * 8, self.side * 8), ((0, 1), (1, 1)), "grid")

    def standings(self, rank: int) -> Mapping[str, Standing]:
        return {"grid": _standing(rank, (self.side, self.side), ("rows", "columns"))}


@dataclass(frozen=True)
class SmallTensors(Case):
    """Small tensors: every second one a shard on a line of ranks, the others plain ones that all ranks hold."""

    num_keys: int = 50_000

    def tensors(self, rank: int) -> Iterator[Held]:
        for key in range(self.num_keys):
            placements: Placements = ((0, 1),) if key % 2 else ()
            yield Held(("layers", str(key // 10), f"w{key % 10}"), (64,), placements, "line")

    def standings(self, rank: int) -> Mapping[str, Standing]:
        return {"line": _standing(rank, (self.num_ranks,), ("dp",))}


@dataclass(frozen=True)
class OwnKeys(Case):
    """Values that each rank keeps under names of its own, such as the state of a data loader."""

    num_keys: int = 200

    def group(self, rank: int) -> Any:
        return rank

    def objects(self, rank: int) -> Mapping[tuple[str, ...], Any]:
        return {("dataloader", f"dp_rank_{rank}", f"worker_{key}"): rank + key for key in range(self.num_keys)}


@dataclass(frozen=True)
class Tiny(Case):
    """Ten plain tensors and a number, equal on all ranks."""

    def tensors(self, rank: int) -> Iterator[Held]:
        for key in range(10):
            yield Held(("model", f"w{key}"), (3,))

    def objects(self, rank: int) -> Mapping[tuple[str, ...], Any]:
        return {("step",): 1}


def _entry(shape: tuple[int, ...], placements: Placements, mesh: str, standings: Mapping[str, Standing]) -> TensorEntry:
    report = ShardReport(shape, local_sizes=shape)
    if placements:
        report = ShardReport(shape, *standings[mesh], placements)
        report = replace(report, local_sizes=shard_of(report, candidate_steps(report)[0]).sizes)
    return TensorEntry(report, torch.float32, False)


def _one_of_each_kind(tensors: Iterable[Held]) -> list[Held]:
    found: dict[Any, Held] = {}
    for held in tensors:
        found.setdefault(held[1:], held)
    return list(found.values())


def _pack_digests(encoded: EncodedTable, digests: Mapping[str, bytes]) -> tuple[bytes, ...]:
    columns = zip(encoded.names, encoded.kind_of, strict=True)
    return tuple(pack(_core.encode_digests(names, kind_of, dict(digests))) for names, kind_of in columns)


def _standing(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Standing:
    size = torch.Size(shape).numel()
    index, coordinate = rank % size, []
    for length in reversed(shape):
        coordinate.append(index % length)
        index //= length
    return _mesh(rank // size * size, shape, names), tuple(reversed(coordinate))


@functools.lru_cache(maxsize=16)
def _mesh(first: int, shape: tuple[int, ...], names: tuple[str, ...]) -> MeshLayout:
    return MeshLayout(shape, tuple(range(first, first + torch.Size(shape).numel())), names)


_dense_tensors = functools.cache(functools.partial(list_tensors, TP))


def _device_mesh(mesh: MeshLayout, rank: int) -> DeviceMesh:
    ranks = torch.tensor(mesh.ranks).view(mesh.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.dim_names, _init_backend=False, _rank=rank)


def _placement(dim: int, split_factor: int) -> Any:
    if dim < 0:
        return Replicate()
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def _put(state: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
    state[path[-1]] = value
