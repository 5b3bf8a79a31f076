"""One thread that sees the end of transfers which a library runs in threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.errors import ClosedError
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import IoResult

__all__ = ["Flight", "Reaper", "Ticket"]


class Flight(NamedTuple):
    """One transfer under way.

    Attributes:
        item: Index of its item in the batch.
        future: ``get()`` waits for the end without the GIL, once; returns bytes or raises.
        wanted: Bytes that it has to move to count as done.
        memory: What it reads or fills: the library itself holds no reference.
        file: The open file it uses, for the same reason.
        offset: First byte in the file.
    """

    item: int
    future: Any
    wanted: int
    memory: object
    file: object
    offset: int


@dataclass(slots=True)
class Ticket:
    """A batch of transfers: filled by who submits them, ended by the reaper.

    Attributes:
        judge: Result of a flight that moved too little, or raised; called by the reaper.
        flights: The transfers.
        failed: Results of items that did not go well.
        submitted: Whether the reaper has it.
        landed: Set on the loop when the last transfer is over, or nobody waits for it any more.
        given_up: Whether it hangs and was given up: its memory may still be touched at any time.
        loop: The loop of the caller.
    """

    judge: Callable[[Flight, BaseException | None], IoResult]
    flights: list[Flight] = field(default_factory=list)
    failed: dict[int, IoResult] = field(default_factory=dict)
    submitted: bool = False
    given_up: bool = False
    landed: Signal = field(default_factory=Signal)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def outlast(self) -> None:
        """Wait until nothing touches the memory of the flights any more, come what may.

        Raises:
            ClosedError: if it was given up.

        Cancellation: re-raised afterwards.
        """
        if self.submitted:
            await self.landed.outlast()
        if self.given_up:
            raise ClosedError("the tier was closed over a transfer that hangs")


class Reaper:
    """Owns tickets, and with them memory and files, until their transfers have ended.

    The thread starts with the first ticket. It is a daemon: a transfer that hangs in the medium
    must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._name = name
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: Callable[[], object] | None = None

    @property
    def in_flight(self) -> int:
        """Tickets that have not landed."""
        return len(self._tickets)

    def take(self, ticket: Ticket) -> None:
        """Take over a ticket whose transfers have been submitted. Callable from any thread."""
        with self._lock:
            self._tickets[id(ticket)] = ticket
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        ticket.submitted = True
        self._queue.put(ticket)

    def give_up(self, last: Callable[[], object]) -> None:
        """Let nobody wait any more for what hangs; the tickets keep its memory. On the loop.

        Args:
            last: Called once nothing is in flight any more, which may be at once.
        """
        with self._lock:
            stuck = list(self._tickets.values())
            if stuck:
                self._last = last
        for ticket in stuck:
            ticket.given_up = True
            ticket.landed.set()
        if not stuck:
            last()

    def close(self) -> None:
        """End the thread, which has seen the end of everything; waits for that. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            for flight in ticket.flights:
                _end(ticket, flight)
            ticket.flights.clear()
            with self._lock:
                del self._tickets[id(ticket)]
                last = None if self._tickets else self._last
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                ticket.loop.call_soon_threadsafe(ticket.landed.set)
            del ticket  # not kept alive while waiting for the next one
            if last is not None:
                last()


def _end(ticket: Ticket, flight: Flight) -> None:
    error: BaseException | None = None
    try:
        if flight.future.get() >= flight.wanted:
            return
    except Exception as raised:  # noqa: BLE001 - the library raises RuntimeError for anything
        error = raised
    ticket.failed.setdefault(flight.item, ticket.judge(flight, error))
