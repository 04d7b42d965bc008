"""Other people's planners and storage: sets them up, and refuses changes of a subclass that cannot be followed.

Our plans are decided over all ranks and have no items before ``finish_plan``. A subclass that has planning methods of
its own gets items all the same, as this rank alone would make them. A change of these is followed, or refused on
every rank with a ``WrongArgumentError``, which is a TypeError; ``docs/reference/planners.md`` lists both. The first
calls to planner and storage are made as DCP makes them, older interfaces included.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner import LoadPlanner as StockLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchtitan_ext.errors import Problem, SavedOverError, StateRefusedError, described, named, refusal
from torchtitan_ext.storage.formats.detect import how_to_load


def overrides(planner: object, ours: type, *names: str) -> bool:
    """Whether a planner's class, or the planner itself, replaces any of these methods of ours."""
    own = vars(planner)
    return any(name in own or getattr(type(planner), name) is not getattr(ours, name) for name in names)


def sees_items(planner: object, ours: type) -> bool:
    """Whether a planner's class may look at items before they are decided."""
    return overrides(planner, ours, "create_local_plan", "create_global_plan", "finish_plan")


def not_set_up(planner: object, call: str) -> Problem:
    """The problem of a class whose ``set_up_planner`` does not call ours with these arguments."""
    return _problem(
        planner,
        f"its set_up_planner does not call that of the class it extends; call super().set_up_planner({call}), with the "
        "state dict that shall be planned",
    )


def no_place(planner: object, fqns: Sequence[str]) -> list[Problem]:
    """The problem of non-tensor values whose place in the nested state dict is unknown."""
    if not fqns:
        return []
    detail = (
        f"its state_dict has values under {named(fqns)}, and nothing says where these belong; say so in mappings, or "
        "rename keys by source=Source(rename=...)"
    )
    return [_problem(planner, detail)]


def uncalled_methods(planner: object, ours: type, stock: type) -> list[Problem]:
    """The problem of a class that replaces methods of DCP's default planner which ours never calls."""
    names = vars(stock).keys() - vars(ours).keys()
    replaced = sorted(name for name in names if not name.startswith("__") and overrides(planner, stock, name))
    if not replaced:
        return []
    detail = (
        f"it replaces {', '.join(replaced)}, which {ours.__name__} does not call; replace a method of DCP's planner "
        f"protocol, or extend {stock.__name__} instead"
    )
    return [_problem(planner, detail)]


def check_local_plans(
    operation: str, planner: object, ours: type, plans: Sequence[SavePlan | LoadPlan], message: type
) -> None:
    """Raises WrongArgumentError where a subclass on any rank changed its local plan. Called on the coordinator.

    The planner is the coordinator's; those of other ranks are most often of the same class.
    """
    problems: list[Problem] = []
    for rank, plan in enumerate(plans):
        data = plan.planner_data
        if isinstance(data, message):
            # A load sends its table in a request.
            table: Any = getattr(data, "table", data)
            problems += [one for one in table.rest.problems if one.kind == "planner_subclass"]
            continue
        is_alike = overrides(planner, ours, "create_local_plan")
        whose = type(planner).__qualname__ if is_alike else f"the planner of rank {rank}"
        detail = (
            f"its create_local_plan returns a plan with {described(data)} as planner_data; call "
            "super().create_local_plan() and keep its planner_data, or extend DCP's default planner instead"
        )
        problems.append(Problem("planner_subclass", whose, detail))
    if problems:
        raise refusal(operation, problems)


def check_global_plan(operation: str, planner: object, plan: SavePlan | LoadPlan, decision: type) -> None:
    """Raises WrongArgumentError where a subclass made the plan that this rank got."""
    if not isinstance(plan.planner_data, decision):
        detail = (
            f"its create_global_plan returns plans with {described(plan.planner_data)} as planner_data; call "
            "super().create_global_plan() and keep the planner_data of its plans, or extend DCP's default planner "
            "instead"
        )
        raise refusal(operation, [_problem(planner, detail)])


def check_write_items(planner: object, shown: Sequence[WriteItem], given: Sequence[WriteItem]) -> None:
    """Raises WrongArgumentError where a subclass, or a storage, changed items of a save before ranks decided them."""
    changed = _changed(shown, given)
    if changed:
        detail = (
            f"its items of {named(changed)} are not those that SavePlanner made, which are decided over all ranks; "
            "change the state dict in set_up_planner, or the plan that super().finish_plan() returns"
        )
        raise refusal("save", [_problem(planner, detail)])


