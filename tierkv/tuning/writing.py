"""A configuration that was found, as a file that an engine opens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tierkv.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tierkv.replay import Report
    from tierkv.tuning.searching import Tuned

__all__ = ["FIRST_WORDS", "ON_DISK", "settings_text"]

FIRST_WORDS = "# Found by `tierkv tune`"

ON_DISK = ("nvme", "file")
"""Tiers that have a path."""


def settings_text(tuned: Tuned, *, path: str, unlimited: int, origin: str = "") -> str:
    """The text of a ``tierkv.toml``, with what was measured as comments.

    Args:
        tuned: What was found.
        path: Directory of the tiers on disk.
        unlimited: Bytes to give to a tier that never filled up in the replay.
        origin: Which trace it was.
    """
    setup = tuned.setup
    lines = [
        f"{FIRST_WORDS} in {tuned.trials} trials, objective {tuned.objective}.",
        *(
            [f"# Trace: {_printable(origin)}"] if origin else []
        ),  # a comment ends with its line, and holds nothing that cannot be seen
        *_compared("on the first half, which was searched", tuned.train),
        *_compared("on the second half, which was not", tuned.held_out),
        "",
        f"policy = {_text(setup.each(setup.policy)[0])}",
        f"prefetch = {_text(setup.prefetch)}",
    ]
    if setup.prefetch:
        lines.append(f"prefetch_floor = {setup.prefetch_floor}")
        if setup.prefetch_budget is not None:
            budget = parse_bytes(setup.prefetch_budget)
            lines.append(f"prefetch_budget = {budget}  # {format_bytes(budget)} a second")
    values = list(setup.capacity_bytes or ())  # type: ignore[arg-type] # a search has a list
    tiers = zip(setup.tier_names(), values, setup.each(setup.admission), strict=True)
    for name, value, admission in tiers:
        size = unlimited if value is None else parse_bytes(value)
        lines += ["", "[[tiers]]", f"kind = {_text(name)}"]
        lines.append(f"capacity = {size}  # {format_bytes(size)}")
        if value is None:
            lines[-1] += ": as much as the trace has; the replay set no limit"
        if name in ON_DISK:
            lines.append(f"path = {_text(path)}")
        lines.append(f"admission = {_text(admission)}")
        lines.append(f"write_through = {json.dumps(setup.write_through)}")
        lines += [f"high = {setup.high}", f"low = {setup.low}"]
    return "\n".join(lines) + "\n"


def _compared(where: str, pair: tuple[Report, Report]) -> list[str]:
    before, after = pair
    return [
        f"# {where[0].upper()}{where[1:]}:",
        f"#   mean seconds to the first token {before.ttft.mean:.4g} -> {after.ttft.mean:.4g}",
        f"#   tokens found {before.token_hit_ratio:.4f} -> {after.token_hit_ratio:.4f}, "
        f"in the first tier {before.fast_token_hit_ratio:.4f} -> {after.fast_token_hit_ratio:.4f}",
    ]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _text(value: str) -> str:
    # a JSON string is one of TOML, but for half a character and DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
