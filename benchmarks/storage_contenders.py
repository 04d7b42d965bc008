"""Who saves and loads in the storage benchmark: ours, stock DCP, and other libraries where they are installed.

Every save leaves files below `path`; every load fills the state in place. All ranks call both.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from raw_files import files_of, sync_files
from storage_states import State, local_parts
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.utils.serialization import config as serialization_config

import torchtitan_ext as tte
from torchtitan_ext.storage import FileReader, FileWriter

Save = Callable[[State, Path, bool], None]
Load = Callable[[State, Path], None]


@dataclass(frozen=True)
class Peer:
    """A contender with files of its own.

    Attributes:
        name: In results.
        save: save(state, path, sync).
        load: load(state, path); none where only its save differs from another peer's.
        reshards: Whether it loads columns from what was saved by rows.
    """

    name: str
    save: Save
    load: Load | None = None
    reshards: bool = True


class Ours:
    """The package by its three faces, with a number of threads per rank."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def writer(self, path: Path, sync: bool) -> FileWriter:
        return FileWriter(path, sync=sync, thread_count=self.num_threads)

    def reader(self, path: Path, verify: Any) -> FileReader:
        return FileReader(path, verify, thread_count=self.num_threads)

    def save(self, state: State, path: Path, sync: bool) -> None:
        tte.save(state, storage_writer=self.writer(path, sync))

    def save_by_dcp(self, state: State, path: Path, sync: bool) -> None:
        dcp.save(state, storage_writer=self.writer(path, sync), planner=tte.SavePlanner())

    def load(self, state: State, path: Path, verify: Any) -> None:
        tte.load(state, storage_reader=self.reader(path, verify))

    def load_by_dcp(self, state: State, path: Path, verify: Any) -> None:
        dcp.load(state, storage_reader=self.reader(path, verify), planner=tte.LoadPlanner())


class OnlyFiles:
    """Our storage calls of a save or load alone, without collectives, on a plan that was made before."""

    def __init__(self, state: State, ours: Ours) -> None:
        self.state = state
        self.ours = ours
        self._loads: dict[Path, tuple[Any, Any]] = {}
        self._parts = local_parts(state)
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(self._parts, is_coordinator=True)
        (self._plan,), self._metadata = self._planner.create_global_plan([self._planner.create_local_plan()])
        self._planner.finish_plan(self._plan)

    def save(self, path: Path, sync: bool) -> None:
        """This rank's tensors, as a checkpoint of its own."""
        writer = self.ours.writer(path, sync)
        writer.set_up_storage_writer(True)
        (prepared,) = writer.prepare_global_plan([writer.prepare_local_plan(self._plan)])
        writer.finish(self._metadata, [writer.write_data(prepared, self._planner).wait()])

    def load(self, path: Path, verify: Any) -> None:
        """This rank's part of a checkpoint of all ranks."""
        reader = self.ours.reader(path, verify)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        if path not in self._loads:
            planner = DefaultLoadPlanner()
            planner.set_up_planner(self.state, metadata, True)
            self._loads[path] = (planner.finish_plan(planner.create_local_plan()), planner)
        plan, planner = self._loads[path]
        reader.read_data(plan, planner).wait()


def save_with_dcp(state: State, path: Path, sync: bool, **options: Any) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=sync, **options), planner=DefaultSavePlanner())


def load_with_dcp(state: State, path: Path) -> None:
    dcp.load(state, storage_reader=FileSystemReader(path), planner=DefaultLoadPlanner())


def save_without_crc(state: State, path: Path, sync: bool) -> None:
    with serialization_config.patch("save.compute_crc32", False):
        save_with_dcp(state, path, sync)


def save_for_huggingface(state: State, path: Path, sync: bool) -> None:
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    writer.sync_files = sync
    dcp.save(state, storage_writer=writer)


def load_from_huggingface(state: State, path: Path) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))


