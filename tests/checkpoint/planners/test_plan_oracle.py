"""Plans of random states on random meshes against the oracle, which works key by key and rank by rank."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import agreement_oracle as oracle
import pytest
import torch
from tier import num_cases

from torchtitan_ext import _core
from torchtitan_ext.checkpoint.planners.items import metadata_entries, metadata_paths, write_items
from torchtitan_ext.checkpoint.planners.replica_digests import compare_replicas
from torchtitan_ext.checkpoint.tables.agreement import agree
from torchtitan_ext.checkpoint.tables.key_table import (
    BoxesEntry,
    KeyEntry,
    KeyTable,
    ObjectEntry,
    RankTable,
    TensorEntry,
    encode_table,
)
from torchtitan_ext.layout.layout import MeshLayout, ShardReport, Steps, candidate_steps, mesh_coordinates, shard_of

NUM_SEEDS = num_cases(40)
STATES_PER_SEED = 60
MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 3), (4, 2), (2, 2, 2), (1, 4), (2, 1, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn]


class RandomState:
    """Key tables of all ranks; without faults they can be saved."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world_size = self.random.randint(1, 12)
        self.entries: list[dict[str, KeyEntry]] = [{} for _ in range(self.world_size)]
        self.digests: list[dict[str, bytes]] = [{} for _ in range(self.world_size)]
        self.scalars: dict[str, bool] = {}
        self.meshes = [mesh for mesh in (self.mesh() for _ in range(3)) if mesh is not None]

    def mesh(self) -> MeshLayout | None:
        shape = self.random.choice([mesh for mesh in MESHES if math.prod(mesh) <= self.world_size] or [(1,)])
        size = math.prod(shape)
        ranks = list(range(self.world_size))
        how = self.random.choice(["first", "strided", "any"])
        if how == "any":
            ranks = self.random.sample(ranks, size)
        elif how == "strided":
            step = self.random.randint(1, max(1, self.world_size // size))
            begin = self.random.randint(0, self.world_size - 1 - step * (size - 1))
            ranks = ranks[begin::step]
        names = self.random.choice([None, ("a", "b", "c")[: len(shape)]])
        return MeshLayout(shape, tuple(ranks[:size]), names)

    def fill(self, num_keys: int) -> "RandomState":
        for number in range(num_keys):
            fqn = self.random.choice(["layers.{}.w", "w{}", "rank_{}.x", "optimizer.é.{}"]).format(number)
            kind = self.random.choices(["sharded", "plain", "object", "boxes", "own"], [6, 2, 2, 1, 1])[0]
            getattr(self, kind)(fqn)
            if self.random.random() < 0.3 and kind == "sharded":  # more keys of the same kind
                for copy in range(3):
                    for rank, entries in enumerate(self.entries):
                        if fqn in entries:
                            entries[f"{fqn}.{copy}"] = entries[fqn]
                            self.digest(rank, f"{fqn}.{copy}")
        return self

    def sharded(self, fqn: str) -> None:
        shape = tuple(self.random.choice([0, 1, 2, 3, 5, 7, 8, 9, 12]) for _ in range(self.random.randint(1, 3)))
        dtype = self.random.choice(DTYPES)
        if self.random.random() < 0.3:
            meshes = self.siblings()
        else:
            meshes = self.random.sample(self.meshes, min(len(self.meshes), self.random.choice([1, 1, 1, 2])))
        report: ShardReport | None = None
        steps: Steps = ()
        for mesh in meshes:
            if report is not None and self.random.random() < 0.9 and meshes[0].shape == mesh.shape:
                self.hold(fqn, replace(report, mesh=mesh), steps, dtype)
                continue
            placements = tuple(
                (-1, 1)
                if self.random.random() < 0.3
                else (self.random.randrange(len(shape)), self.random.choice([1, 1, 1, 2, 3, mesh.shape[-1]]))
                for _ in mesh.shape
            )
            report = ShardReport(shape, mesh, (0,) * len(mesh.shape), placements)
            steps = self.random.choice(candidate_steps(report))
            if self.random.random() < 0.2:
                report = replace(report, order=steps)
            self.hold(fqn, report, steps, dtype)

    def siblings(self) -> list[MeshLayout]:
        """Meshes of equal shape that tile some of the world."""
        num_meshes = self.random.randint(1, self.world_size)
        size = self.world_size // num_meshes
        ranks = [tuple(range(self.world_size)[first::num_meshes][:size]) for first in range(num_meshes)]
        shape = self.random.choice([(size,), (1, size), (2, size // 2) if size % 2 == 0 else (size,)])
        return [MeshLayout(shape, of_mesh, None) for of_mesh in ranks]

    def hold(self, fqn: str, report: ShardReport, steps: Steps, dtype: torch.dtype) -> None:
        assert report.mesh is not None
        for coordinate, rank in zip(mesh_coordinates(report.mesh.shape), report.mesh.ranks, strict=True):
            own = replace(report, coordinate=coordinate)
            own = replace(own, local_sizes=shard_of(own, steps).sizes)
            self.entries[rank][fqn] = TensorEntry(own, dtype, False)
            self.digest(rank, fqn)

    def plain(self, fqn: str) -> None:
        shape = tuple(self.random.choice([0, 1, 3]) for _ in range(self.random.randint(0, 2)))
        entry = TensorEntry(ShardReport(shape, local_sizes=shape), self.random.choice(DTYPES), True)
        self.on_some_ranks(fqn, entry)

    def object(self, fqn: str) -> None:
        self.on_some_ranks(fqn, ObjectEntry())

    def own(self, fqn: str) -> None:
        for rank, entries in enumerate(self.entries):
            entries[f"{fqn}.dp_rank_{rank}"] = ObjectEntry()

    def boxes(self, fqn: str) -> None:
        ends = sorted({0, 9, *(self.random.randint(1, 8) for _ in range(3))})
        spans = list(zip(ends, ends[1:], strict=False))
        parts: list[list[Any]] = [[] for _ in self.entries]
        for begin, end in spans:
            for rank in self.random.sample(range(self.world_size), self.random.randint(1, self.world_size)):
                parts[rank].append(((begin,), (end - begin,)))
        for entries, held in zip(self.entries, parts, strict=True):
            if held or self.random.random() < 0.5:
                entries[fqn] = BoxesEntry((9,), torch.float32, tuple(held))

    def on_some_ranks(self, fqn: str, entry: KeyEntry) -> None:
        for rank in range(self.world_size):
            if self.random.random() < 0.8:
                self.entries[rank][fqn] = entry
                self.digest(rank, fqn)

    def digest(self, rank: int, fqn: str) -> None:
        if self.random.random() < 0.9:
            value = 0 if self.random.random() < 0.97 else self.random.randint(1, 3)
            is_scalar = self.scalars.setdefault(fqn, self.random.random() < 0.2)
            digest = f"r{value}" if is_scalar else f"{value}{fqn}".ljust(16)
            self.digests[rank][fqn] = digest.encode()[:16]

    def break_something(self) -> "RandomState":
        rank = self.random.randrange(self.world_size)
        entries = self.entries[rank]
        if entries:
            fqn = self.random.choice(list(entries))
            entry = entries[fqn]
            how = self.random.choice(["drop", "object", "dtype", "sizes", "boxes"])
            if how == "drop":
                del entries[fqn]
            elif how == "object":
                entries[fqn] = ObjectEntry()
            elif isinstance(entry, TensorEntry):
                if how == "dtype":
                    entries[fqn] = replace(entry, dtype=torch.int8)
                elif how == "sizes" and entry.report.mesh is not None:
                    local = tuple(size + self.random.choice([0, 0, 1]) for size in entry.report.local_sizes)
                    entries[fqn] = replace(entry, report=replace(entry.report, local_sizes=local))
            elif isinstance(entry, BoxesEntry):
                entries[fqn] = replace(entry, boxes=(*entry.boxes, ((self.random.randint(0, 9),), (2,))))
        return self

    def tables(self) -> list[KeyTable]:
        tables = []
        for entries, digests in zip(self.entries, self.digests, strict=True):
            fqns = list(entries)
            if self.random.random() < 0.2:
                self.random.shuffle(fqns)
            paths: dict[str, tuple[Any, ...]] = {
                fqn: tuple(int(part) if part.isdigit() else part for part in fqn.split(".")) for fqn in fqns
            }
            held = {fqn: digest for fqn, digest in digests.items() if not isinstance(entries.get(fqn), BoxesEntry)}
            tables.append(KeyTable({fqn: entries[fqn] for fqn in fqns}, held, paths))
        return tables


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_agreement_is_the_oracles(seed: int) -> None:
    for number in range(STATES_PER_SEED):
        state = RandomState(1000 * seed + number).fill(5)
        if number % 2:
            state.break_something()
        tables, every = state.tables(), number % 3 > 0
        ours, theirs = agree(sent(tables), needs_all_ranks=every), oracle.agree(tables, needs_all_ranks=every)
        assert sorted(ours.problems, key=str) == sorted(theirs.problems, key=str)
        assert oracle.agreed_keys(ours) == theirs.keys
        steps = {
            rank: {
                fqn: agreed.steps[rank]
                for fqn, agreed in theirs.keys.items()
                if isinstance(agreed, oracle.TensorAgreement) and rank in agreed.steps
            }
            for rank in range(len(tables))
        }
        assert {rank: ours.joint.steps_of(rank) for rank in steps} == steps
        found = compare_replicas(sent(tables), ours)
        wanted, equal = oracle.compare_replicas(tables, theirs)
        for kind in ("differing", "presumed", "uncompared"):
            assert sorted(getattr(found, kind), key=str) == sorted(getattr(wanted, kind), key=str)
        assert sorted(ours.names[key] for key in found.equal) == sorted(equal)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_each_shard_is_written_once_by_a_holder_and_bytes_are_balanced(seed: int) -> None:
    num_planned = num_equal = 0
    for number in range(STATES_PER_SEED):
        tables = RandomState(7_000_000 + 1000 * seed + number).fill(6).tables()
        agreement = agree(sent(tables), needs_all_ranks=True)
        if agreement.problems:
            continue
        num_planned += 1
        wanted = oracle.agree(tables, needs_all_ranks=True).keys
        _, equal = oracle.compare_replicas(tables, oracle.agree(tables, needs_all_ranks=True))
        shards = [
            (fqn, held, oracle.num_bytes(agreed, held))
            for fqn, agreed in wanted.items()
            if isinstance(agreed, oracle.TensorAgreement)
            for held in oracle.shards_to_write(agreed, fqn in equal)
        ]
        holders = {(fqn, box): held.ranks for fqn, held, _ in shards for box in held.boxes}
        equal_keys = compare_replicas(sent(tables), agreement).equal
        num_equal += len(equal_keys)
        plan = _core.WritePlan(agreement.joint, False, [], [], equal_keys, may_divide=False)
        entries = metadata_entries(agreement, plan)
        writers: dict[Any, int] = {}
        objects: Counter[str] = Counter()
        for rank, table in enumerate(tables):
            for item in write_items(writes_of(rank, table, plan)):
                fqn = item.index.fqn
                if item.tensor_data is None:
                    objects[fqn] += 1
                    assert rank == wanted[fqn].ranks[0]  # type: ignore[union-attr]
                    continue
                chunk = item.tensor_data.chunk
                assert entries[fqn].chunks[item.index.index] == chunk and item.index.offset == chunk.offsets
                box = (tuple(chunk.offsets), tuple(chunk.sizes))
                assert (fqn, box) not in writers and rank in holders[fqn, box]
                writers[fqn, box] = rank
        assert writers.keys() == holders.keys()
        assert set(objects) == set(wanted) - {fqn for fqn, _, _ in shards} and set(objects.values()) <= {1}
        largest = max((num_bytes for _, _, num_bytes in shards), default=0)
        largest_first = sorted(((held.ranks, num_bytes) for _, held, num_bytes in shards), key=lambda one: -one[1])
        loads = Counter(dict.fromkeys(range(len(tables)), 0))
        for ranks, num_bytes in largest_first:
            loads[min(ranks, key=lambda rank: (loads[rank], rank))] += num_bytes
        assert sum(plan.load_bytes) == sum(loads.values())
        assert max(plan.load_bytes) <= max(loads.values()) + largest
        paths = {fqn: path for table in reversed(tables) for fqn, path in table.stock_paths.items()}
        assert metadata_paths(agreement, sent(tables)) == paths
    assert num_planned > STATES_PER_SEED // 3 and num_equal > 0


def writes_of(rank: int, table: KeyTable, plan: _core.WritePlan) -> _core.Writes:
    encoded = encode_table(table)
    return _core.read_writes(plan.decision(rank), encoded.names, encoded.kind_of, dict(table.entries))


def sent(tables: list[KeyTable]) -> list[RankTable]:
    return [encode_table(table).message for table in tables]


def written_by(tables: list[KeyTable], plan: _core.WritePlan) -> list[list[str]]:
    """The keys that each rank writes."""
    return [list(dict.fromkeys(writes_of(rank, table, plan).fqns)) for rank, table in enumerate(tables)]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_writers_of_replicas_are_spread_over_hosts(seed: int) -> None:
    """Plain tensors, which all ranks hold, beside what each rank has for itself."""
    numbers = random.Random(seed)
    for _ in range(STATES_PER_SEED // 4):
        per_host, num_hosts = numbers.randint(1, 4), numbers.randint(1, 5)
        num_ranks = per_host * num_hosts
        most = numbers.choice([1, 40])
        shapes = [(numbers.randint(1, most),) for _ in range(numbers.randint(1, 2 * num_ranks))]
        entries = {f"w{n}": TensorEntry(ShardReport(s, local_sizes=s), torch.int8, False) for n, s in enumerate(shapes)}
        tables = [KeyTable(entries) for _ in range(num_ranks)]
        agreement = agree(sent(tables), needs_all_ranks=True)
        hosts = [rank // per_host for rank in range(num_ranks)]
        if numbers.random() < 0.5:  # ranks of a host need not follow each other
            numbers.shuffle(hosts)
        plan = _core.WritePlan(agreement.joint, False, [], hosts)
        written = written_by(tables, plan)
        assert written == written_by(tables, _core.WritePlan(agreement.joint, False, [], hosts))
        assert sorted(fqn for fqns in written for fqn in fqns) == sorted(entries)
        largest = max(size for (size,) in shapes)
        assert max(plan.load_bytes) - min(plan.load_bytes) <= largest
        num_writing = len({hosts[rank] for rank, fqns in enumerate(written) if fqns})
        assert num_writing == min(num_hosts, len(shapes))
        if len(set(shapes)) == 1:  # then what hosts write differs by one tensor at most
            of_hosts = Counter(dict.fromkeys(hosts, 0))
            for host, num_bytes in zip(hosts, plan.load_bytes, strict=True):
                of_hosts[host] += num_bytes
            assert max(of_hosts.values()) - min(of_hosts.values()) <= largest


def test_small_states_are_written_on_several_hosts() -> None:
    """Eight norms on two hosts of eight ranks: four each, where the lowest ranks alone would all be on the first."""
    entry = TensorEntry(ShardReport((16,), local_sizes=(16,)), torch.float32, False)
    tables = [KeyTable({f"norm{n}": entry for n in range(8)}) for _ in range(16)]
    agreement = agree(sent(tables), needs_all_ranks=True)
    hosts = [rank // 8 for rank in range(16)]
    loads = _core.WritePlan(agreement.joint, False, [], hosts).load_bytes
    assert [sum(loads[:8]), sum(loads[8:])] == [256, 256]
    unknown = _core.WritePlan(agreement.joint, False, [], []).load_bytes
    assert [sum(unknown[:8]), sum(unknown[8:])] == [512, 0]


@pytest.mark.parametrize("seed", range(NUM_SEEDS // 10))
def test_large_replicas_are_divided_among_their_holders(seed: int) -> None:
    """Plain tensors of all sizes, which all ranks hold, beside a part of a rank's own."""
    numbers = random.Random(seed)
    num_divided = 0
    for _ in range(STATES_PER_SEED // 2):
        num_ranks, entries = numbers.randint(1, 9), {}
        for n in range(numbers.randint(1, 8)):
            shape = tuple(
                numbers.choice([1, 3, 64, 1000, numbers.randint(1, 5000)]) for _ in range(numbers.randint(0, 2))
            )
            entries[f"w{n}"] = TensorEntry(ShardReport(shape, local_sizes=shape), torch.float32, False)
        own = [(numbers.choice([0, 100, 50_000]),) for _ in range(num_ranks)]
        tables = [
            KeyTable({**entries, f"own_{rank}": TensorEntry(ShardReport(s, local_sizes=s), torch.float32, False)})
            for rank, s in enumerate(own)
        ]
        agreement = agree(sent(tables), needs_all_ranks=True)
        plan = _core.WritePlan(agreement.joint, False, [], [])
        saved = metadata_entries(agreement, plan)
        written: Counter[tuple[str, Any]] = Counter()
        loads = [0] * num_ranks
        for rank, table in enumerate(tables):
            writes = writes_of(rank, table, plan)
            for item in write_items(writes):
                chunk, fqn = item.tensor_data.chunk, item.index.fqn
                assert saved[fqn].chunks[item.index.index] == chunk and item.index.offset == chunk.offsets
                assert writes.local_boxes()[fqn, tuple(chunk.offsets)] == (tuple(chunk.offsets), tuple(chunk.sizes))
                written[fqn, chunk.offsets] += 1
                loads[rank] += 4 * math.prod(chunk.sizes)
        assert loads == plan.load_bytes and set(written.values()) == {1}
        assert len(written) == sum(len(entry.chunks) for entry in saved.values())
        for entry in saved.values():
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            assert 0 in entry.size or _core.cover_defect(tuple(entry.size), boxes) is None
        num_divided += sum(len(entry.chunks) > 1 for entry in saved.values())
        # No rank has much more than the mean, unless it is a rank's own.
        mean = sum(loads) / num_ranks
        assert max(loads) <= max(4 * max(own)[0], mean + max(8192, mean / 8)) + 8192
        kept = _core.WritePlan(agreement.joint, False, [], [], may_divide=False)
        assert all(len(entry.chunks) == 1 for entry in metadata_entries(agreement, kept).values())
    assert num_divided > 0
