"""Changes of files (``tte.delta``), one after the other, onto the tensors of a checkpoint while these are copied."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from torchtitan_ext._core import SumTable
from torchtitan_ext.delta.files import open_proved
from torchtitan_ext.delta.part_reads import zero_sums
from torchtitan_ext.delta.replacement import OTHER_BITS, Replacement, why_unfit
from torchtitan_ext.delta.saved_changes import SavedChanges
from torchtitan_ext.errors import DamagedCheckpointError, Problem, WrongValueError, named, refusal
from torchtitan_ext.offline.boxes import Memory, Piece
from torchtitan_ext.offline.selection import SelectedKeys, Selection
from torchtitan_ext.offline.torch_boxes import held_piece, tensor_of
from torchtitan_ext.state.value_digest import sum_box
from torchtitan_ext.storage.commit.steps import step_of

ChangeSums = list[tuple[SumTable, SumTable, SumTable]]
"""Of each file the sums of its tensors: of the new bits of the elements that it replaces, of their old bits, and, for
the first file, of all elements before."""
_KINDS = ("new", "replaced", "before")


class ChangeChain:
    """Changes of several files for the tensors of one checkpoint.

    Args:
        paths: The files, in the order of their versions.
        selection: That of ``keys``; changes of tensors that it leaves out are passed over.
        base_version: Of the checkpoint; by default the step that it is named after, and unknown without one.

    Attributes:
        version: What the checkpoint is after the changes; ``None`` without any.
        num_changed: Elements that the files replace, those of each file counted.

    Raises:
        DamagedCheckpointError: A file is no file of changes, or damaged.
        WrongBaseError: A version is missing between the checkpoint and the files, or they are in another order.
        StateRefusedError: (a subclass) Changed tensors are missing, or have other shapes or dtypes.
        WrongValueError: Tensors are cast on the way.
        OSError: A file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        keys: SelectedKeys,
        selection: Selection,
        base_version: int | None = None,
    ) -> None:
        if paths and keys.cast:
            raise WrongValueError(f"got {keys.dtype} beside changes, which are for tensors as they are", "dtype")
        self._chain = [open_proved(Path(path)) for path in paths]
        self._keys = keys
        self._parent = os.getpid()
        left_out = Selection((), selection.prefix).keys_of(keys.source).keys() - keys.fqns.keys()
        kinds = {key: {(entry.dtype, entry.shape)} for key, entry in keys.tensors.items()}
        version = step_of(keys.source.path) if base_version is None else base_version
        problems = []
        for saved in self._chain:
            if version is not None and saved.base_version != version:
                what = f"leads from version {saved.base_version} to {saved.version}, and the tensors are of version "
                advice = (
                    f"; give before it what leads from {version} to {saved.base_version}"
                    if version < saved.base_version
                    else "; give the files in the order of their versions"
                )
                problems.append(Problem("other_base", saved.path, f"{what}{version} then", advice))
            version = saved.version
        for saved in self._chain if not problems else ():
            problems += why_unfit(saved, kinds, left_out=left_out, nowhere="the checkpoint has no such tensor")
        if problems:
            raise refusal("reshard", problems)
        self.version = version if self._chain else None
        self.num_changed = sum(saved.totals[key].count for saved in self._chain for key in self._changed_keys(saved))

    def no_sums(self) -> ChangeSums:
        """To be filled by ``apply``."""
        changed = [self._changed_keys(saved) for saved in self._chain]
        known = [self._known_keys(saved) if saved is self._chain[0] else [] for saved in self._chain]
        return [
            (zero_sums(keys), zero_sums(keys), zero_sums(all_keys))
            for keys, all_keys in zip(changed, known, strict=True)
        ]

    def apply(self, pieces: Iterable[tuple[str, Piece, Memory]], sums: ChangeSums) -> None:
        """Applies the changes to boxes of tensors, in place.

        Args:
            pieces: The new name of the tensor, the box, and the memory of its elements.
            sums: Those of the pieces are added to.
        """
        if os.getpid() != self._parent:
            torch.set_num_threads(1)  # threads that the parent has started do not live here
        filled = [(key, piece, tensor_of(place, piece)) for key, piece, place in pieces if 0 not in piece.sizes]
        for key, piece, tensor in filled if self._chain else ():
            if key in self._chain[0].totals:
                sums[0][2].add(key, int(sum_box(tensor, piece.offsets, self._keys.tensors[key].shape).item()))
        for saved, (sums_new, sums_old, _) in zip(self._chain, sums, strict=True):
            changed = self._changed_keys(saved)
            own = [one for one in filled if one[0] in changed]
            held = [held_piece(key, piece, self._keys.tensors[key].shape) for key, piece, _ in own]
            replacement = Replacement(held, [tensor for _, _, tensor in own], saved, saved.totals)
            for (key, _, _), old, new in zip(own, replacement.old_sums(), replacement.new_sums, strict=True):
                sums_old.add(key, old)
                sums_new.add(key, new)
            replacement.write()

    def check(self, sums: Sequence[ChangeSums]) -> None:
        """Compares the sums over all pieces together with those of the files.

        Raises:
            WrongBaseError: Names the tensors that were not the base of the changes, and the file.
            DamagedCheckpointError: What was read of a file is not what was written, and was so when it was opened.
        """
        problems = []
        for number, saved in enumerate(self._chain):
            new, replaced, before = (
                SumTable.merge(tables).differing({key: getattr(total, what) for key, total in saved.totals.items()})
                for what, *tables in zip(_KINDS, *(of_pieces[number] for of_pieces in sums), strict=True)
            )
            if new:
                what = f"the new elements of {named(new)} are not those that were written"
                raise DamagedCheckpointError(f"{saved.path}: {what}, and were so when it was opened")
            for key in dict.fromkeys(replaced + before):
                where = "" if key in replaced else ", in elements that they do not replace"
                problems.append(Problem("other_base", key, f"{OTHER_BITS}{where} ({saved.path})"))
        if problems:
            raise refusal("reshard", problems)

    def _known_keys(self, saved: SavedChanges) -> list[str]:
        return [key for key in saved.totals if key in self._keys.tensors]

    def _changed_keys(self, saved: SavedChanges) -> dict[str, None]:
        return {key: None for key in saved.changed_keys if key in self._keys.tensors}
