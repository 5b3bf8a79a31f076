"""The project's own format: JSON lines, compressed with zstd where the name ends in ``.zst``.

A header line, then one line a request. Ids are unsigned 64-bit numbers, little-endian, in base64;
only those that differ from the session's request before are written (``keep`` counts the others).
A recording that goes on after a restart of the engine has a further header, whose times count
from its own beginning (``epoch`` is the wall clock of that moment), and ids of its own.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from collections import OrderedDict
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zstandard

from tierkv.errors import TraceError
from tierkv.outputs import replacing
from tierkv.traces.events import Trace, TraceHeader, TraceRequest
from tierkv.traces.lines import read_json, wrong_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MARK",
    "VERSION",
    "Deltas",
    "dump_header",
    "dump_lost",
    "dump_request",
    "is_compressed",
    "read_native",
    "write_trace",
]

MARK: Final = "tierkv_trace"
VERSION: Final = 1
_SESSIONS: Final = 8192  # whose last chain is remembered, by writer and reader alike
_WHAT: Final = "a line of a tierkv trace"
_BATCH: Final = 4096


class Deltas:
    """The last chain of each of the sessions used most recently."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()

    def chain(self, tenant: str, session: str) -> tuple[int, ...]:
        """Last chain of a session; empty if it is not remembered."""
        return self._last.get((tenant, session), ())

    def note(self, tenant: str, session: str, chain: tuple[int, ...]) -> None:
        """Remember a session's chain."""
        name = (tenant, session)
        self._last[name] = chain
        self._last.move_to_end(name)
        if len(self._last) > _SESSIONS:
            self._last.popitem(last=False)


def is_compressed(path: str) -> bool:
    """Whether a trace of this name is written compressed."""
    return path.endswith(".zst")


# --------------------------------------------------------------------------- writing


def dump_header(header: TraceHeader, *, in_order: bool, epoch: float | None = None) -> bytes:
    """The header line.

    Args:
        header: What holds for the whole trace.
        in_order: Whether the requests come in order of arrival.
        epoch: Wall clock at time 0, if known.
    """
    plain: dict[str, Any] = {
        MARK: VERSION,
        "block_tokens": header.block_tokens,
        "bytes_per_token": header.bytes_per_token,
        "origin": header.origin,
        "in_order": in_order,
    }
    if epoch is not None:
        plain["epoch"] = epoch
    return _line(plain)


def dump_request(request: TraceRequest, deltas: Deltas) -> bytes:
    """The line of one request."""
    chain = request.keys + request.reply_keys
    before = deltas.chain(request.tenant, request.session)
    keep = _shared(before, chain)
    deltas.note(request.tenant, request.session, chain)
    plain: dict[str, Any] = {
        "t": round(request.time, 6),
        "s": request.session,
        "u": request.tenant,
        "in": request.tokens,
        "out": request.output_tokens,
        "n": len(request.keys),
        "keep": keep,
        "new": b64encode(array("Q", chain[keep:]).tobytes()).decode(),
        "block": request.block_tokens,
        "stop": request.stop_reason,
        "next": request.next_in,
        "took": request.duration,
    }
    return _line({name: value for name, value in plain.items() if value not in (None, "")})


def dump_lost(requests: int) -> bytes:
    """A line that says how many requests are missing here."""
    return _line({"lost": requests})


def _line(plain: dict[str, Any]) -> bytes:
    return (json.dumps(plain, separators=(",", ":")) + "\n").encode()


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


