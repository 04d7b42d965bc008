"""DeepSpeed's ZeRO stages 1, 2 and 3: a file per rank with flat fp32 partitions, beside the bf16 or fp16 module.

    <tag>/mp_rank_00_model_states.pt                              module, shapes, ties        stages 1 and 2
    <tag>/zero_pp_rank_<rank>_mp_rank_00_model_states.pt          the same for each rank      stage 3
    <tag>/[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt   partitions of a rank

Parameters come from the fp32 masters; buffers and frozen parameters from the module, in its dtypes. What files hold:
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext import _core
from torchtitan_ext.errors import DamagedCheckpointError, Problem, named, refusal
from torchtitan_ext.layout.layout import num_elements
from torchtitan_ext.offline.foreign.archives import Archive, ForeignFiles, flat_chunks, open_archives
from torchtitan_ext.offline.placement_rules import MAX_RANKS
from torchtitan_ext.storage.checkpoint_files import Record
from torchtitan_ext.storage.formats.safetensors_files import ChunkRecord

Chunks = dict[str, list[ChunkRecord] | None]
"""The chunks of parameters by name; ``None`` of one that no file holds."""

_FILES = {
    "model": re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"),
    "optim": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt"),
}
_CUT_OTHERWISE = re.compile(r"layer_.*_states\.pt|expp_rank_.*_optim_states\.pt|.*mp_rank_0*[1-9]\d*_.*_states\.pt")

# What DeepSpeed itself writes into a file of model states; all else is the client's state.
_COUNTERS = ("lr_scheduler", "global_steps", "global_samples", "skipped_steps")
_OF_ENGINE = frozenset({
    *_COUNTERS, "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info",
})  # fmt: skip

_ANEW = "let DeepSpeed's ds_to_universal.py write it anew, and convert that"
_OTHER_AXES = f"is of tensor, pipeline or expert parallel ranks, which nothing in the files says how they cut; {_ANEW}"


def read(directory: Path, *, weights_only: bool) -> ForeignFiles:
    """The checkpoint in the directory of a tag.

    Raises:
        StateRefusedError: (a subclass) Files are missing, cut or damaged, or of ranks that cut tensors otherwise, or
            partitions do not have the elements of their parameters; names all of these.
        UnsafePickleError: A file names a class that may not be unpickled.
        DamagedCheckpointError: The files are not what DeepSpeed writes.
    """
    found: dict[str, dict[int, re.Match[str]]] = {kind: {} for kind in _FILES}
    problems = []
    for name in sorted(os.listdir(directory)):
        if _CUT_OTHERWISE.fullmatch(name):
            problems.append(Problem("cannot_reshard", name, _OTHER_AXES))
            continue
        for kind, pattern in _FILES.items():
            if (match := pattern.fullmatch(name)) and match is not found[kind].setdefault(int(match[1] or 0), match):
                what = "is of a rank that has another file; remove what another save has left"
                problems.append(Problem("broken_checkpoint", name, what))
    for kind in (kind for kind in _FILES if not found[kind]):
        problems.append(Problem("broken_checkpoint", kind, f"no *_{kind}_states.pt is there; copy it once more"))
    if problems:
        raise refusal("open", problems)
    optim, model = ({rank: found[kind][rank] for rank in sorted(found[kind])} for kind in ("optim", "model"))
    names = [match[0] for match in (*optim.values(), *model.values())]
    archives = list(open_archives(directory, names, weights_only=weights_only).values())
    ranks, models = archives[: len(optim)], archives[len(optim) :]
    try:
        of_ranks = {rank for rank, match in model.items() if match[1] is not None}
        _check_ranks(set(optim), of_ranks, ranks[0].value, [one.value for one in models])
        return _Partitions(ranks).files(directory, models)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        what = f"its files are not what DeepSpeed writes ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(f"{directory}: {what}") from None


def _check_ranks(optim: set[int], model: set[int], first: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Refuses files of other ranks than those that cut the partitions."""
    counts = first["optimizer_state_dict"]["partition_count"]
    world = set(range(min(max(counts) if isinstance(counts, list) else counts, MAX_RANKS)))
    found = []
    for kind, held in (("optim", optim), ("model", model or world)):
        missing = f"its file *_{kind}_states.pt is missing, of {len(world)} ranks; copy it to the others"
        left = f"has a file *_{kind}_states.pt, and {len(world)} ranks saved; remove what another save has left"
        found += [Problem("broken_checkpoint", f"rank {rank}", missing) for rank in sorted(world - held)]
        found += [Problem("broken_checkpoint", f"rank {rank}", left) for rank in sorted(held - world)]
    if isinstance(counts, list) and len(set(counts)) > 1:
        found.append(Problem("cannot_reshard", f"a group of {counts} partitions", _OTHER_AXES))
    if states[0].get("mp_world_size", 1) != 1:
        found.append(Problem("cannot_reshard", f"mp_world_size {states[0]['mp_world_size']}", _OTHER_AXES))
    steps = sorted({state["global_steps"] for state in states})
    if len(steps) > 1:
        found.append(
            Problem("broken_checkpoint", "global_steps", f"are {steps} in files of ranks; copy those of one save")
        )
    if found:
        raise refusal("open", found)


