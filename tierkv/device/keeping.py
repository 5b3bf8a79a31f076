"""References to what submitted work touches, until it ran."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from tierkv.errors import BackendError

if TYPE_CHECKING:
    from tierkv.device.cuda_streams import CudaEvent

__all__ = ["Kept"]


class Kept:
    """Things that are kept until an event is done. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[CudaEvent, object]] = deque()

    def keep(self, event: CudaEvent, things: object) -> None:
        """Keep them until the event is done; for ever, if the device failed before it was."""
        with self._lock:
            self._kept.append((event, things))
        self.let_go()

    def let_go(self) -> None:
        """Drop what is not needed any more. Never blocks, never raises."""
        if not self._lock.acquire(blocking=False):
            return  # whoever holds it is letting go
        gone, pending = [], set()
        try:
            for _ in range(len(self._kept)):
                event, things = self._kept.popleft()
                # streams run in order: behind a pending event of a stream nothing is done
                if id(event.stream) not in pending and _is_done(event):
                    gone.append(things)  # dropped outside of the lock: that may free memory
                else:
                    pending.add(id(event.stream))
                    self._kept.append((event, things))
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Drop everything: the device does nothing any more."""
        with self._lock:
            gone = list(self._kept)
            self._kept.clear()
        del gone


def _is_done(event: CudaEvent) -> bool:
    try:
        return event.query()
    except BackendError:  # whoever waits for it is told; what the work touches is unknown
        return False
