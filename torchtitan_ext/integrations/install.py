"""Puts our planners and files into DCP's own ``save``, ``load`` and ``async_save``, for code that passes none.

Frameworks build ``DefaultSavePlanner()`` or ``FileSystemWriter(path)`` inside their functions, or pass nothing. So we
wrap the functions below DCP's ``save`` and ``load``, in the modules where these look them up: callers that imported
``save`` earlier reach them too. Subclasses, and all other planners and storages, are left alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.distributed.checkpoint import format_utils, staging, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from torchtitan_ext.checkpoint import LoadPlanner, SavePlanner
from torchtitan_ext.dcp_private import (
    EmptyStateDictLoadPlanner,
    ExtensionRegistry,
    async_process_executor,
    async_thread_executor,
    is_fsspec,
)
from torchtitan_ext.errors import CannotInstallError
from torchtitan_ext.layout.own_boxes import keep_own_boxes
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.location import is_in_object_store, is_local
from torchtitan_ext.storage.native.object_writer import ObjectWriter
from torchtitan_ext.storage.weights.safetensors_reader import SafetensorsReader
from torchtitan_ext.storage.weights.writer import SafetensorsWriter

logger = logging.getLogger(__name__)

# Imported before anything is wrapped, so that the functions it imports by name stay stock's.
_STOCK = format_utils

OPTIONS: Mapping[type, tuple[str, ...]] = {
    SavePlanner: ("layouts", "replicas", "hash_replicas"),
    LoadPlanner: ("layouts", "cast", "allow_unclaimed", "weights_only", "allow_classes"),
    FileWriter: ("sync", "thread_count"),
    ObjectWriter: ("thread_count",),
    FileReader: ("verify", "thread_count"),
    SafetensorsWriter: ("sync", "thread_count"),
    SafetensorsReader: ("thread_count",),
}
"""The options that ``install`` passes to each of our classes."""

# Attributes of stock's planner that ours takes over.
_OF_SAVE_PLANNER = "flatten_state_dict flatten_sharded_tensors dedup_save_to_lowest_rank"

# Parameters of DCP's functions, by which this module knows them.
_SAVE = "state_dict storage_writer process_group coordinator_rank no_dist planner use_collectives"
_LOAD = "state_dict storage_reader process_group coordinator_rank no_dist planner"
_EXECUTE = (
    "self staging_future_or_state_dict checkpoint_id storage_writer planner process_group no_dist use_collectives"
)


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of one ``install``, and the names of replaced classes that were logged."""

    planners: bool
    storage: bool
    options: Mapping[str, Any]
    logged: set[str] = field(default_factory=set)

    def make(self, ours: type, stock: type, *args: Any, **carried: Any) -> Any:
        """Makes one of ours in place of a stock object. Options of ``install`` win over those of the object."""
        options = {name: self.options[name] for name in OPTIONS[ours] if name in self.options}
        made = ours(*args, **{**carried, **options})
        if stock.__name__ not in self.logged:
            self.logged.add(stock.__name__)
            logger.info("torchtitan_ext: %s takes the place of %s", ours.__name__, stock.__name__)
        return made


@dataclass(frozen=True)
class Point:
    """A function of DCP that is wrapped: ``owner`` holds it, ``parameters`` are the names of its parameters.

    ``replace`` changes the arguments before the call, ``finish`` sees them and the result.
    """

    owner: Any
    name: str
    parameters: str
    replace: Callable[[Settings, dict[str, Any]], None]
    finish: Callable[[Mapping[str, Any], Any], None] = lambda passed, result: None


