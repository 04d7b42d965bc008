"""Ray Train's controller and context in one process, for tests of what it is told. Needs Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray.train
from pyarrow.fs import FileSystem


class Controller:
    """Ray's side: what was reported, as (metrics, name of the step), in order; reports in the background at once."""

    def __init__(self, files: FileSystem, folder: str) -> None:
        self.files, self.folder = files, folder
        self.storage: Any = SimpleNamespace(storage_filesystem=files, experiment_fs_path=folder)
        self.num_workers = 1
        self.reported: list[tuple[Any, str | None]] = []
        self.listed: list[str] = []

    @contextmanager
    def in_place(self) -> Iterator["Controller"]:
        """Ray Train asks and tells this meanwhile."""
        with (
            mock.patch.object(ray.train, "get_context", lambda: self),
            mock.patch.object(ray.train, "report", self.report),
            mock.patch("torchtitan_ext.integrations.ray.broadcast_from_rank_zero", lambda data: data),
            mock.patch.object(ray.train, "get_all_reported_checkpoints", self.reported_checkpoints),
        ):
            yield self

    def get_storage(self) -> Any:
        if self.storage is None:
            raise NotImplementedError
        return self.storage

    def get_world_size(self) -> int:
        return self.num_workers

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Any = None,
        checkpoint_upload_mode: Any = None,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Any = None,
    ) -> None:
        is_uploaded = checkpoint_upload_mode == ray.train.CheckpointUploadMode.ASYNC
        if checkpoint is not None:
            assert delete_local_checkpoint_after_upload is False
            assert is_uploaded == (checkpoint_upload_fn is not None)
            if is_uploaded:
                assert checkpoint_upload_fn(checkpoint, "name") is checkpoint
            assert self.files.get_file_info(f"{checkpoint.path}/.metadata").is_file, "it is committed"
            self.listed.append(checkpoint.path)
        self.reported.append((metrics, None if checkpoint is None else Path(checkpoint.path).name))

    def reported_checkpoints(self, consistency_mode: Any) -> list[Any]:
        assert consistency_mode == ray.train.CheckpointConsistencyMode.COMMITTED
        return [SimpleNamespace(checkpoint=SimpleNamespace(path=path)) for path in self.listed]