def save_with_torch(state: State, path: Path, sync: bool) -> None:
    file = _own_file(path)
    torch.save(local_parts(state), file)
    if sync:
        sync_files([file])


def load_with_torch(state: State, path: Path) -> None:
    _copy_into(state, torch.load(_own_file(path), weights_only=True))


def save_with_safetensors(state: State, path: Path, sync: bool) -> None:
    file = _own_file(path)
    importlib.import_module("safetensors.torch").save_file(local_parts(state), file)
    if sync:
        sync_files([file])


def load_with_safetensors(state: State, path: Path) -> None:
    _copy_into(state, importlib.import_module("safetensors.torch").load_file(_own_file(path)))


def save_with_torchsnapshot(state: State, path: Path, sync: bool) -> None:
    torchsnapshot = importlib.import_module("torchsnapshot")
    torchsnapshot.Snapshot.take(str(path), {"model": torchsnapshot.StateDict(**local_parts(state))})
    if sync:
        sync_files(files_of(path, dist.get_rank(), dist.get_world_size()))


def load_with_torchsnapshot(state: State, path: Path) -> None:
    torchsnapshot = importlib.import_module("torchsnapshot")
    torchsnapshot.Snapshot(str(path)).restore({"model": torchsnapshot.StateDict(**local_parts(state))})


class TorchCheckpointing:
    """`torch_checkpointing`, synchronous; its resharding exchanges metadata through CUDA, and is left out."""

    def __init__(self) -> None:
        library = importlib.import_module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.config")
        filesystem = importlib.import_module("torch_checkpointing.storage.filesystem")
        self._manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=config.SyncCheckpointSaverConfig(),
                # Its direct writes are not aligned: ext4 refuses them.
                storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: State, path: Path, sync: bool) -> None:
        self._manager.save(str(path), {"model": local_parts(state)})
        if sync:
            sync_files(files_of(path, dist.get_rank(), dist.get_world_size()))

    def load(self, state: State, path: Path) -> None:
        self._manager.load(str(path), into={"model": local_parts(state)})


def torch_checkpointing() -> Peer:
    library = TorchCheckpointing()
    return Peer("torch_checkpointing", library.save, library.load, reshards=False)


# By the name for `--peers`: the package that it needs, and how it is made.
PEERS: dict[str, tuple[str, Callable[[], Peer]]] = {
    "dcp-2-threads": (
        "torch",
        lambda: Peer("DCP, 2 threads", lambda state, path, sync: save_with_dcp(state, path, sync, thread_count=2)),
    ),
    "dcp-no-crc": ("torch", lambda: Peer("DCP, no CRC", save_without_crc)),
    "torch.save": ("torch", lambda: Peer("torch.save", save_with_torch, load_with_torch, reshards=False)),
    "safetensors": (
        "safetensors",
        lambda: Peer("safetensors", save_with_safetensors, load_with_safetensors, reshards=False),
    ),
    "huggingface": (
        "safetensors",
        lambda: Peer("DCP's HuggingFace storage", save_for_huggingface, load_from_huggingface),
    ),
    "torchsnapshot": (
        "torchsnapshot",
        lambda: Peer("torchsnapshot", save_with_torchsnapshot, load_with_torchsnapshot, reshards=False),
    ),
    "torch_checkpointing": ("torch_checkpointing", torch_checkpointing),
}


def make_peers(names: Sequence[str]) -> list[Peer]:
    """Those that are installed; says which are not."""
    peers = []
    for name in names:
        package, make = PEERS[name]
        try:
            importlib.import_module(package)
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"{name} is left out: {error}")
            continue
        peers.append(make())
    return peers


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Of the packages of peers."""
    packages = sorted({PEERS[name][0] for name in names})
    return {package: version(package) for package in packages if importlib.util.find_spec(package) is not None}


def _own_file(path: Path) -> Path:
    os.makedirs(path, exist_ok=True)
    return path / f"rank{dist.get_rank()}"


def _copy_into(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for name, part in local_parts(state).items():
        part.copy_(loaded[name])