class Installation:
    """The settings in force in this process: those of ``with installed()`` entered last, else those of ``install``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lasting: Settings | None = None
        self.passing: list[Settings] = []
        self._wrapped: list[tuple[Point, Any, Any]] = []

    @property
    def active(self) -> Settings | None:
        """The settings in force. A save that has begun keeps those it began with."""
        passing = self.passing
        return passing[-1] if passing else self.lasting

    def wrap(self) -> None:
        """Wraps DCP's functions unless they are wrapped. Raises CannotInstallError before anything has changed."""
        if not self._wrapped:
            originals = [_checked(point) for point in POINTS]
            for point, original in zip(POINTS, originals, strict=True):
                wrapper = _wrap(self, point, original)
                setattr(point.owner, point.name, wrapper)
                self._wrapped.append((point, original, wrapper))

    def unwrap(self) -> None:
        """Puts DCP's functions back if no settings are in force."""
        if self.active is None:
            for point, original, wrapper in self._wrapped:
                # If somebody has wrapped ours meanwhile, it stays: without settings it calls stock's.
                if getattr(point.owner, point.name) is wrapper:
                    setattr(point.owner, point.name, original)
            self._wrapped = []


def install(planners: bool = True, storage: bool = True, **options: Any) -> None:
    """Lets ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` of this process use our planners and files.

    Not collective: call it on every rank, before the first save or load. A second call takes the place of the first.

    Args:
        planners: Where none is passed, or exactly a ``DefaultSavePlanner`` or ``DefaultLoadPlanner``: ours, with its
            options.
        storage: Where none is passed, or exactly a ``FileSystemWriter`` or ``FileSystemReader``: ours, with its path
            and options. A writer whose options ours lacks is left alone. So are URLs, but for those of object stores
            that ``tte.save`` commits to. In place of a ``HuggingFaceStorageReader`` and of a
            ``HuggingFaceStorageWriter`` with ``enable_consolidation``, or without ``save_distributed``, ours read and
            write the final safetensors files.
        options: Of ``SavePlanner``, ``LoadPlanner``, ``FileWriter`` and ``FileReader``: see ``OPTIONS``.

    Raises:
        CannotInstallError: This torch is not known, or somebody else has patched the same functions.
        TypeError: An option that none of ours has.
    """
    settings = _settings("install", planners, storage, options)
    with _INSTALLATION.lock:
        _INSTALLATION.wrap()
        _INSTALLATION.lasting = settings


def uninstall() -> None:
    """Undoes ``install``; without one it does nothing. Inside of ``with installed()`` this goes on to its end."""
    with _INSTALLATION.lock:
        _INSTALLATION.lasting = None
        _INSTALLATION.unwrap()


@contextmanager
def installed(planners: bool = True, storage: bool = True, **options: Any) -> Iterator[None]:
    """``install`` until the end of the ``with``, for all threads of this process. The innermost ``with`` wins."""
    settings = _settings("installed", planners, storage, options)
    with _INSTALLATION.lock:
        _INSTALLATION.wrap()
        _INSTALLATION.passing.append(settings)
    try:
        yield
    finally:
        with _INSTALLATION.lock:
            _INSTALLATION.passing.remove(settings)
            _INSTALLATION.unwrap()


def _settings(function: str, planners: bool, storage: bool, options: dict[str, Any]) -> Settings:
    known = sorted({name for names in OPTIONS.values() for name in names})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{function}: got the option(s) {', '.join(unknown)}, expected some of {', '.join(known)}")
    settings = Settings(planners, storage, dict(options))
    # Wrong values raise here, not in the first save.
    for ours in OPTIONS:
        args = () if ours in (SavePlanner, LoadPlanner) else (".",)
        if ours is not ObjectWriter:  # whose options others have too
            ours(*args, **{name: options[name] for name in OPTIONS[ours] if name in options})
    return settings


