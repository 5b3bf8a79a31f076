"""LoRA adapters by the content of their files, found out off the scheduler's thread.

vLLM names an adapter by a number, and reads its files when it pleases: at the first request, at
start-up, or again after it dropped the adapter for others. Nothing tells which bytes it has. So an
adapter is known by the first digest of its files, and by none at all once they changed without a
load in place: what vLLM computes with it from then on may be of either.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import AdapterId

__all__ = ["Fingerprints"]

_log = logging.getLogger(__name__)
_PATIENCE: Final = 2.0


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
        patience: Seconds that a request may wait for the files of its adapter to be read.
    """

    def __init__(self, digest: Callable[[Any], AdapterId], *, patience: float = _PATIENCE) -> None:
        self._digest = digest
        self._patience = patience
        self._known: dict[_Loaded, AdapterId] = {}
        self._first: dict[_Loaded, AdapterId] = {}  # as it was first read since it was loaded
        self._changed: set[_Loaded] = set()  # what the engine has of these is anybody's guess
        self._loads: dict[_Loaded, int] = {}  # how often it was loaded in place
        self._asked: set[tuple[_Loaded, int]] = set()  # in the queue or being read
        self._taken: dict[str, AdapterId | None] = {}  # by request; None: it is another by now
        self._since: dict[str, float] = {}  # when a request that waits was first seen
        self._queue: SimpleQueue[tuple[_Loaded, int, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, lora: Any) -> None:
        """Find out about an adapter, or whether it is still the same; returns at once."""
        key = _key(lora)
        if getattr(lora, "load_inplace", False):
            self._loads[key] = self._loads.get(key, 0) + 1
            self._known.pop(key, None)
            self._first.pop(key, None)
            self._changed.discard(key)
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

    def waits(self, request: Any, now: float) -> bool:
        """Whether a request should wait: the files of its adapter are being read, not for long."""
        key = _key(request.lora_request)
        if key in self._changed or (key, self._loads.get(key, 0)) not in self._asked:
            return False
        return now - self._since.setdefault(request.request_id, now) < self._patience

    def take(self, request: Any, adapter: AdapterId | None) -> None:
        """A request is cached under this identity of its adapter from now on."""
        self._since.pop(request.request_id, None)
        if adapter is not None:
            self._taken[request.request_id] = adapter

    def fits(self, request: Any) -> bool:
        """Whether what is computed of a request still is what it is cached as.

        False while its adapter is read again, and for good once it is another.
        """
        if request.request_id not in self._taken:
            return True
        taken, known = self._taken[request.request_id], self.known(request.lora_request)
        if taken is not None and known is not None and known != taken:
            self._taken[request.request_id] = None
        return known is not None and known == taken

    def over(self, name: str) -> None:
        """A request is over."""
        self._taken.pop(name, None)
        self._since.pop(name, None)

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
                    self._learn(key, found)
            except Exception as error:  # noqa: BLE001 - the thread serves every adapter to come
                self._known.pop(key, None)
                _log.warning("LoRA adapter %r is not cached: %s", key.name, error)
            finally:
                self._asked.discard((key, load))

    def _learn(self, key: _Loaded, found: AdapterId) -> None:
        if key in self._changed:
            return
        if self._first.setdefault(key, found) == found:
            self._known[key] = found
            return
        self._changed.add(key)
        self._known.pop(key, None)
        _log.warning(
            "the files of LoRA adapter %r changed after it was loaded: it is not cached any more; "
            "load it in place (load_inplace), or under another id",
            key.name,
        )


def _key(lora: Any) -> _Loaded:
    return _Loaded(str(lora.lora_name), int(lora.lora_int_id), str(lora.lora_path))
