"""When a run should save and end early."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """stopped(step): whether this run should save and end, because of SIGTERM or of a pod's preemption notice.

    With several processes the answer is agreed on, so that all stop at the same step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False  # only the main thread may take signals
        return
    received = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        yield lambda step: received.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
