"""All errors but refusals, which stand in ``refusals``: lost ranks, damaged files, other saves in the way.

An error with fields is a dataclass: it takes them as arguments, and is pickled as these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_ext.errors.problems import MAX_NAMED, Remedy, named, named_ranks

_ANOTHER_STEP = "; load another step (of a run step='last-good' finds one)"


class TorchtitanExtError(Exception):
    """Base of all errors of the package."""

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())  # of which a pickle makes the error again


@dataclass(eq=False, repr=False)
class WrongValueError(TorchtitanExtError, ValueError):
    """An argument has a value that is not allowed: never, beside the other arguments, or for this checkpoint.

    What to do: the message says what is expected.

    Attributes:
        detail: What is wrong with the argument.
        argument: Name of the argument, where ``detail`` does not begin with it.
        advice: The end of the sentence: what to do, in calls of this package.
        remedy: The advice as a value.
    """

    detail: str
    argument: str = ""
    advice: str = ""
    remedy: Remedy | None = None

    def __str__(self) -> str:
        where = f"{self.argument}: " if self.argument else ""
        return f"{where}{self.detail}{self.advice}"


@dataclass(eq=False, repr=False)
class LostRankError(TorchtitanExtError, RuntimeError):
    """A collective of a sync, check, save or load failed: a rank died, hangs, or raised something else first.

    What to do: read the logs of these ranks; restart.

    A sync or check raises it on the ranks that notice: at once next to a lost connection, on others when these
    neighbours give up, at the latest after the timeout of the process group. A save or load raises it on every rank
    alike, a few seconds after ``timeout_seconds`` at the latest; a rank that was stopped or slept raises it when it
    goes on.

    Attributes:
        operation: What failed, for example ``"sync_module_states"``.
        phase: What the ranks did meanwhile.
        rank: The rank that raises; ``None`` where all raise the same.
        silent: Ranks that did not answer a roll call of a few seconds: gone, or waiting for one that is.
        reason: What the backend said, or which rank waited how long.
        step: The name of the phase of a save or load.
        path: The checkpoint of a save or load.
        late: Ranks that answered that they are still at work, and where.
        was_asked: Whether a roll call was held; not where the store is lost, through which ranks answer.
    """

    operation: str
    phase: str
    rank: int | None
    silent: tuple[int, ...]
    reason: str
    step: str = ""
    path: str = ""
    late: Mapping[int, str] = field(default_factory=dict)
    was_asked: bool = True

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        where += f" in phase {self.step}" if self.step else ""
        where += f" of {self.path}" if self.path else ""
        all_answered = "all ranks answered a roll call" if self.was_asked else "no roll call could be held"
        silent = f"rank(s) {named(self.silent, len(self.silent))} did not answer a roll call"
        late = "".join(f"; rank {rank} is still at work ({text})" for rank, text in self.late.items())
        answers = silent if self.silent else all_answered
        return f"{self.operation} failed{where} while {self.phase}; {answers}{late}; {self.reason}"


@dataclass(eq=False, repr=False)
class DifferentCallsError(TorchtitanExtError, RuntimeError):
    """Ranks of one process group make different collective calls at once. The same on every rank.

    What to do: make the same calls, in one order, on all ranks.

    Attributes:
        calls: What each rank calls, by its position in the group.
    """

    calls: Mapping[int, str]

    def __str__(self) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank, call in self.calls.items():
            ranks_of.setdefault(call, []).append(rank)
        (first, ranks), *others = ranks_of.items()
        sides = [f"{named_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {first}"]
        sides += [f"{named_ranks(of_call)} {call}" for call, of_call in others[:MAX_NAMED]]
        return f"ranks make different calls: {', '.join(sides)}; make the same calls, in one order, on all ranks"


@dataclass(eq=False, repr=False)
class CannotReshardError(TorchtitanExtError, RuntimeError):
    """A component cannot become what this world needs. Its ``reshard`` raises it, the report of the load shows it.

    What to do: its ``remedy``.

    Attributes:
        reason: Why, with the saved and the wanted values.
        remedy: What the user can do.
        option: The remedy as a value, where it is one option.
    """

    reason: str
    remedy: str
    option: Remedy | None = None

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass(eq=False, repr=False)
class CheckpointReadError(TorchtitanExtError, RuntimeError):
    """A value of the checkpoint could not be read back after loading had begun; targets may be part-written.

    What to do: ``LoadPlanner(allow_classes=[...])`` as ``planner=``, or ``tte.install(allow_classes=[...])``;
    ``LoadPlanner(weights_only=False)`` if you trust the checkpoint; another step if its bytes are damaged.

    Attributes:
        fqn: The key of the value; where several values are not plain data, the first ten of their keys.
        reason: Why not, and what to do where ``advice`` does not say it.
        advice: The end of the sentence: what to do, in calls of this package.
        remedy: The advice as a value.
    """

    fqn: str
    reason: str
    advice: str = ""
    remedy: Remedy | None = None

    def __str__(self) -> str:
        return f"load: cannot read {self.fqn}: {self.reason}{self.advice}"


class DamagedValueError(CheckpointReadError):
    """The bytes of a value of the checkpoint are not those of a value.

    What to do: another step.
    """

    def __str__(self) -> str:
        return f"{super().__str__()}{_ANOTHER_STEP}"


@dataclass(eq=False, repr=False)
class DamagedCheckpointError(TorchtitanExtError, RuntimeError):
    """Bytes of a checkpoint's files are not what was written, or not what this package can read.

    What to do: another step; ``FileReader(path, verify="none")`` to take the bytes as they are.

    Attributes:
        reason: The file, the byte, and which tensors' rows lie there.
        advice: The end of the sentence: which call of this package reads the files all the same.
    """

    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return f"load: {self.reason}{self.advice}{_ANOTHER_STEP}"


@dataclass(frozen=True)
class WrongPart:
    """A part of a loaded tensor whose elements are not those that were saved.

    Attributes:
        fqn: The key in the state dict.
        file: The checkpoint's file with the saved chunk.
        offsets: Where the chunk begins in the global tensor.
        sizes: Its shape.
        ranks: The ranks that hold wrong elements of it.
        is_in_file: Whether the file has other elements than were saved under this key; ``None`` if it could not be read
            again.
    """

    fqn: str
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    is_in_file: bool | None

    def __str__(self) -> str:
        rows = ", ".join(f"{first}:{first + size}" for first, size in zip(self.offsets, self.sizes, strict=True))
        where = {
            True: "the file has other elements there than were saved under this key",
            False: "the file has what was saved: it changed after it was read",
            None: "the file could not be read again",
        }[self.is_in_file]
        return f"{self.fqn}[{rows}] of {self.file} on rank(s) {', '.join(map(str, self.ranks))}; {where}"


@dataclass(eq=False, repr=False)
class ProofFailedError(TorchtitanExtError, RuntimeError):
    """Loaded tensors are not what was saved: their fingerprints differ. The same on every rank; the state is undefined.

    What to do: load again, where the file has what was saved: memory or a component changed it; else another step.

    Attributes:
        path: The checkpoint.
        fqns: Keys of the wrong tensors in the state dict.
        parts: What is wrong on which ranks, for the first of these keys.
        shapes: By key the saved shape and the present one, of tensors that their objects give back in another shape.
    """

    path: str
    fqns: tuple[str, ...]
    parts: tuple[WrongPart, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"load: {len(self.fqns)} tensor(s) of {self.path} are not what was saved ({named(self.fqns)}); load again, "
            "and another step where that fails too"
        ]
        changed = [
            f"{fqn}: its object gives it back with the shape {list(now)}, saved was {list(saved)}"
            for fqn, (saved, now) in self.shapes.items()
        ]
        details = [*changed, *self.parts]
        lines += [f"  {detail}" for detail in details[:MAX_NAMED]]
        more = len(details) - MAX_NAMED
        return "\n".join([*lines, *([f"  ... and {more} more"] if more > 0 else [])])


@dataclass(eq=False, repr=False)
class SaveInProgressError(TorchtitanExtError, RuntimeError):
    """Another save is under way in the same place, or took it over; this one wrote nothing that anybody reads.

    What to do: wait for the other save, end it, or save elsewhere.

    Attributes:
        path: The directory of both saves.
        owner: The process that saves there, its host, since when.
        lock: The file that says so; empty in an object store, where the first to commit wins.
    """

    path: str
    owner: str
    lock: str

    def __str__(self) -> str:
        if not self.lock:
            return f"save: {self.path} was taken by {self.owner}; save again, or to another place"
        return (
            f"save: {self.path} is being saved to by {self.owner}; wait for it, end it, or save to another directory. "
            f"If it is gone, remove {self.lock}"
        )


@dataclass(eq=False, repr=False)
class UnknownOutcomeError(TorchtitanExtError, RuntimeError):
    """An object store has not said in time whether a save is committed: the old or the new checkpoint is there, whole.

    What to do: load or save again when the store answers.

    Attributes:
        path: The URL of the checkpoint.
        save_id: The name of the save: ``.metadata`` has it if the save is committed.
        reason: What the last request got for an answer.
    """

    path: str
    save_id: str
    reason: str

    def __str__(self) -> str:
        return (
            f"save: the store has not said whether {self.path} is committed as save {self.save_id} ({self.reason}); "
            "the old or the new checkpoint is there, whole, and nothing was deleted: look again when the store answers"
        )


@dataclass(eq=False, repr=False)
class _PathError(TorchtitanExtError, RuntimeError):
    path: str
    detail: str


class SavedOverError(_PathError):
    """A checkpoint was saved over, or removed, while it was loaded. The same on every rank; nothing was mixed.

    What to do: load it again.

    Attributes:
        path: The checkpoint.
        detail: Which part of the earlier checkpoint is gone.
    """

    def __str__(self) -> str:
        return f"load: {self.path} was saved over while it was read ({self.detail}); load it again"


@dataclass(eq=False, repr=False)
class NoCheckpointError(TorchtitanExtError, RuntimeError):
    """A run has no checkpoint of the step that was asked for, or none that is good.

    What to do: another step; pass the directory of the run, not of a step.

    Attributes:
        run: The directory of the run.
        detail: What was asked for and what is there.
        has_steps: Whether the run has finished checkpoints at all: others than asked for, or damaged ones.
    """

    run: str
    detail: str
    has_steps: bool = True

    def __str__(self) -> str:
        return f"load: {self.run} {self.detail}"


@dataclass(eq=False, repr=False)
class AbsentRunError(TorchtitanExtError, RuntimeError):
    """Nothing is at the path of a run, as where its disk is not mounted, and a fallback directory has steps of it.

    What to do: mount the disk of the run; or pass the step by its number, which loads it from the fallback; or
    remove the fallback's folder, to begin anew.

    It is no ``NoCheckpointError``, after which a trainer may begin anew.

    Attributes:
        run: The directory of the run.
        fallback: The run's folder in the fallback directory.
        step: The latest finished step there. The run may have later ones.
        option: How the caller gives a step.
    """

    run: str
    fallback: str
    step: int
    option: str = "step="

    def __str__(self) -> str:
        return (
            f"load: {self.run} is not there or is empty, and the fallback {self.fallback} has step {self.step}, which "
            f"may not be the latest; mount the disk of the run, pass {self.option}{self.step} to go on from the "
            "fallback, or remove that to begin anew"
        )


class UnknownFormatError(_PathError):
    """There is no checkpoint at a path in a format that this package knows, or its save has not finished.

    What to do: pass the path of a checkpoint; for a run name a step.

    Attributes:
        path: The file or directory.
        detail: What is there, or is missing.
    """

    def __str__(self) -> str:
        return (
            f"{self.path} is no checkpoint: {self.detail}; expected a directory of torch.distributed.checkpoint, "
            "safetensors files, or a file of torch.save"
        )


class UnsafePickleError(_PathError):
    """A file's pickle names a class or function that may not be unpickled; nothing was run.

    What to do: ``--unsafe-unpickle``, if you trust its author.

    Attributes:
        path: The file.
        detail: What the pickle names.
    """

    def __str__(self) -> str:
        return f"{self.path} is not unpickled, which could run any code: {self.detail}"


@dataclass(eq=False, repr=False)
class CheckpointFailedError(TorchtitanExtError, RuntimeError):
    """Ranks failed while planning, writing or reading, for reasons outside this package (a full disk, a lost file).

    What to do: repair the cause and try again; load what is undefined again before you train.

    Attributes:
        operation: What failed, for example ``"save"``.
        failures: What each failed rank raised, as text.
        undefined: Components of the state dict that may be part-written: load them again, or start anew.
        step: The name of the phase.
        path: The checkpoint.
        is_of_storage: Whether storage failed on each of these ranks, see ``is_of_storage``: the state is fine, and
            another place may take it.
        was_interrupted: Whether one of them was interrupted: it raises that itself, and makes no further call.
    """

    operation: str
    failures: dict[int, str]
    undefined: tuple[str, ...] = ()
    step: str = ""
    path: str = ""
    is_of_storage: bool = False
    was_interrupted: bool = False

    def __str__(self) -> str:
        ranks = "; ".join(f"rank {rank}: {failure}" for rank, failure in self.failures.items())
        text = f"{self.operation} failed on {len(self.failures)} rank(s): {ranks}"
        if self.step:
            text += f" (in phase {self.step}{f' of {self.path}' if self.path else ''})"
        if self.undefined:
            text += f". Part-written, load again or start anew: {', '.join(self.undefined)}; all else is unchanged"
            text += _ANOTHER_STEP if self.operation == "load" else ""
        return text


@dataclass(eq=False, repr=False)
class TransferFailedError(TorchtitanExtError, RuntimeError):
    """Ranks failed while they planned or ran a transfer from memory to memory. The same on every rank.

    What to do: repair the cause, then run the transfer again, or fill the target anew.

    Attributes:
        operation: What failed, ``"reshard"``.
        failures: What each failed rank raised, as text.
        part_written: Keys of the target that may be part-written; none where nothing had moved.
        step: The name of the phase.
    """

    operation: str
    failures: dict[int, str]
    part_written: tuple[str, ...]
    step: str

    def __str__(self) -> str:
        ranks = "; ".join(f"rank {rank}: {failure}" for rank, failure in self.failures.items())
        text = f"{self.operation} failed on {len(self.failures)} rank(s) in phase {self.step}: {ranks}"
        if self.part_written:
            text += f". The target may be part-written, run it again or fill it anew: {named(self.part_written)}"
        return text


@dataclass(eq=False, repr=False)
class WorkerLostError(TorchtitanExtError, RuntimeError):
    """A process that did a part of the work was killed, most often for lack of memory. Nothing was committed.

    What to do: fewer processes, or less memory for each.

    Attributes:
        exit_code: The process's exit code, which after a signal is minus its number; ``None`` where the system does not
            keep it, because this process ignores SIGCHLD.
    """

    exit_code: int | None

    def __str__(self) -> str:
        code = self.exit_code
        how = "died" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"a worker process {how}; nothing was changed; try fewer processes or less memory"


class CannotInstallError(TorchtitanExtError, RuntimeError):
    """``tte.install`` does not know this torch, or somebody else has patched the functions that it wraps.

    What to do: the message names them; ``planner=`` and ``storage_writer=`` always work.
    """


class OtherTorchtitanError(TorchtitanExtError, ImportError):
    """``torchtitan_ext.integrations.torchtitan`` knows torchtitan 0.3.0, and another is installed.

    What to do: use torchtitan 0.3.0, or ``tte.install()``.
    """