def check_final_items(planner: object, decided: Sequence[WriteItem], final: Sequence[WriteItem]) -> None:
    """Raises WrongArgumentError where the plan of a subclass lacks items that the metadata promises."""
    written = {item.index for item in final}
    lost = sorted({item.index.fqn for item in decided if item.index not in written})
    if lost:
        detail = (
            f"the plan that its finish_plan returns lacks items of {named(lost)}, which no load would find; leave "
            "them out of the state dict in set_up_planner"
        )
        raise refusal("save", [_problem(planner, detail)])


def followed_items(
    planner: object, shown: Sequence[ReadItem], given: Sequence[ReadItem], decided: Sequence[ReadItem]
) -> list[ReadItem]:
    """The items that a load reads after a subclass changed some: its own, and for other keys those that ranks decided.

    Raises:
        WrongArgumentError: It changed items of keys for which the ranks decided otherwise.
    """
    moved = set(_changed(shown, decided))
    changed = [fqn for fqn in _changed(shown, given) if fqn in moved]
    if changed:
        detail = (
            f"its items of {named(changed)} were changed before all ranks had decided which rows this rank holds; "
            "change the plan that super().finish_plan() returns"
        )
        raise refusal("load", [_problem(planner, detail)])
    others = [item for item in given if item.dest_index.fqn not in moved]
    return [*others, *(item for item in decided if item.dest_index.fqn in moved)]


def _changed(shown: Sequence[Any], given: Sequence[Any]) -> list[str]:
    """The keys whose items differ between two lists."""
    before, after = _by_key(shown), _by_key(given)
    return sorted(fqn for fqn in {*before, *after} if before.get(fqn) != after.get(fqn))


def _by_key(items: Sequence[WriteItem | ReadItem]) -> dict[str, list[Any]]:
    by_key: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        by_key[item.index.fqn if isinstance(item, WriteItem) else item.dest_index.fqn].append(item)
    return by_key


def _problem(planner: object, detail: str) -> Problem:
    return Problem("planner_subclass", type(planner).__qualname__, detail)


def set_up_save(values: dict[Any, Any], writer: StorageWriter, planner: StockSavePlanner, rank: int) -> None:
    """Sets up planner and storage for a save, as DCP does before it asks for local plans. Not collective."""
    is_coordinator = rank == 0
    if _takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(values, storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(values, is_coordinator)  # type: ignore[arg-type]
    if _takes(writer.set_up_storage_writer, "kwargs"):
        writer.set_up_storage_writer(is_coordinator, rank=rank, use_collectives=True)
    else:
        writer.set_up_storage_writer(is_coordinator)


def read_metadata(reader: StorageReader, name: str, rank: int, path: Path | None = None) -> tuple[Metadata, bool]:
    """The metadata of a checkpoint, and whether it covers only this rank's part (``use_collectives=False``).

    Raises:
        ReshardError: There is no metadata that can be read; says what the directory at ``path`` holds instead.
    """
    try:
        return reader.read_metadata(), False
    except (StateRefusedError, SavedOverError):  # a reader of ours, which says what is wrong
        raise
    except Exception as error:
        whole = error
    if _takes(reader.read_metadata, "kwargs"):
        try:
            return reader.read_metadata(rank=rank), True
        except Exception:
            pass
    other = how_to_load(path) if path is not None else None
    if other is not None:
        raise refusal("load", [Problem("no_checkpoint", name, other)])
    detail = (
        f"has no .metadata that can be read ({type(whole).__name__}: {whole}); give the path of a checkpoint whose "
        "save has finished"
    )
    raise refusal("load", [Problem("broken_checkpoint", name, detail)])


def set_up_load(
    values: dict[Any, Any],
    reader: StorageReader,
    planner: StockLoadPlanner,
    metadata: Metadata,
    rank: int,
    *,
    is_of_one_rank: bool,
) -> None:
    """Sets up planner and storage for a load, as DCP does before it asks for local plans. Not collective."""
    is_coordinator = rank == 0
    planner.set_up_planner(values, metadata, is_coordinator)
    if _takes(reader.set_up_storage_reader, "kwargs"):
        reader.set_up_storage_reader(metadata, is_coordinator, rank=rank, use_collectives=not is_of_one_rank)
    else:
        reader.set_up_storage_reader(metadata, is_coordinator)


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters
