"""Changes of a file into a state of any layout, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, checking_arguments
from torchtitan_ext.delta.held import agree_on_steps, held_tensors, sums_of_elements, sums_of_tensors
from torchtitan_ext.delta.replacement import OTHER_BITS, Replacement, why_unfit
from torchtitan_ext.delta.saved_changes import SavedChanges
from torchtitan_ext.errors import (
    DamagedCheckpointError,
    Problem,
    TransferFailedError,
    check_argument,
    check_counts,
    differing,
    named,
    refusal,
)
from torchtitan_ext.layout.layout import ShardOrder
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.storage.raw_tensor import dtype_name
from torchtitan_ext.transfer.endpoint import Endpoint, State, describe_endpoint, shared_memory_problems
from torchtitan_ext.transfer.phases import transfer_phases

Verify = Literal["changed", "all"]
"""What ``apply`` compares: the elements that will be replaced, or each tensor whole, before and after."""


@dataclass(frozen=True)
class DeltaResult:
    """What ``apply`` did on this rank.

    Attributes:
        version: What the state is now.
        num_changed: Elements of this rank that got new bits.
        seconds: How long each phase took.
    """

    version: int
    num_changed: int
    seconds: Mapping[str, float]


def apply(
    state: State,
    changes: SavedChanges,
    *,
    version: int | None = None,
    verify: Verify = "changed",
    group: dist.ProcessGroup | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> DeltaResult:
    """Puts the changes of a file into a state of any layout, in place; all of them or none. Collective.

    Args:
        state: What this rank holds: a nested state dict of tensors, or a module; ``None`` on a rank without a part. The
            ranks together hold every key that has changed; other keys of theirs are left alone.
        changes: What ``delta.load`` gave, of one file on all ranks.
        version: Of the state, given by any rank that knows it: another one than the base of the changes is refused by
            its number. Without it each tensor that the changes know is compared whole, before anything is written, at
            the price of reading it once: a state of an earlier version may hold the old bits of all that will change.
        verify: ``"changed"`` compares the old bits of what will be replaced with those that the changes replace;
            ``"all"`` compares each tensor whole, before and after, at the price of reading it twice.
        group: Ranks that hold the state; the default group if left out; without any this process alone.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.
        timeout_seconds: How long a rank waits for the others in each phase.

    Raises:
        WrongBaseError: The state is not what the changes were made from, or nothing shows what it is. Nothing was
            changed.
        DamagedCheckpointError: The file was written over or cut since ``delta.load``. Nothing was changed.
        StateRefusedError: (a subclass) Keys, shapes or dtypes do not fit, or a layout is in doubt. Nothing was changed.
        TransferFailedError: A rank failed meanwhile, or ``"all"`` saw another result; names the part-written keys.
        LostRankError: A rank is gone or does not take part.
        All the same on every rank.
    """
    check_usable("delta.apply", group)
    with checking_arguments("delta.apply", group):
        check_argument("delta.apply", "changes", changes, SavedChanges, "what delta.load() gives")
        check_counts("delta.apply", version=version)
        check_seconds("delta.apply", timeout_seconds)
        if verify not in get_args(Verify):
            raise ValueError(f"delta.apply: got verify={verify!r}, expected 'changed' or 'all'")
    changed = changes.changed_keys
    with transfer_phases(group, timeout_seconds, "apply") as phases:
        endpoint, steps, _ = agree_on_steps(phases, lambda: _described(state, layouts), "apply", needs_all_ranks=True)
        own: list[tuple[Replacement, Callable[[], None]]] = []

        def sums_of_all() -> SumTable:
            return sums_of_tensors(endpoint, steps, changes.totals)

        def offer() -> _Offer:
            held = held_tensors(endpoint, steps)
            tensors, finish = endpoint.memory_to_change()
            keys = {one.fqn: (dtype_name(of.dtype), one.global_shape) for one, of in zip(held, tensors, strict=True)}
            fitting = {fqn for fqn, of in changes.totals.items() if keys.get(fqn) == (of.dtype, of.shape)}
            replacement = Replacement(held, tensors, changes, fitting)
            own.append((replacement, finish))
            replaced = sums_of_elements(endpoint, held, replacement.old_sums())
            new = sums_of_elements(endpoint, held, replacement.new_sums)
            before = sums_of_all() if verify == "all" or version is None else SumTable()
            return _Offer(changes.digest, version, verify, keys, endpoint.tied, replaced, new, before)

        def write() -> int:
            ((replacement, finish),) = own
            num_changed = replacement.write()
            finish()
            return num_changed

        found = phases.on_all("compare", offer, doing="ranks compared their tensors with the changes")
        problems = _problems(found, changes, verify)
        if problems:
            raise refusal("apply", problems)
        with phases.changing(changed, f"ranks wrote changes; these may be part-written: {named(changed)}"):
            num_changed = phases.on_all("apply", write)[phases.rank]
        if verify == "all":
            doing = "ranks compared their tensors with what the changes lead to"
            wrong = SumTable.merge(phases.on_all("prove", sums_of_all, doing=doing)).differing(_of(changes, "after"))
            if wrong:
                failure = f"{named(wrong)}: after the changes were applied, not what they lead to"
                raise TransferFailedError("apply", {0: failure}, changed, "prove")
    return DeltaResult(changes.version, num_changed, dict(phases.seconds))


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before anything is written."""

    digest: str
    version: int | None
    verify: Verify
    keys: Mapping[str, tuple[str, tuple[int, ...]]]
    tied: Mapping[str, str]
    replaced: SumTable
    new: SumTable
    before: SumTable


def _described(state: State, layouts: Mapping[str, ShardOrder] | None) -> Endpoint:
    endpoint = describe_endpoint("target", state, layouts, is_filled=True)
    if not endpoint.problems:
        endpoint.problems += shared_memory_problems(None, endpoint)
    return endpoint


def _problems(offers: Sequence[_Offer], changes: SavedChanges, verify: Verify) -> list[Problem]:
    """Why the changes cannot be applied."""
    others = [
        *differing("changes", [offer.digest for offer in offers], verb="are of files that are", show=None),
        *differing("verify", [offer.verify for offer in offers], advice="pass the same on every rank"),
    ]
    if others:
        return others
    versions = {offer.version for offer in offers if offer.version is not None}
    other = sorted(versions - {changes.base_version})
    if other:
        what = f"lead from version {changes.base_version} to {changes.version}, and the state is of version {other[0]}"
        missing = f"; apply first what leads from {other[0]} to {changes.base_version}"
        return [Problem("other_base", "changes", what + (missing if other[0] < changes.base_version else ""))]
    keys: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for offer in offers:
        for fqn, kind in offer.keys.items():
            keys[fqn].add(kind)
    tied = {fqn: first for offer in offers for fqn, first in offer.tied.items()}
    problems = why_unfit(changes, keys, left_out=tied, nowhere="no rank has it")
    for fqn, first in tied.items():
        is_given = fqn in changes.changed_keys or (fqn in changes.totals and first in changes.totals)
        if is_given and _versions_of(fqn, changes) != _versions_of(first, changes):
            what = f"has the memory of {first} in the state, and not its values in the changes; untie them"
            problems.append(Problem("cannot_reshard", fqn, what))
    if problems:
        return problems
    damaged = SumTable.merge([offer.new for offer in offers]).differing(_of(changes, "new"))
    if damaged:
        what = f"the new elements of {named(damaged)} are not those that were written, and were so in load"
        raise DamagedCheckpointError(f"{changes.path}: {what}")
    wrong = SumTable.merge([offer.replaced for offer in offers]).differing(_of(changes, "replaced"))
    problems = [Problem("other_base", fqn, OTHER_BITS) for fqn in wrong]
    if versions and verify != "all":
        return problems
    before = SumTable.merge([offer.before for offer in offers])
    if not versions and not list(before):
        what = f"are of version {changes.base_version}, and the state has none of their tensors; pass version="
        return [Problem("other_base", "changes", what)]
    whole = before.differing(_of(changes, "before"))
    what = f"{OTHER_BITS}, in elements that stay as they are: it is not of version {changes.base_version}"
    return problems + [Problem("other_base", fqn, what) for fqn in whole if fqn not in wrong]


def _versions_of(fqn: str, changes: SavedChanges) -> tuple[object, ...] | None:
    total = changes.totals.get(fqn)
    return None if total is None else (total.dtype, total.shape, total.before, total.after)


def _of(changes: SavedChanges, name: str) -> dict[str, int]:
    return {fqn: getattr(total, name) for fqn, total in changes.totals.items()}