class _Partitions:
    """The partitions of all ranks, in their order: of stage 3 dealt, else joined (``csrc/core/flat_partitions.h``)."""

    def __init__(self, ranks: Sequence[Archive]) -> None:
        self._ranks = ranks
        self._states = [archive.value["optimizer_state_dict"] for archive in ranks]
        self._is_dealt = "fp32_flat_groups" in self._states[0]
        key = "optimizer_state_dict" if self._is_dealt else "base_optimizer_state"
        self._optim: list[Any] = [state[key] for state in self._states]
        self._problems: list[Problem] = []

    def files(self, directory: Path, models: Sequence[Archive]) -> ForeignFiles:
        files, chunks = ForeignFiles(directory), Chunks()
        for number, group in enumerate(models[0].value["param_shapes"]):
            add_options(files, self._optim[0]["param_groups"], number, group)
            chunks |= self._add_group(files, number, {name: tuple(shape) for name, shape in group.items()})
        if self._problems:
            raise refusal("open", self._problems)
        add_model(files, models, chunks)
        return files.close()

    def _add_group(self, files: ForeignFiles, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Chunks:
        """Adds the optimizer's state of one group, and returns the chunks of its parameters."""
        key = "fp32_flat_groups" if self._is_dealt else "single_partition_of_fp32_groups"
        masters = [state[key][number] for state in self._states]
        try:
            boxes = dict(zip(shapes, self._boxes(number, shapes, [one.numel() for one in masters]), strict=True))
        except ValueError as error:
            detail = f"{error}: the padding of {named(list(shapes))} cannot be known; {_ANEW}"
            self._problems.append(Problem("broken_checkpoint", f"parameter group {number}", detail))
            return {}
        self._problems += self._misplaced(number, boxes)
        held = [optim["state"].get(number, {}) for optim in self._optim]
        for part, first in held[0].items():
            flat = self._records([one.get(part) for one in held])
            for name, of_name in boxes.items():
                path = ("optimizer", f"state.{name}.{part}")
                if not isinstance(first, torch.Tensor):
                    files.add_value(path, first)
                elif first.dim() == 0:
                    files.add_tensor(path, [((), self._ranks[0].record(first))])
                elif (chunks := flat_chunks(flat, of_name)) is not None:
                    files.add_tensor(path, chunks)
                else:
                    files.add_problem(path, "has other elements than its parameter on some rank; leave it out")
        flat = self._records(masters)
        return {name: flat_chunks(flat, of_name) for name, of_name in boxes.items()}

    def _records(self, values: Sequence[Any]) -> list[Record | None]:
        pairs = zip(self._ranks, values, strict=True)
        return [rank.record(one) if isinstance(one, torch.Tensor) else None for rank, one in pairs]

    def _boxes(self, number: int, shapes: Mapping[str, Sequence[int]], lengths: list[int]) -> list[list[_core.FlatBox]]:
        if self._is_dealt:
            return _core.dealt_boxes(list(shapes.values()), lengths)
        gaps = (self._states[0].get("param_alignment_paddings") or {number: ()})[number]
        boxes = _core.joined_boxes(list(shapes.values()), gaps, lengths)
        spare = sum(lengths) - sum(map(num_elements, shapes.values())) - sum(gaps)
        if spare >= 2 * len(lengths):  # DeepSpeed aligns a group to two elements per rank
            raise ValueError(f"its partitions have {spare} elements more than its parameters, expected padding alone")
        return boxes

    def _misplaced(self, number: int, boxes: Mapping[str, Sequence[_core.FlatBox]]) -> Iterator[Problem]:
        """Parameters that the files themselves place otherwise in the partitions."""
        said_of = [state["param_slice_mappings"][number] for state in self._states if state.get("param_slice_mappings")]
        for name, of_name in boxes.items() if said_of else ():
            for rank, parts in groupby(of_name, key=lambda box: box.partition):
                first, *others = parts
                found = first.position, sum(num_elements(box.sizes) for box in (first, *others))
                said = said_of[rank].get(name)
                if found[1] and (said is None or (said.start, said.numel) != found):
                    where = "nowhere" if said is None else f"at {said.start}, {said.numel} elements"
                    detail = f"rank {rank} has it {where}, expected at {found[0]}, {found[1]} elements; {_ANEW}"
                    yield Problem("broken_checkpoint", name, detail)


def add_options(files: ForeignFiles, param_groups: Any, number: int, names: Iterable[str]) -> None:
    """Adds the options that the optimizer has for the parameters of group ``number``."""
    options = {key: value for group in param_groups if number in group["params"] for key, value in group.items()}
    for name in names:
        for option in options.keys() - {"params"}:
            files.add_value(("optimizer", f"param_groups.{name}.{option}"), options[option])


def add_model(files: ForeignFiles, models: Sequence[Archive], chunks: Chunks, *, is_sliced: bool = False) -> None:
    """Adds the model, counters, and the client's state: parameters by their chunks, all else from the model states.

    Args:
        models: One archive, or of stage 3 one for each rank, which hold parts of frozen parameters.
        chunks: Of the trained parameters.
        is_sliced: The module is the part of one tensor parallel rank: what it alone has cannot be known.

    Raises:
        ReshardError: Parts of a frozen parameter do not have its elements.
    """
    state = models[0].value
    module, frozen = state.get("module") or {}, state.get("frozen_param_shapes") or {}
    is_dealt = any(name in module and module[name].numel() == 0 for name in (*chunks, *frozen))
    for name, shape in frozen.items() if is_dealt else ():
        parts = [model.value["frozen_param_fragments"][name] for model in models]
        try:
            (boxes,) = _core.dealt_boxes([shape], [part.numel() for part in parts])
        except ValueError as error:
            raise refusal("open", [Problem("broken_checkpoint", name, f"{error}; copy it once more")]) from None
        chunks[name] = flat_chunks([model.record(part) for model, part in zip(models, parts, strict=True)], boxes)
    ties = state.get("shared_params")
    chunks |= {name: chunks.get(target) for name, target in (ties or {}).items()}
    for name, places in chunks.items():
        if places is None:
            files.add_problem(("model", name), "is tied to a parameter that no file holds; leave it out")
        else:
            files.add_tensor(("model", name), places)
    certain = {*state["buffer_names"], *(() if is_dealt else frozen if ties is None else module)}
    names = [name for name in module if name not in chunks]
    for name in set(names) - (set() if is_sliced else certain):
        what = "is no parameter, no buffer and tied to nothing, as far as the files say; leave it out"
        files.add_problem(("model", name), what)
        names.remove(name)
    files.add_state(models[0], _rest_of(state, names), _rest_of(models[0].load(), names))


def _rest_of(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    client = {key: value for key, value in state.items() if key not in _OF_ENGINE}
    counters = {key: state[key] for key in _COUNTERS if state.get(key) is not None}
    return {"model": {name: state["module"][name] for name in names}, **counters, "client_state": client}
