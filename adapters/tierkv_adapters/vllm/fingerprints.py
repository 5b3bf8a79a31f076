"""LoRA adapters by the content of their files, found out off the scheduler's thread."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import AdapterId

__all__ = ["Fingerprints"]

_log = logging.getLogger(__name__)


class _Loaded(NamedTuple):
    """An adapter as the engine knows it: these three stay while it is loaded."""

    name: str
    number: int
    path: str


class Fingerprints:
    """Answers at once with what is known, and finds out the rest in a thread of its own.

    What is known of an adapter is checked again with every request that asks for it, so that
    files that changed under one name are noticed by the next request; one that is loaded in place
    (``load_inplace``) is unknown from then on until its files were read.

    Args:
        digest: Reads the files of vLLM's ``LoRARequest``.
    """

    def __init__(self, digest: Callable[[Any], AdapterId]) -> None:
        self._digest = digest
        self._known: dict[_Loaded, AdapterId] = {}
        self._loads: dict[_Loaded, int] = {}  # how often it was loaded in place
        self._asked: set[tuple[_Loaded, int]] = set()  # in the queue or being read
        self._queue: SimpleQueue[tuple[_Loaded, int, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, lora: Any) -> None:
        """Find out about an adapter, or whether it is still the same; returns at once."""
        key = _key(lora)
        if getattr(lora, "load_inplace", False):
            self._loads[key] = self._loads.get(key, 0) + 1
            self._known.pop(key, None)
        load = self._loads.get(key, 0)
        if (key, load) in self._asked:
            return
        self._asked.add((key, load))
        self._queue.put((key, load, lora))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="tierkv-fingerprints", daemon=True
            )
            self._thread.start()

    def known(self, lora: Any) -> AdapterId | None:
        """The adapter's identity, or None as long as it is not known."""
        return self._known.get(_key(lora))

    def close(self) -> None:
        """End the thread; what it is reading is read to the end."""
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None:
            key, load, lora = asked
            try:
                found = self._digest(lora)
                if load == self._loads.get(key, 0):  # else what was read is older than what is used
                    self._known[key] = found
            except (TierKVError, OSError) as error:
                self._known.pop(key, None)
                _log.warning("LoRA adapter %r is not cached: %s", key.name, error)
            finally:
                self._asked.discard((key, load))


def _key(lora: Any) -> _Loaded:
    return _Loaded(str(lora.lora_name), int(lora.lora_int_id), str(lora.lora_path))
