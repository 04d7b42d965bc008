"""Works out the key tables of all ranks of a job from the table of one of them.

The ranks of a job run the same program: they hold parts of the same tensors, each by its place on the meshes. So the
table of one rank, with another coordinate and the local sizes there, is the table that another rank would send to the
coordinator of a save or load (``checkpoint/tables/key_table.py``). The stages of a pipeline hold different keys: each
is a group of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_ext.checkpoint.tables.component import PER_RANK, family_of
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    EncodedTable,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    TensorEntry,
    encode_table,
    local_bytes,
)
from torchtitan_ext.errors import Problem, WrongValueError
from torchtitan_ext.layout.layout import (
    MeshLayout,
    ShardReport,
    Steps,
    candidate_steps,
    decide,
    local_shard,
    mesh_coordinates,
    num_elements,
    row_major_position,
    shard_of,
)
from torchtitan_ext.layout.mesh_axes import is_data_parallel

MeshPlace = tuple[MeshLayout, tuple[int, ...]]
"""A mesh, and the coordinate of a rank on it."""


@dataclass(frozen=True)
class _Kind:
    """Tensors that a rank holds alike.

    Attributes:
        entry: What the viewer holds of such a tensor.
        places: The place of each rank on the mesh; empty for plain tensors.
        entries: What other ranks hold, as far as it was asked for.
    """

    entry: TensorEntry
    steps: Steps
    places: Mapping[int, MeshPlace]
    entries: dict[int, TensorEntry] = field(default_factory=dict)


class AlikeRanks:
    """Ranks that hold parts of the same tensors.

    Args:
        ranks: The ranks, in order.
        table: What one of them, the viewer, holds.
        viewer: The rank that holds ``table``; not used if ``own`` is given.
        mesh: The mesh of all ranks, if it is known: data-parallel ranks are counted along its axes.
        own: The keys that the viewer keeps under a name of its own; by default those with its number in the name.

    Attributes:
        table: The table, without the keys that ``problems`` names and those that each rank keeps under its own name.
        own: What the viewer keeps under names of its own.
        problems: Tensors whose parts on other ranks cannot be worked out.
        uneven: Tensors that FSDP2 and DTensor may cut differently, though the viewer's shape is the same: FSDP2's way
            is assumed.

    Raises:
        WrongValueError: A mesh does not tell the meshes of other ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        table: KeyTable,
        viewer: int = 0,
        mesh: MeshLayout | None = None,
        own: Collection[str] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.mesh = mesh
        self.problems: list[Problem] = []
        self.uneven: list[str] = []
        self._kinds: dict[int, _Kind] = {}
        self._shared: dict[Any, TensorEntry] = {}
        self._places: dict[int, dict[int, MeshPlace]] = {}
        known = {fqn: self._known_entry(fqn, given) for fqn, given in table.entries.items()}
        entries = {fqn: entry for fqn, entry in known.items() if entry is not None}
        self._data_parallel = _data_parallel_ranks(self.ranks, self.meshes() if mesh is None else [mesh])
        if own is None:
            own = [fqn for fqn in names_with_rank(entries) if self._renamed(fqn, viewer) == fqn]
        self.own = {fqn: entries.pop(fqn) for fqn in own if fqn in entries}
        self._paths = table.stock_paths
        paths = {fqn: path for fqn, path in self._paths.items() if fqn not in self.own}
        # Wherever a save would compare tensors on meshes, they are assumed to be equal.
        on_meshes = (key for key, entry in entries.items() if isinstance(entry, TensorEntry) and entry.report.mesh)
        digests = dict.fromkeys(on_meshes, b"equal")
        self.table = dataclasses.replace(table, entries=entries, stock_paths=paths, digests=digests)
        self._encoded = encode_table(self.table)
        self._sample = self._one_of_each_kind()
        self._own_tables: dict[tuple[str, ...], EncodedTable] = {}

    def entry(self, rank: int, entry: KeyEntry) -> KeyEntry:
        """What a rank holds under the keys that have this entry in the table."""
        kind = self._kinds.get(id(entry))
        if kind is None or not isinstance(entry, TensorEntry) or entry.report.mesh is None:
            return entry
        if rank not in kind.entries:
            mesh, coordinate = kind.places[rank]
            shape, placements, order = entry.report.global_shape, entry.report.placements, entry.report.order
            sizes = local_shard(shape, mesh.shape, kind.steps, coordinate).sizes
            report = ShardReport(shape, mesh, coordinate, placements, sizes, order)
            kind.entries[rank] = TensorEntry(report, entry.dtype, entry.requires_grad)
        return kind.entries[rank]

    def steps(self, entry: KeyEntry) -> Steps:
        """The order in which tensors with this entry in the table are cut."""
        return self._kinds[id(entry)].steps if id(entry) in self._kinds else ()

    def state_bytes(self) -> Iterator[int]:
        """The size of all tensors of each rank, in the order of ranks."""
        counts: dict[int, int] = {}
        for entry in self.table.entries.values():
            counts[id(entry)] = counts.get(id(entry), 0) + 1
        kinds = [(count, self._kinds[key].entry) for key, count in counts.items() if key in self._kinds]
        for rank in self.ranks:
            held = ((count, self.entry(rank, entry)) for count, entry in kinds)
            yield sum(count * local_bytes(entry) for count, entry in held if isinstance(entry, TensorEntry))

    def meshes(self) -> list[MeshLayout]:
        """The meshes of the viewer's tensors."""
        meshes = [kind.entry.report.mesh for kind in self._kinds.values()]
        return list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())

    @property
    def num_data_parallel(self) -> int:
        """The number of ranks that get different data."""
        return len(set(self._data_parallel.values()))

    def own_names(self, rank: int) -> dict[str, str]:
        """The names that a rank gives to keys of its own, by the names that the viewer gives them."""
        return {fqn: self._renamed(fqn, rank) for fqn in self.own}

    def encoded(self, rank: int, has: Callable[[str], bool] = lambda fqn: True) -> EncodedTable:
        """The table of a rank as it is sent.

        Args:
            has: Whether the table contains a key of the rank's own, by the rank's name for it.
        """
        own = self._own_table(rank, {fqn: name for fqn, name in self.own_names(rank).items() if has(name)})
        base = self._encoded
        sample = KeyTable({fqn: self.entry(rank, self.table.entries[fqn]) for fqn in self._sample})
        message = dataclasses.replace(
            base.message,
            sections=(*base.message.sections[:2], own.message.sections[2]),
            digests=(*base.message.digests[:2], own.message.digests[2]),
            part=encode_table(sample).message.part,
        )
        return EncodedTable(message, (*base.names[:2], own.names[2]), (*base.kind_of[:2], own.kind_of[2]))

    def _known_entry(self, fqn: str, given: KeyEntry) -> KeyEntry | None:
        """The entry, one object for tensors held alike; ``None`` if the parts of other ranks cannot be worked out."""
        if isinstance(given, ObjectEntry):
            return given
        if isinstance(given, BoxesEntry):
            detail = "describes its own boxes, and nothing tells those of other ranks; leave it out of the dry run"
            self.problems.append(Problem("unsupported_tensor", fqn, detail))
            return None
        report = given.report
        of_report = (report.global_shape, id(report.mesh), report.placements, report.local_sizes, report.order)
        entry = self._shared.setdefault((*of_report, given.dtype, given.requires_grad), given)
        if id(entry) not in self._kinds:
            kind = self._kind_of(fqn, entry)
            if isinstance(kind, Problem):
                self.problems.append(kind)
                return None
            self._kinds[id(entry)] = kind
        return entry

    def _kind_of(self, fqn: str, entry: TensorEntry) -> _Kind | Problem:
        report = entry.report
        if report.mesh is None:
            return _Kind(entry, (), {})
        fitting = [steps for steps in candidate_steps(report) if _fits(report, steps)]
        if not fitting:
            problem = decide(fqn, [report])
            assert isinstance(problem, Problem)
            return problem
        if len(fitting) > 1 and not _is_even(report, fitting[0]):
            self.uneven.append(fqn)
        if id(report.mesh) not in self._places:
            self._places[id(report.mesh)] = sibling_meshes(report.mesh, self.ranks)
        return _Kind(entry, fitting[0], self._places[id(report.mesh)])

    def _one_of_each_kind(self) -> list[str]:
        """One key of each kind, in the order in which the whole table numbers kinds: only these differ by rank."""
        names, kinds = self._encoded.names[0], self._encoded.kind_of[0]
        first: dict[int, str] = {}
        held: set[tuple[int, int]] = set()
        for fqn, kind in zip(names, kinds, strict=True):
            first.setdefault(kind, fqn)
            held.add((kind, id(self.table.entries[fqn])))
        # One kind can have several orders of sharding: local sizes then differ from key to key, and all are needed.
        return list(first.values()) if len(held) == len(first) else names

    def _own_table(self, rank: int, names: Mapping[str, str]) -> EncodedTable:
        """The third section of a rank's table: keys under its own name, and keys of other ranks that it asks for."""
        alike = tuple(names.values())
        if alike not in self._own_tables:
            entries = {fqn: self.table.entries[fqn] for fqn in self._encoded.names[2] if fqn in self.table.entries}
            paths = {fqn: self._paths[fqn] for fqn in entries if fqn in self._paths}
            for fqn, name in names.items():
                entries[name] = self.own[fqn]
                if fqn in self._paths:
                    parts = self._paths[fqn]
                    paths[name] = tuple(self._renamed(part, rank) if isinstance(part, str) else part for part in parts)
            self._own_tables[alike] = encode_table(KeyTable(entries, stock_paths=paths))
        return self._own_tables[alike]

    def _renamed(self, fqn: str, rank: int) -> str:
        number = self._data_parallel[rank] if "dp_rank" in fqn else rank
        return PER_RANK.sub(rf"\g<1>{number}", fqn)


