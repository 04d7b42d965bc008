"""Checkpoint files at the speed of the disk: a DCP StorageWriter and StorageReader over csrc/storage."""

from torchtitan_ext.storage.file_reader import FileReader
from torchtitan_ext.storage.file_writer import FileWriter
from torchtitan_ext.storage.runs import latest

__all__ = ["FileReader", "FileWriter", "latest"]
