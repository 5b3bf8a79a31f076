"""A workload trace of a live engine: requests as they come, without anything that they hold.

The recorder does no I/O and no hashing while sessions wait: it keeps what it is told, and turns it
into lines when somebody (a worker thread) asks for them. Ids are keyed digests (BLAKE2b, 64 bits)
of block keys, of session names and of tenants, under a secret that is drawn for the recording and
never written: equal blocks have equal ids, and nobody can tell which text they stand for, not even
who has the text.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Final, Protocol

from tierkv.traces.events import TraceHeader, TraceRequest
from tierkv.traces.native import Deltas, dump_header, dump_lost, dump_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.layout import Space

__all__ = ["Recorder", "SessionLike"]

_LIMIT: Final = 32 * 1024 * 1024  # bytes of what waits to be written; and of turns still open
_OPEN: Final = 16384  # turns whose end may still be told
_PATIENCE_S: Final = 60.0  # ... so long after the last that was heard of them
_SECRET_BYTES: Final = 32
_Name = tuple[bytes, str, str]  # fingerprint of the space, tenant, session


class SessionLike(Protocol):
    """What has to be known of a session to record it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def tenant(self) -> str:
        """Its tenant."""

    @property
    def space(self) -> Space:
        """Its space."""


def _name(session: SessionLike) -> _Name:
    return session.space.fingerprint, session.tenant, session.id


class _Turn:
    """One request, while more of it may be told."""

    __slots__ = (
        *("ended", "heard", "keys", "name", "next_in", "reply", "space", "stop", "stored"),
        *("time", "tokens"),
    )

    def __init__(
        self, name: _Name, space: Space, keys: Sequence[BlockKey], tokens: int, time: float
    ) -> None:
        self.name = name
        self.space = space
        self.keys = keys
        self.tokens = tokens
        self.time = self.heard = time
        self.reply: Sequence[BlockKey] = ()
        self.stored = tokens
        self.ended: float | None = None
        self.stop: str | None = None
        self.next_in: float | None = None

    @property
    def nbytes(self) -> int:
        """About what it keeps from being freed."""
        return 512 + 40 * (len(self.keys) + len(self.reply))


