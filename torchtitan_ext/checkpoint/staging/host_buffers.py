"""Host memory that is kept between saves."""

from __future__ import annotations

import gc
import logging
import mmap
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

logger = logging.getLogger(__name__)

_WARNING_SECONDS = 60.0


class SpareMemory:
    """The memory of the last save that had none of its own, for the next one: new memory costs as much as the copy.

    It goes after ``KEPT_SECONDS`` without a save, and is not kept where it is more than a quarter of what the host
    would have left without it. For several threads.
    """

    KEPT_SECONDS = 300.0

    def __init__(self) -> None:
        # Its ``put`` may be called while another call is under way, as a tensor that dies does: ``give`` takes no lock.
        self._spare: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """What is spare, if it has so many bytes; else all of it goes, before new memory is made."""
        with self._lock:
            found = [one for one in self._all() if one.numel() >= num_bytes]
            return found[0] if found else None

    def give(self, memory: torch.Tensor) -> None:
        """Takes memory that no tensor uses any more; ``keep_for_now`` must follow."""
        self._spare.put(memory)

    def keep_for_now(self) -> None:
        """Keeps the largest piece, from now on for ``KEPT_SECONDS``."""
        with self._lock:
            kept = max(self._all(), key=torch.Tensor.numel, default=None)
            if kept is not None and 4 * kept.numel() <= _available_bytes() + kept.numel():
                self._spare.put(kept)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self.KEPT_SECONDS, self.clear)
            self._timer.daemon = True
            self._timer.start()

    def clear(self) -> None:
        """Gives the memory back."""
        with self._lock:
            self._all()

    def _all(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        with suppress(Empty):
            while True:
                found.append(self._spare.get_nowait())
        return found


SPARE = SpareMemory()
"""Of this process."""


class HostBuffers:
    """Some pieces of host memory, each in use as long as any tensor in it lives.

    Args:
        num_buffers: How many can be in use at once.
        is_pinned: Whether they are pinned for the accelerator.
        spare: Where memory comes from and goes to, for buffers of one save; pinned alike.
    """

    def __init__(self, num_buffers: int, *, is_pinned: bool, spare: SpareMemory | None = None) -> None:
        self._num_buffers = num_buffers
        self._is_pinned = is_pinned
        self._spare = spare
        self._is_closed = False
        self.clear()

    def close(self) -> None:
        """As ``clear``; what no tensor uses by now may be spare."""
        self._is_closed = True
        self.clear()
        if self._spare is not None:
            self._spare.keep_for_now()

    def clear(self) -> None:
        """Gives the memory back, each piece as soon as no tensor in it lives."""
        # Its ``put`` may be called while another call is under way, as a tensor that dies does.
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(self._num_buffers):
            self._free.put(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory of exactly so many bytes, 1-d, uint8. Waits until a buffer is free.

        Raises:
            MemoryError: The host has less left.
        """
        free = self._free
        kept = self._wait_for_one(free)
        try:
            # Memory made in inference mode could not be written outside of it. And a view that knows its base keeps
            # that alive, and its pinning.
            with torch.inference_mode(False):
                if kept.numel() < num_bytes:
                    kept = kept[:0].clone()  # its memory goes first: both would be too much
                    spare = None if self._spare is None else self._spare.take(num_bytes)
                    kept = self._made(num_bytes) if spare is None else spare
                taken = kept[:num_bytes]
        except BaseException:
            free.put(kept)
            raise
        give_back = free.put if self._spare is None else self._give_spare
        weakref.finalize(taken, give_back, kept).atexit = False
        return taken

    def _give_spare(self, memory: torch.Tensor) -> None:
        if self._spare is not None and not self._is_closed:
            self._spare.give(memory)

    def _wait_for_one(self, free: SimpleQueue[torch.Tensor]) -> torch.Tensor:
        try:
            return free.get_nowait()
        except Empty:
            gc.collect()  # an error of the last save may hold its tensors in a cycle
        while True:
            try:
                return free.get(timeout=_WARNING_SECONDS)
            except Empty:
                logger.warning(
                    "a save waits for host memory: the save before it still runs, or something still holds the copies "
                    "that it saved, such as a planner or an exception that is kept"
                )

    def _made(self, num_bytes: int) -> torch.Tensor:
        available = _available_bytes()
        if num_bytes > available:
            raise MemoryError(
                f"a copy of this rank's state takes {num_bytes} bytes of host memory, and {available} are left; run "
                "fewer ranks per host, or save without a copy: tte.save"
            )
        if self._is_pinned and not torch.cuda.is_available():
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        memory = _memory_of_large_pages(num_bytes)
        if self._is_pinned:
            _pin_for_cuda(memory)
        return memory


def _available_bytes() -> int:
    """What this process may still take of the host's memory: what the host has left, or the process's cgroup."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no cgroup of version 2, or "max"
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(kept["active_file"]) + int(kept["inactive_file"])  # which the kernel gives back
        available = min(available, limit - used + files)
    return available


def _memory_of_large_pages(num_bytes: int) -> torch.Tensor:
    """New memory, whose first touch costs half of that of small pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin_for_cuda(memory: torch.Tensor) -> None:
    """Pins memory in place: torch's own allocator of pinned memory would round it up to a power of two."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
