"""Everything that can go wrong but for refusals (``refusals``): lost ranks, damaged files, other saves in the way."""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan_ext.errors.problems import Remedy


class TorchtitanExtError(Exception):
    """Base of all errors of the package."""


class WrongValueError(TorchtitanExtError, ValueError):
    """An argument has a value that cannot be, alone, beside the others, or for this checkpoint.

    Args:
        detail: What is wrong with it.
        argument: Its name, where ``detail`` does not begin with it.
        advice: The end of the sentence, where it says what to do in calls of this package.
        remedy: The same as a value.
    """

    def __init__(self, detail: str, argument: str = "", advice: str = "", remedy: Remedy | None = None) -> None:
        super().__init__(detail, argument, advice, remedy)
        self.detail = detail
        self.argument = argument
        self.advice = advice
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.argument}: " if self.argument else ""
        return f"{where}{self.detail}{self.advice}"


class LostRankError(TorchtitanExtError, RuntimeError):
    """A collective of a sync, check, save or load failed: a rank died, hangs, or raised something else first.

    In a sync or check raised on the ranks that notice: at once next to a lost connection, on others when these
    neighbours give up, at the latest after the timeout of the process group. In a save or load the same on every rank,
    a few seconds after ``timeout_seconds`` at the latest; on a rank that was stopped or slept, when it goes on.

    Args:
        operation: What failed, for example ``"sync_module_states"``.
        phase: What the ranks did meanwhile.
        rank: The rank that raises; ``None`` where all raise the same.
        silent: Ranks that did not answer a roll call of a few seconds: gone, or waiting for one that is.
        reason: What the backend said, or who waited how long.
        step: Of a save or load the phase by its name.
        path: Of a save or load the checkpoint.
        late: Ranks that answered that they were still at work, and where.
    """

    def __init__(
        self,
        operation: str,
        phase: str,
        rank: int | None,
        silent: tuple[int, ...],
        reason: str,
        step: str = "",
        path: str = "",
        late: Mapping[int, str] | None = None,
    ) -> None:
        late = dict(late or {})
        super().__init__(operation, phase, rank, silent, reason, step, path, late)
        self.operation = operation
        self.phase = phase
        self.rank = rank
        self.silent = silent
        self.reason = reason
        self.step = step
        self.path = path
        self.late = late

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        where += f" in phase {self.step}" if self.step else ""
        where += f" of {self.path}" if self.path else ""
        silent = f"rank(s) {', '.join(map(str, self.silent))} did not answer" if self.silent else "all ranks answered"
        late = "".join(f"; rank {rank} is still at work ({text})" for rank, text in self.late.items())
        return f"{self.operation} failed{where} while {self.phase}; {silent} a roll call{late}; {self.reason}"


class CannotReshardError(TorchtitanExtError, RuntimeError):
    """A component cannot become what this world needs; raised by its ``reshard``, shown in the report of the load.

    Args:
        reason: Why, with the saved and the wanted values.
        remedy: What the user can do.
        option: The same as a value, where it is one option.
    """

    def __init__(self, reason: str, remedy: str, option: Remedy | None = None) -> None:
        super().__init__(reason, remedy, option)
        self.reason = reason
        self.remedy = remedy
        self.option = option

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class CheckpointReadError(TorchtitanExtError, RuntimeError):
    """A value of the checkpoint could not be read back after loading had begun; targets may be part-written.

    Args:
        fqn: The key of the value; where several are no plain data, the first ten of their keys.
        reason: Why not, and what to do where ``advice`` does not say it.
        advice: The end of the sentence, where it says what to do in calls of this package.
        remedy: The same as a value.
    """

    def __init__(self, fqn: str, reason: str, advice: str = "", remedy: Remedy | None = None) -> None:
        super().__init__(fqn, reason, advice, remedy)
        self.fqn = fqn
        self.reason = reason
        self.advice = advice
        self.remedy = remedy

    def __str__(self) -> str:
        return f"load: cannot read {self.fqn}: {self.reason}{self.advice}"


class DamagedValueError(CheckpointReadError):
    """The bytes of a value of the checkpoint are not those of a value."""

    def __str__(self) -> str:
        return f"{super().__str__()}; load another step"