class Recorder:
    """Hears of requests on the loop, and writes them down elsewhere.

    Memory is bounded: what does not fit is counted, and the count is written as a line of its own.

    Args:
        secret: Under which everything is digested; 32 random bytes.
        now: Time at which the recording begins, on the clock of all calls.
        epoch: The same moment on the wall clock.
    """

    def __init__(self, secret: bytes, now: float, epoch: float) -> None:
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"the secret has {_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._start = now
        self._epoch = epoch
        self._open: OrderedDict[_Name, _Turn] = OrderedDict()
        self._done: list[_Turn] = []
        self._nbytes = 0
        self._open_nbytes = 0
        self._lost = 0
        self._deltas: Deltas | None = None
        self._lock = Lock()  # held for what is done: a few instructions
        self._writing = Lock()  # two threads may ask for lines when an engine is closed

    def __repr__(self) -> str:
        return f"<Recorder: {len(self._open)} turns open, {len(self._done)} to write>"

    @property
    def waiting(self) -> int:
        """Requests that are complete and not written yet, or lost."""
        return len(self._done) + self._lost

    # ------------------------------------------------------------------ on the loop

    def arrived(
        self, session: SessionLike, keys: Sequence[BlockKey], tokens: int, now: float
    ) -> None:
        """A request came in.

        Args:
            session: Its session.
            keys: Keys of the full blocks of the prompt; kept as they are, so they must not change.
            tokens: Tokens of the prompt.
            now: When.
        """
        name = _name(session)
        self._close(name)
        self._open[name] = turn = _Turn(name, session.space, keys, tokens, now)
        self._open_nbytes += turn.nbytes
        while len(self._open) > 1 and (len(self._open) > _OPEN or self._open_nbytes > _LIMIT):
            self._close(next(iter(self._open)))

    def ended(
        self, session: SessionLike, keys: Sequence[BlockKey], tokens: int, now: float
    ) -> None:
        """KV was stored: the history of the session has grown.

        Args:
            session: The session.
            keys: Keys of all full blocks of the history.
            tokens: Tokens of the history.
            now: When.
        """
        name = _name(session)
        turn = self._open.get(name)
        prompt = len(turn.keys) if turn is not None else 0
        longer = len(keys) >= prompt
        if turn is None or not longer or (prompt and keys[prompt - 1] != turn.keys[-1]):
            # what was stored was not looked up first
            self.arrived(session, keys, tokens, now)
            turn = self._open[name]
        else:
            self._open_nbytes -= turn.nbytes
            turn.reply = keys[prompt:]
            self._open_nbytes += turn.nbytes
            turn.stored = max(tokens, turn.tokens)
        turn.ended = turn.heard = now
        self._open.move_to_end(name)

    def hinted(
        self,
        session: SessionLike,
        now: float,
        stop_reason: str | None = None,
        next_in: float | None = None,
    ) -> None:
        """Somebody told how the turn ended, or when the session will be back."""
        name = _name(session)
        turn = self._open.get(name)
        if turn is not None:
            turn.stop = turn.stop if stop_reason is None else stop_reason
            turn.next_in = turn.next_in if next_in is None else next_in
            turn.heard = now
            self._open.move_to_end(name)

    def tick(self, now: float) -> None:
        """Time passed: of turns long silent no more is expected."""
        while self._open:
            name, turn = next(iter(self._open.items()))
            if now - turn.heard < _PATIENCE_S:
                break
            self._close(name)

    def finish(self) -> None:
        """The recording is over: every turn is complete."""
        for name in list(self._open):
            self._close(name)

    def discard(self) -> None:
        """Forget what is complete: nobody will write it."""
        with self._lock:
            self._done, self._nbytes = [], 0

    def _close(self, name: _Name) -> None:
        turn = self._open.pop(name, None)
        if turn is None:
            return
        self._open_nbytes -= turn.nbytes
        with self._lock:
            if self._nbytes + turn.nbytes > _LIMIT:
                self._lost += 1
            else:
                self._nbytes += turn.nbytes
                self._done.append(turn)

    # ------------------------------------------------------------------ in a thread

    def lines(self) -> bytes:
        """What is complete, as lines of a trace; a header first. Hashes: use a worker thread."""
        with self._writing:
            with self._lock:
                done, self._done, self._nbytes = self._done, [], 0
                lost, self._lost = self._lost, 0
            if not done and not lost:
                return b""
            out = []
            if self._deltas is None:
                self._deltas = Deltas()
                space = done[0].space if done else None
                out.append(dump_header(_header(space), in_order=False, epoch=self._epoch))
            out += [dump_request(self._request(turn), self._deltas) for turn in done]
            if lost:
                out.append(dump_lost(lost))
            return b"".join(out)

    def _request(self, turn: _Turn) -> TraceRequest:
        fingerprint, tenant, session = turn.name
        name = _bytes(f"{tenant}\0{session}")
        return TraceRequest(
            time=turn.time - self._start,
            session=self._digest(b"session" + fingerprint + name).hex(),
            tenant=self._digest(b"tenant" + _bytes(tenant)).hex() if tenant else "",
            keys=self._ids(turn.keys),
            tokens=turn.tokens,
            output_tokens=turn.stored - turn.tokens,
            block_tokens=turn.space.block_tokens,
            stop_reason=turn.stop,
            next_in=turn.next_in,
            duration=None if turn.ended is None else round(turn.ended - turn.time, 6),
            reply_keys=self._ids(turn.reply),
        )

    def _ids(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        return tuple([int.from_bytes(self._digest(key), "little") for key in keys])

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=self._secret).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _header(space: Space | None) -> TraceHeader:
    if space is None:
        return TraceHeader(1, 1, "a tierkv engine")
    groups = [g for g in space.layout.groups if g.per_token]
    nbytes = sum(group.raw_bytes(space.block_tokens) for group in groups)
    return TraceHeader(space.block_tokens, nbytes // space.block_tokens, "a tierkv engine")
