"""Traces in which something better than the shipped settings is planted."""

from __future__ import annotations

from tierkv.traces import Trace, TraceHeader, TraceRequest

BLOCK = 16
BYTES = 64
HEADER = TraceHeader(BLOCK, BYTES, "planted")
FRAME = BLOCK * BYTES


def request(time: float, keys: tuple[int, ...], session: str = "") -> TraceRequest:
    return TraceRequest(time, session, "", keys, len(keys) * BLOCK, 0, BLOCK)


def scans(rounds: int = 60, hot: int = 4, scan: int = 12) -> Trace:
    """A few prompts come again and again, and each time a long one that never does.

    With room for little more than a scan, recency keeps the scans; whoever counts uses does not.
    """
    made = []
    for turn in range(rounds):
        for number in range(hot):
            at = turn * 10 + number
            made.append(request(at, (number * 100 + 1, number * 100 + 2), str(number)))
        made.append(
            request(turn * 10 + 8, tuple(10**6 + turn * 100 + i for i in range(scan)), "scan")
        )
    return Trace.of(HEADER, made)