class DamagedCheckpointError(TorchtitanExtError, RuntimeError):
    """Bytes of a checkpoint's files are not what was written, or not what this package can read.

    Args:
        reason: The file, the byte, and which tensors' rows lie there.
        advice: The end of the sentence, where it says how a call of this package would read them all the same.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason, advice)
        self.reason = reason
        self.advice = advice

    def __str__(self) -> str:
        return f"load: {self.reason}{self.advice}; load another step"


class SaveInProgressError(TorchtitanExtError, RuntimeError):
    """Another save is under way in the same place, or took it over; this one wrote nothing that anybody reads.

    Args:
        path: Where.
        owner: Who saves there: process, host, since when.
        lock: The file that says so.
    """

    def __init__(self, path: str, owner: str, lock: str) -> None:
        super().__init__(path, owner, lock)
        self.path = path
        self.owner = owner
        self.lock = lock

    def __str__(self) -> str:
        return (
            f"save: {self.path} is being saved to by {self.owner}; wait for it, end it, or save to another directory. "
            f"If it is gone, remove {self.lock}"
        )


class _PathError(TorchtitanExtError, RuntimeError):
    """Of what lies at a path."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(path, detail)
        self.path = path
        self.detail = detail


class SavedOverError(_PathError):
    """A checkpoint was saved over, or removed, while it was loaded. The same on every rank; nothing was mixed.

    Args:
        path: The checkpoint.
        detail: What of the earlier one is gone.
    """

    def __str__(self) -> str:
        return f"load: {self.path} was saved over while it was read ({self.detail}); load it again"


class NoCheckpointError(TorchtitanExtError, RuntimeError):
    """A run has no checkpoint of the step that was asked for, or none that is good.

    Args:
        run: The directory of the run.
        detail: What was asked for and what is there.
    """

    def __init__(self, run: str, detail: str) -> None:
        super().__init__(run, detail)
        self.run = run
        self.detail = detail

    def __str__(self) -> str:
        return f"load: {self.run} {self.detail}"


class UnknownFormatError(_PathError):
    """What lies at a path is no checkpoint of a format that this package knows, or one whose save has not finished.

    Args:
        path: Of the file or directory.
        detail: What is there, or is not.
    """

    def __str__(self) -> str:
        return (
            f"{self.path} is no checkpoint: {self.detail}; expected a directory of torch.distributed.checkpoint, "
            "safetensors files, or a file of torch.save"
        )


class UnsafePickleError(_PathError):
    """A file's pickle names what is not on the list of what may be unpickled; nothing of it was run.

    Args:
        path: Of the file.
        detail: What it names.
    """

    def __str__(self) -> str:
        return f"{self.path} is not unpickled, which could run any code: {self.detail}"


class CheckpointFailedError(TorchtitanExtError, RuntimeError):
    """Ranks failed while planning, writing or reading, for reasons outside this package (a full disk, a lost file).

    Args:
        operation: What failed, for example ``"save"``.
        failures: What each failed rank raised, as text.
        undefined: Components of the state dict that may be part-written: load them again, or start anew.
        step: The phase by its name.
        path: Of the checkpoint.
    """

    def __init__(
        self, operation: str, failures: dict[int, str], undefined: tuple[str, ...] = (), step: str = "", path: str = ""
    ) -> None:
        super().__init__(operation, failures, undefined, step, path)
        self.operation = operation
        self.failures = failures
        self.undefined = undefined
        self.step = step
        self.path = path

    def __str__(self) -> str:
        ranks = "; ".join(f"rank {rank}: {failure}" for rank, failure in self.failures.items())
        text = f"{self.operation} failed on {len(self.failures)} rank(s): {ranks}"
        if self.step:
            text += f" (in phase {self.step}{f' of {self.path}' if self.path else ''})"
        if self.undefined:
            text += f". Part-written, load again or start anew: {', '.join(self.undefined)}; all else is unchanged"
        return text


class WorkerLostError(TorchtitanExtError, RuntimeError):
    """A process that did a part of the work was killed, most often for lack of memory. Nothing was committed.

    Args:
        exit_code: As ``multiprocessing`` has it: minus the number of the signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        how = f"was killed by signal {-self.exit_code}" if self.exit_code < 0 else f"ended with {self.exit_code}"
        return f"a worker process {how}; nothing was changed; try fewer processes or less memory"


class CannotInstallError(TorchtitanExtError, RuntimeError):
    """``tte.install`` does not know this torch, or somebody else has patched the functions that it wraps."""
