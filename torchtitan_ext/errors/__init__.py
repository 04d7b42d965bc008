"""The errors of the package: ordinary exceptions that survive pickling with their fields.

A refusal lists every problem at once, grouped by kind, and is the same on every rank. Through ``tte.save`` and
``tte.load`` it reaches the caller as it is; stock ``dcp.save`` and ``dcp.load`` wrap it in ``CheckpointException``
(a BaseException), whose text then ends with it.

Kinds of problems stand in ``problems``, the classes of refusals in ``refusals``, all other exceptions in ``failures``.
"""

from __future__ import annotations

from torchtitan_ext.errors.checks import (
    argument_error,
    check_argument,
    check_counts,
    clear_frames,
    described,
    first_line,
    is_of_storage,
    only_printed,
    readable_error,
    warn,
)
from torchtitan_ext.errors.failures import (
    AbsentRunError,
    CannotInstallError,
    CannotReshardError,
    CheckpointFailedError,
    CheckpointReadError,
    DamagedCheckpointError,
    DamagedValueError,
    DifferentCallsError,
    LostRankError,
    MeetingError,
    NoCheckpointError,
    ProofFailedError,
    SavedOverError,
    SaveInProgressError,
    TorchtitanExtError,
    TransferFailedError,
    UnknownFormatError,
    UnsafePickleError,
    WorkerLostError,
    WrongPart,
    WrongValueError,
)
from torchtitan_ext.errors.problems import MAX_NAMED, Problem, ProblemKind, Remedy, listed, named
from torchtitan_ext.errors.refusals import (
    LayoutError,
    MissingStateError,
    ReplicaMismatchError,
    ReshardError,
    StateRefusedError,
    SyncMismatchError,
    TransformError,
    WrongArgumentError,
    WrongBaseError,
    refusal,
)

__all__ = [
    "AbsentRunError",
    "CannotInstallError",
    "CannotReshardError",
    "CheckpointFailedError",
    "CheckpointReadError",
    "DamagedCheckpointError",
    "DamagedValueError",
    "DifferentCallsError",
    "LayoutError",
    "LostRankError",
    "MAX_NAMED",
    "MeetingError",
    "MissingStateError",
    "NoCheckpointError",
    "Problem",
    "ProblemKind",
    "ProofFailedError",
    "Remedy",
    "ReplicaMismatchError",
    "ReshardError",
    "SaveInProgressError",
    "SavedOverError",
    "StateRefusedError",
    "SyncMismatchError",
    "TorchtitanExtError",
    "TransferFailedError",
    "TransformError",
    "UnknownFormatError",
    "UnsafePickleError",
    "WorkerLostError",
    "WrongArgumentError",
    "WrongBaseError",
    "WrongPart",
    "WrongValueError",
    "argument_error",
    "check_argument",
    "check_counts",
    "clear_frames",
    "described",
    "first_line",
    "is_of_storage",
    "listed",
    "named",
    "only_printed",
    "readable_error",
    "refusal",
    "warn",
]
