"""Traces of chosen steps, and what the devices' memory peaked at."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
from absl import logging


class Profile:
    """Traces steps first .. first + count - 1 with jax.profiler; a context manager.

    A run that begins behind `first` traces nothing. Look at the result with TensorBoard or xprof.

    Args:
      steps: (first, count), or () for nothing.
    """

    def __init__(self, directory: pathlib.Path, steps: tuple[int, ...]):
        self._directory = directory
        self._first, self._count = steps or (0, 0)
        self._running = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._running:
            self._stop()

    def before(self, step: int) -> None:
        """To be called before step `step` (from 1) is taken."""
        if self._count and step == self._first:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after(self, step: int, result: Any) -> None:
        """To be called when it was dispatched; waits for `result` where it was the last one traced."""
        if self._running and step == self._first + self._count - 1:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._running = False
        logging.info("a trace of steps from %d on is in %s", self._first, self._directory)


def peak_device_bytes() -> int | None:
    """The most that a device of this process has held so far; None where the backend does not say (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