def write_trace(path: str, trace: Trace) -> int:
    """Write a trace as one file, in place of what was there; as a whole, or not at all.

    Returns:
        Requests written.

    Raises:
        TraceError: if the file cannot be written, or ``trace`` cannot be read.
    """
    deltas, count = Deltas(), 0
    try:
        with replacing(Path(path)) as file:
            compressor = zstandard.ZstdCompressor(level=10).compressobj()

            def put(data: bytes) -> None:
                file.write(compressor.compress(data) if is_compressed(path) else data)

            lines = [dump_header(trace.header, in_order=True)]
            for request in trace:
                lines.append(dump_request(request, deltas))
                count += 1
                if len(lines) >= _BATCH:
                    put(b"".join(lines))
                    lines.clear()
            if trace.lost:
                lines.append(dump_lost(trace.lost))
            put(b"".join(lines))
            if is_compressed(path):
                file.write(compressor.flush())
    except OSError as error:
        raise TraceError(path, 0, f"cannot be written: {error.strerror or error}") from error
    return count


# --------------------------------------------------------------------------- reading


def read_native(path: str) -> Trace:
    """A trace of the own format.

    Raises:
        TraceError: if its header cannot be read; iterating it, if a line is malformed.
    """
    number, row = next(iter(read_json(path, _WHAT)))
    with wrong_as(path, number, _WHAT):
        header = TraceHeader(
            int(row["block_tokens"]), int(row["bytes_per_token"]), str(row["origin"])
        )
    trace = Trace(header, lambda: _iterate(path, trace))
    return trace


def _iterate(path: str, trace: Trace) -> Iterator[TraceRequest]:
    trace.lost = 0
    rows = _Rows(path, trace)
    if rows.in_order:
        yield from rows.requests()
    else:
        yield from sorted(rows.requests(), key=lambda request: request.time)


class _Rows:
    """The lines of one file while it is read."""

    def __init__(self, path: str, trace: Trace) -> None:
        self._path = path
        self._trace = trace
        self._deltas = Deltas()
        self._lines = read_json(path, _WHAT)
        self._epoch: float | None = None
        self._offset = 0.0
        self._runs = 0
        self._last = -inf
        self._header(*next(self._lines))

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, in the order of the file."""
        for number, row in self._lines:
            if MARK in row:
                self._header(number, row)
                continue
            with wrong_as(self._path, number, _WHAT):
                if "lost" in row:
                    self._trace.lost += int(row["lost"])
                    continue
                request = self._request(row)
                if self.in_order and request.time < self._last:
                    raise ValueError(f"it arrives before the one before it, at {request.time} s")
                self._last = request.time
            yield request

    def _header(self, number: int, row: dict[str, Any]) -> None:
        if row.get(MARK) != VERSION:
            why = f"its version is {row.get(MARK)!r}; this tierkv reads version {VERSION}"
            raise TraceError(self._path, number, why)
        with wrong_as(self._path, number, _WHAT):
            epoch = row.get("epoch")
            self._epoch = self._epoch if self._epoch is not None else epoch
            if epoch is not None and self._epoch is not None:
                self._offset = float(epoch) - float(self._epoch)
            self.in_order = bool(row["in_order"]) and self._runs == 0
            self._size = int(row["block_tokens"])
        self._deltas = Deltas()
        self._runs += 1

    def _request(self, row: dict[str, Any]) -> TraceRequest:
        session, tenant = str(row.get("s", "")), str(row.get("u", ""))
        before, keep = self._deltas.chain(tenant, session), int(row["keep"])
        new = array("Q")
        new.frombytes(b64decode(row.get("new", ""), validate=True))
        chain, count = before[:keep] + tuple(new), int(row["n"])
        if not 0 <= keep <= len(before) or not 0 <= count <= len(chain):
            raise ValueError(f"it keeps {keep} of {len(before)} blocks, {count} of them its own")
        self._deltas.note(tenant, session, chain)
        request = TraceRequest(
            time=float(row["t"]) + self._offset,
            session=session,
            tenant=tenant,
            keys=chain[:count],
            tokens=int(row["in"]),
            output_tokens=int(row.get("out", 0)),
            block_tokens=int(row.get("block", self._size)),
            stop_reason=row.get("stop"),
            next_in=row.get("next"),
            duration=row.get("took"),
            reply_keys=chain[count:],
        )
        return request if self._runs == 1 else replace(request, session=f"{session}#{self._runs}")
