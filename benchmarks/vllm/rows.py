"""From processes to rows: medians over rounds, ratios round by round, bounds of our own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from benchmarks.report import spread
from benchmarks.vllm.connectors import DEADLINE_S, FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.report import Cell
    from benchmarks.vllm.measure import Answer, Broken, Visit

__all__ = ["FAULT_CELLS", "Findings", "rows"]

FAULT_CELLS: Final = ("corrupt_detected", "slow_tier_s", "failing_tier", "failed_transfer")
_HIT_SHARE: Final = 0.9
_CPU_RATIO: Final = 0.15
_CPU_BOUND_FROM: Final = 2048  # tokens; short prompts cost little in the first place
_BEHIND: Final = 1.1  # how much slower than the quickest of the others is still "no slower"


@dataclass
class Findings:
    """What all processes did.

    Attributes:
        cold: Per connector and round, the process that found nothing stored.
        again: The one after it.
        broken: By connector and fault.
    """

    cold: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    again: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    broken: dict[tuple[str, str], Broken] = field(default_factory=dict)

    def add(self, connector: str, visit: Visit, *, again: bool) -> None:
        """Keep what a sound process did."""
        (self.again if again else self.cold)[connector].append(visit)

    def faults_of(self, connector: str) -> tuple[str, ...]:
        """Faults that make sense for a connector: not all have tiers to copy to."""
        return tuple(f for f in FAULTS if connector != "example" or f != "transfer")

    @property
    def complaints(self) -> list[str]:
        """The end of the output of each process that was not alive at its end."""
        named = [
            *((f"{name}, cold", v) for name, visits in self.cold.items() for v in visits),
            *((f"{name}, again", v) for name, visits in self.again.items() for v in visits),
            *((f"{name}, {fault}", b.visit) for (name, fault), b in self.broken.items()),
        ]
        return [f"{what}: {v.outcome}\n{v.log}" for what, v in named if v.outcome != "alive"]


def rows(found: Findings, lengths: Sequence[int]) -> list[dict[str, Cell]]:
    """One row per connector and length of prompt.

    Args:
        found: What the processes did.
        lengths: Prompt lengths in tokens.
    """
    return [_row(found, name, length, lengths) for name in found.again for length in lengths]


def _each(visits: Sequence[Visit], length: int, get: Callable[[Answer], float]) -> list[float]:
    return [get(visit.answers[length]) for visit in visits if length in visit.answers]


def _ratio(a: Sequence[float], b: Sequence[float]) -> float | None:
    if not a or not b or len(a) != len(b):
        return None
    return spread([x / y if y else float("inf") for x, y in zip(a, b, strict=True)]).median


def _row(found: Findings, name: str, length: int, lengths: Sequence[int]) -> dict[str, Cell]:
    again, cold, plain = found.again[name], found.cold[name], found.cold["none"]
    cpu = _each(again, length, lambda a: a.cpu_s)
    ttft = _each(again, length, lambda a: a.ttft_s)
    hits = _each(again, length, lambda a: a.cached)
    row: dict[str, Cell] = {
        "connector": name,
        "prompt_tokens": length,
        "hit_tokens": int(min(hits)) if hits else None,
        "cpu_s": spread(cpu).median if cpu else None,
        "cpu_ratio": _ratio(cpu, _each(plain, length, lambda a: a.cpu_s)),
        "ttft_ratio": _ratio(ttft, _each(plain, length, lambda a: a.ttft_s)),
        "cold_ttft_ratio": _ratio(
            _each(cold, length, lambda a: a.ttft_s), _each(plain, length, lambda a: a.ttft_s)
        ),
        "restart_hit": min(hits) / length if hits else None,
        "identical": _identical(found, name, length),
    }
    row |= _fault_cells(found, name) if length == min(lengths) else dict.fromkeys(FAULT_CELLS)
    row["ok"] = name != "tierkv" or _holds(found, row)
    return row


def _identical(found: Findings, name: str, length: int) -> bool:
    visits = [*found.cold[name], *found.again[name]]
    right = _right(found, length)
    return all(length in v.answers and v.answers[length].output == right for v in visits)


def _right(found: Findings, length: int) -> list[int] | None:
    first = found.cold["none"][0].answers.get(length)
    return first.output if first is not None else None


def _fault_cells(found: Findings, name: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = dict.fromkeys(FAULT_CELLS)
    rot = found.broken.get((name, "corrupt"))
    if rot is not None:
        cells["corrupt_detected"] = rot.damaged > 0 and _right_answers(found, rot)
    slow = found.broken.get((name, "slow"))
    if slow is not None and slow.visit.answers:
        cells["slow_tier_s"] = next(iter(slow.visit.answers.values())).ttft_s
    for cell, fault in (("failing_tier", "failing"), ("failed_transfer", "transfer")):
        broken = found.broken.get((name, fault))
        if broken is not None:
            wrong = broken.visit.outcome == "alive" and not _right_answers(found, broken)
            cells[cell] = "wrong output" if wrong else broken.visit.outcome
    return cells


def _right_answers(found: Findings, broken: Broken) -> bool:
    answers = broken.visit.answers
    return bool(answers) and all(a.output == _right(found, n) for n, a in answers.items())


def _holds(found: Findings, row: dict[str, Cell]) -> bool:
    length = row["prompt_tokens"]
    assert isinstance(length, int)
    checks = [row["identical"], (row["hit_tokens"] or 0) >= _HIT_SHARE * length]  # type: ignore[operator]
    if length >= _CPU_BOUND_FROM:
        checks.append(_at_most(row["cpu_ratio"], _CPU_RATIO))
    mine = _each(found.again["tierkv"], length, lambda a: a.ttft_s)
    others = [
        _each(visits, length, lambda a: a.ttft_s)
        for name, visits in found.again.items()
        if name not in ("none", "tierkv")
    ]
    checks += [_at_most(_ratio(mine, theirs), _BEHIND) for theirs in others]
    if found.broken and row["failing_tier"] is not None:
        # on top of the deadline comes a plain recomputation, with room for a busy machine
        plain = max(_each(found.cold["none"], length, lambda a: a.ttft_s))
        checks += [
            row["corrupt_detected"],
            _at_most(row["slow_tier_s"], DEADLINE_S + 2.0 + 3 * plain),
            row["failing_tier"] == "alive",
            row["failed_transfer"] == "alive",
        ]
    return all(checks)


def _at_most(value: Cell, bound: float) -> bool:
    return isinstance(value, int | float) and value <= bound