def names_with_rank(entries: Mapping[str, KeyEntry]) -> list[str]:
    """Keys of values that have the number of a rank in them, if no key is the same but for the number."""
    families: dict[str, list[str]] = {}
    for fqn, entry in entries.items():
        if "rank" in fqn and (not isinstance(entry, TensorEntry) or entry.report.mesh is None):
            families.setdefault(family_of(fqn), []).append(fqn)
    alone = [members[0] for members in families.values() if len(members) == 1]
    return [fqn for fqn in alone if family_of(fqn) != fqn]


def _fits(report: ShardReport, steps: Steps) -> bool:
    """Whether these steps give the local tensor's shape; a local tensor without elements may have any shape."""
    sizes = shard_of(report, steps).sizes
    return sizes == report.local_sizes or num_elements(sizes) == num_elements(report.local_sizes) == 0


def _is_even(report: ShardReport, steps: Steps) -> bool:
    """Whether all ranks hold equally many elements, so that all orders of plain cuts give the same."""
    assert report.mesh is not None
    parts = [1] * len(report.global_shape)
    for axis, dim, split_factor in steps:
        parts[dim] *= report.mesh.shape[axis] * split_factor
    return all(size % part == 0 for size, part in zip(report.global_shape, parts, strict=True))


def sibling_meshes(mesh: MeshLayout, ranks: Sequence[int]) -> dict[int, MeshPlace]:
    """The place of each rank on this mesh, or on the mesh beside it that the rank's part of the program has made.

    Example: on ranks 0 to 7 the mesh of ranks (0, 2, 4, 6) is that of ``dp`` in (dp 4, tp 2); ranks 1, 3, 5, 7 have
    another one.

    Raises:
        WrongValueError: The ranks of the mesh do not tell the mesh of another rank.
    """
    coordinates, first = mesh_coordinates(mesh.shape), min(mesh.ranks)
    found: dict[int, MeshPlace] = {}
    for rank in ranks:
        if rank in found:
            continue
        # All smaller ranks have their place, so that this one is the smallest of its mesh.
        members = tuple(other - first + rank for other in mesh.ranks)
        if not found.keys().isdisjoint(members):
            raise WrongValueError(
                f"mesh: {mesh} of ranks {', '.join(map(str, mesh.ranks[:8]))}, ... does not tell on which mesh "
                f"rank {rank} stands; give a state dict of tensors on meshes that init_device_mesh has made"
            )
        sibling = mesh if members == mesh.ranks else dataclasses.replace(mesh, ranks=members)
        found |= {other: (sibling, at) for other, at in zip(members, coordinates, strict=True)}
    return found


def _data_parallel_ranks(ranks: Sequence[int], meshes: Sequence[MeshLayout]) -> dict[int, int]:
    """The position of each rank along the data-parallel axes of the largest mesh; its number if there are none."""
    named = [mesh for mesh in meshes if any(map(is_data_parallel, mesh.dim_names or ()))]
    if not named:
        return {rank: rank for rank in ranks}
    mesh = max(named, key=lambda one: len(one.ranks))
    axes = [axis for axis, name in enumerate(mesh.dim_names or ()) if is_data_parallel(name)]
    sizes = [mesh.shape[axis] for axis in axes]
    places = sibling_meshes(mesh, ranks).items()
    return {rank: row_major_position([at[axis] for axis in axes], sizes) for rank, (_, at) in places}
