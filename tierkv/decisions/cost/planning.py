"""Load or recompute: how much of a prefix is worth loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.decisions.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tierkv.decisions.cost.rates import Line
    from tierkv.decisions.types import Found

__all__ = ["LoadChoice", "Run", "choose", "profile"]

_RUNS: Final = 256  # most runs of a profile: what is decided about must fit a line of a log
_TRUSTED: Final = 2  # batches seen of a tier before it is thought to be slow


class Run(NamedTuple):
    """Consecutive blocks of a prefix, and the bytes that they need from each tier.

    Attributes:
        blocks: How many.
        tokens: Their tokens.
        load: (tier, bytes), tiers in order.
    """

    blocks: int
    tokens: int
    load: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How much of a prefix is worth loading.

    Attributes:
        blocks: Leading blocks to load.
        tokens: Their tokens.
        seconds: Expected time of the load.
        saved: Seconds of prefill that it saves, before its own time; 0 if the speed is unknown.
        reason: Why it is not the whole prefix (DEADLINE or SLOWER); None if it is.
        tier: The tier that the reason is about.
        rule: The reason, for people.
    """

    blocks: int
    tokens: int
    seconds: float = 0.0
    saved: float = 0.0
    reason: MissReason | None = None
    tier: int | None = None
    rule: str = ""


def profile(
    found: Found, block_tokens: int, near: Collection[int], first: int = 0
) -> tuple[Run, ...]:
    """What a prefix needs, in at most 256 runs of equal blocks (or of as many blocks).

    Args:
        found: The prefix.
        block_tokens: Tokens of a full block.
        near: Tiers in memory, from which loading is taken to cost nothing.
        first: First block that is loaded; the prefix has no parts of blocks before it.
    """
    total = max(found.blocks - first, 0)
    step = -(-total // _RUNS) if total > _RUNS else 1
    needs: list[dict[int, int]] = [{} for _ in range(-(-total // step))]
    for part in found.parts:
        if part.tier not in near:
            need = needs[(part.block - first) // step]
            need[part.tier] = need.get(part.tier, 0) + part.nbytes
    runs: list[Run] = []
    left = found.tokens - first * block_tokens
    for number, need in enumerate(needs):
        blocks = min(step, total - number * step)
        tokens = min(blocks * block_tokens, left)
        left -= tokens
        load = tuple(sorted(need.items()))
        last = runs[-1] if runs else None
        if last is not None and _alike(last, blocks, load) and tokens == blocks * block_tokens:
            load = tuple((t, n + m) for (t, n), (_, m) in zip(last.load, load, strict=True))
            runs[-1] = Run(last.blocks + blocks, last.tokens + tokens, load)
        else:
            runs.append(Run(blocks, tokens, load))
    return tuple(runs)


def _alike(run: Run, blocks: int, load: tuple[tuple[int, int], ...]) -> bool:
    """Whether further blocks need, block for block, exactly what those of the run do."""
    return len(run.load) == len(load) and all(
        tier == other and nbytes * blocks == more * run.blocks
        for (tier, nbytes), (other, more) in zip(run.load, load, strict=True)
    )


class _Prefix:
    """A growing prefix: its blocks, tokens, bytes by tier and expected time."""

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self._lines = lines
        self._bytes: dict[int, int] = {}
        self.blocks = 0
        self.tokens = 0

    def grow(self, run: Run) -> None:
        self.blocks += run.blocks
        self.tokens += run.tokens
        for tier, nbytes in run.load:
            self._bytes[tier] = self._bytes.get(tier, 0) + nbytes

    def seconds(self, more: Run | None = None) -> float:
        """Tiers are read side by side, each one in order."""
        return self._slowest(dict(more.load) if more is not None else {})[0]

    def slowest(self) -> int | None:
        """The tier that the prefix waits for."""
        return self._slowest({})[1]

    def _slowest(self, more: Mapping[int, int]) -> tuple[float, int | None]:
        longest: tuple[float, int | None] = (0.0, None)
        for tier in sorted(self._bytes.keys() | more.keys()):
            line = self._lines.get(tier)
            if line is not None and line.count >= _TRUSTED:
                seconds = line.seconds(self._bytes.get(tier, 0) + more.get(tier, 0))
                longest = max(longest, (seconds, tier), key=lambda pair: pair[0])
        return longest


def choose(
    runs: Sequence[Run],
    lines: Mapping[int, Line],
    names: Sequence[str],
    speed: float = 0.0,
    budget: float | None = None,
) -> LoadChoice:
    """The prefix with which the whole prompt is ready soonest, and that fits the time left.

    For a prefix of n blocks that is (time to load it) + (time to recompute the rest); of equals
    the longest is taken. So no choice takes longer than recomputing everything, and no tier is
    read whose blocks take longer to come than to compute. A tier of which fewer than two batches
    were seen is taken to cost nothing.

    Args:
        runs: The prefix, see :func:`profile`.
        lines: What reading costs, by tier.
        names: Names of the tiers.
        speed: Tokens a second of prefill; 0: unknown, then the cost keeps nothing from being
            loaded.
        budget: Seconds left; None: no deadline.
    """
    total = sum(run.tokens for run in runs)
    prefix = _Prefix(lines)
    steps: list[tuple[int, int, float]] = [(0, 0, 0.0)]  # blocks, tokens, seconds
    late = False
    for run in runs:
        part = run if budget is None else _fitting(prefix, run, budget)
        if part.blocks:
            prefix.grow(part)
            steps.append((prefix.blocks, prefix.tokens, prefix.seconds()))
        if part is not run:
            late = True
            break
    best = steps[-1]
    if speed > 0:
        best = min(steps, key=lambda s: (s[2] + (total - s[1]) / speed, -s[0]))
    blocks, tokens, seconds = best
    saved = tokens / speed if speed > 0 else 0.0
    whole = _Prefix(lines)
    for run in runs:
        whole.grow(run)
    if blocks == whole.blocks:
        return LoadChoice(blocks, tokens, seconds, saved)
    tier = whole.slowest()
    more = whole.seconds() - seconds
    left = whole.blocks - blocks
    text = f"tier {names[tier] if tier is not None else '?'}: {left} {'more ' if blocks else ''}"
    text += f"block{'s' if left != 1 else ''} would take {more:.3g} s, "
    if best != steps[-1] or not late:
        text += f"recomputing them {(total - tokens) / speed:.3g} s"
        return LoadChoice(blocks, tokens, seconds, saved, MissReason.SLOWER, tier, text)
    assert budget is not None
    text += f"{max(budget - seconds, 0.0):.3g} s are left"
    return LoadChoice(blocks, tokens, seconds, saved, MissReason.DEADLINE, tier, text)


def _fitting(prefix: _Prefix, run: Run, budget: float) -> Run:
    """The leading blocks of a run with which the prefix still fits the time left."""
    if prefix.seconds(run) <= budget:
        return run
    low, high = 0, run.blocks  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if prefix.seconds(_share(run, middle)) <= budget:
            low = middle
        else:
            high = middle
    return _share(run, low)


def _share(run: Run, blocks: int) -> Run:
    load = tuple((tier, nbytes * blocks // run.blocks) for tier, nbytes in run.load)
    return Run(blocks, run.tokens * blocks // run.blocks, load)