def _checked(point: Point) -> Any:
    """The function of torch at a point. Raises ``CannotInstallError`` unless it is the one that this module knows."""
    where = f"{getattr(point.owner, '__qualname__', point.owner.__name__)}.{point.name}"
    function = getattr(point.owner, point.name, None)
    if function is None:
        raise CannotInstallError(f"torch {torch.__version__} has no function {where}; use planner= and storage_writer=")
    if _is_ours(function):
        # Somebody had wrapped ours when it was uninstalled, and has put it back since.
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise CannotInstallError(f"{where} was patched by {function!r} before; install first, or without it")
    folder = Path(str(torch.__file__)).parent / "distributed"
    if folder not in Path(function.__code__.co_filename).parents:
        by = f"{function.__module__}.{function.__qualname__}"
        raise CannotInstallError(f"{where} was patched by {by} before; install first, or without it")
    names = list(inspect.signature(function).parameters)
    if names != point.parameters.split():
        got = f"{where}({', '.join(names)})"
        raise CannotInstallError(f"torch {torch.__version__} has another {got}; use planner= and storage_writer=")
    return function


def _wrap(installation: Installation, point: Point, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def with_ours(*args: Any, **kwargs: Any) -> Any:
        settings = installation.active
        if settings is None:
            return original(*args, **kwargs)
        passed = signature.bind(*args, **kwargs)
        point.replace(settings, passed.arguments)
        result = original(*passed.args, **passed.kwargs)
        point.finish(passed.arguments, result)
        return result

    return with_ours


def _is_ours(function: Any) -> bool:
    """Whether this module made the function. A wrapper around it has its attributes, but another code object."""
    return isinstance(function, FunctionType) and function.__code__.co_filename == _wrap.__code__.co_filename


def _replace_in_save(settings: Settings, passed: dict[str, Any]) -> None:
    passed["planner"] = _planner(settings, passed.get("planner"), SavePlanner, DefaultSavePlanner, _OF_SAVE_PLANNER)
    if passed.get("use_collectives", True):  # our files are of all ranks
        passed["storage_writer"] = _writer(settings, passed["storage_writer"], passed["planner"])


def _replace_in_load(settings: Settings, passed: dict[str, Any]) -> None:
    planner = passed.get("planner")
    # Planner of ``_load_state_dict_from_keys``, which makes the targets from what is in the file.
    if type(planner) is EmptyStateDictLoadPlanner:
        return
    carried = "flatten_state_dict flatten_sharded_tensors allow_partial_load"
    passed["planner"] = _planner(settings, planner, LoadPlanner, DefaultLoadPlanner, carried)
    passed["storage_reader"] = _reader(settings, passed["storage_reader"])


def _replace_in_executor(settings: Settings, passed: dict[str, Any]) -> None:
    """Before the save's thread starts, or its arguments are pickled for a process in which nothing is installed."""
    passed["planner"] = _planner(settings, passed.get("planner"), SavePlanner, DefaultSavePlanner, _OF_SAVE_PLANNER)
    if not passed.get("use_collectives", True):
        return
    writer, path = passed.get("storage_writer"), passed.get("checkpoint_id")
    if writer is None and path is not None and FileWriter.validate_checkpoint_id(path):
        # Make stock's writer for its defaults: torch has announced another default for ``overwrite``.
        replaced = _writer(settings, FileSystemWriter(path), passed["planner"])
        passed["storage_writer"] = replaced if isinstance(replaced, FileWriter) else None
    else:
        passed["storage_writer"] = _writer(settings, writer, passed["planner"])


def _keep_own_boxes(value: Any, staged: Any) -> None:
    """Stock's stager copies tensors without their attributes; without these they would be saved as whole tensors."""
    if isinstance(value, torch.Tensor):
        keep_own_boxes(value, staged)
    elif isinstance(value, dict):
        for key, member in value.items():
            _keep_own_boxes(member, staged[key])
    elif isinstance(value, (list, tuple)):
        for members in zip(value, staged, strict=True):
            _keep_own_boxes(*members)


def _planner(settings: Settings, planner: Any, ours: type, stock: type, carried: str) -> Any:
    """One of our planners with the attributes ``carried`` of a stock one, in place of exactly a stock one or none."""
    if not settings.planners or (planner is not None and type(planner) is not stock):
        return planner
    replaced = stock() if planner is None else planner
    return settings.make(ours, stock, **{name.lstrip("_"): getattr(replaced, name) for name in carried.split()})


def _writer(settings: Settings, writer: Any, planner: Any) -> Any:
    if type(writer) is HuggingFaceStorageWriter:
        return _weights_writer(settings, writer, planner)
    if settings.storage and is_fsspec(writer) and is_in_object_store(writer.path):
        return settings.make(ObjectWriter, type(writer), writer.path, overwrite=writer.overwrite)
    if not settings.storage or type(writer) is not FileSystemWriter or not _is_plain_writer(writer):
        return writer
    threads = {"thread_count": writer.thread_count} if writer.thread_count != 1 else {}
    return settings.make(
        FileWriter, FileSystemWriter, writer.path, sync=writer.sync_files, overwrite=writer.overwrite, **threads
    )


def _weights_writer(settings: Settings, writer: HuggingFaceStorageWriter, planner: Any) -> Any:
    """A writer of the final files, which need our planner. Shards that somebody else will put together stay stock's."""
    is_final = writer.enable_consolidation or not writer.save_distributed
    path = writer.consolidated_output_path if writer.enable_consolidation else writer.path
    is_local_path = type(writer.fs) is FileSystem and SafetensorsWriter.validate_checkpoint_id(path or "")
    if not (settings.storage and is_final and is_local_path and isinstance(planner, SavePlanner)):
        return writer
    threads = {"thread_count": writer.thread_count} if writer.thread_count != 1 else {}
    numbers = writer.fqn_to_index_mapping
    made = settings.make(SafetensorsWriter, HuggingFaceStorageWriter, path, file_numbers=numbers, **threads)
    made.follow(planner)
    return made


def _is_plain_writer(writer: FileSystemWriter) -> bool:
    """Whether ``FileWriter`` has all that this writer was made with."""
    return (
        type(writer.fs) is FileSystem
        and FileWriter.validate_checkpoint_id(writer.path)
        and writer.single_file_per_rank
        and writer.serialization_format is SerializationFormat.TORCH_SAVE
        and not writer.transforms.extensions
    )


def _reader(settings: Settings, reader: Any) -> Any:
    if type(reader) is HuggingFaceStorageReader:
        if not settings.storage or type(reader.fs) is not FileSystem or not is_local(reader.path):
            return reader
        threads = {"thread_count": reader.thread_count} if reader.thread_count != 1 else {}
        return settings.make(SafetensorsReader, HuggingFaceStorageReader, reader.path, **threads)
    if settings.storage and is_fsspec(reader) and is_in_object_store(reader.path):
        return settings.make(FileReader, type(reader), reader.path)
    if not settings.storage or type(reader) is not FileSystemReader or type(reader.fs) is not FileSystem:
        return reader
    extensions = reader.transforms.extension_registry.extensions
    if extensions != ExtensionRegistry().extensions or not FileReader.validate_checkpoint_id(reader.path):
        return reader
    return settings.make(FileReader, FileSystemReader, reader.path)


POINTS = (
    Point(state_dict_saver, "_save_state_dict", _SAVE, _replace_in_save),
    Point(state_dict_loader, "_load_state_dict", _LOAD, _replace_in_load),
    Point(
        async_thread_executor._ThreadBasedAsyncCheckpointExecutor,
        "execute_save",
        _EXECUTE,
        _replace_in_executor,
    ),
    Point(
        staging.BlockingAsyncStager,
        "stage",
        "self state_dict",
        lambda settings, passed: None,
        lambda passed, staged: _keep_own_boxes(passed["state_dict"], staged),
    ),
    Point(
        async_process_executor._ProcessBasedAsyncCheckpointExecutor,
        "execute_save",
        _EXECUTE,
        _replace_in_executor,
    ),
)

# One per process, like the functions that it replaces. A fork makes a new lock: another thread may have held the old.
_INSTALLATION = Installation()
os.register_at_fork(after_in_child=lambda: setattr(_INSTALLATION, "lock", threading.RLock()))
