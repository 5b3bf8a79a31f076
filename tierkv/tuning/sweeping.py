"""What each size and policy would find: miss-ratio curves, and the cheapest that is good enough."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tierkv.errors import ConfigError
from tierkv.replay import CostModel, Setup, replay
from tierkv.tuning.sampling import sampled
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.replay import Report
    from tierkv.traces import Trace

__all__ = ["PRICES", "Point", "Sweep", "price_of", "sweep"]

PRICES: Final[Mapping[str, float]] = {"device": 60.0, "host": 3.0, "nvme": 0.1, "file": 0.05}
"""What a GiB of each kind of tier costs, in any unit: only the proportions matter. Set your own."""

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of a sweep.

    Attributes:
        policy: Eviction policy of its tiers.
        tiers: Bytes of each tier by name, fastest first; tiers of no bytes are left out.
        token_hit_ratio: Share of the prompts' tokens that would have been found.
        block_hit_ratio: Share of their blocks.
        error: Of ``token_hit_ratio``, where the trace was sampled: half of the difference between
            two samples that share no block; 0 for the whole trace.
        saved_s: Seconds of prefill that need not be computed, less the seconds that requests
            wait for KV, over the whole trace.
        cost: Price of the tiers.
    """

    policy: str
    tiers: dict[str, int]
    token_hit_ratio: float
    block_hit_ratio: float
    error: float
    saved_s: float
    cost: float

    @property
    def fastest(self) -> int:
        """Bytes of the first tier: the x of a miss-ratio curve."""
        return next(iter(self.tiers.values()))

    def __str__(self) -> str:
        sizes = " + ".join(f"{name} {format_bytes(size)}" for name, size in self.tiers.items())
        return f"{self.policy}, {sizes}: hits {self.token_hit_ratio:.4f}, cost {self.cost:.4g}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points of one sweep, in the order in which they were asked for.

    Attributes:
        points: The points.
        interrupted: Whether Ctrl-C ended it before all were there.
    """

    points: tuple[Point, ...]
    interrupted: bool = False

    def cheapest(self, *, hit: float = 0.0, saved_s: float = 0.0) -> Point | None:
        """The point of the least cost that finds so much and saves so much; None: there is none.

        Of equal costs the one that finds more, then the one that was asked for first.
        """
        good = [p for p in self.points if p.token_hit_ratio >= hit and p.saved_s >= saved_s]
        return min(good, key=lambda p: (p.cost, -p.token_hit_ratio), default=None)

    def csv(self) -> str:
        """One line a point, a header first; one column a tier."""
        names = list(dict.fromkeys(name for point in self.points for name in point.tiers))
        rest = [f.name for f in fields(Point) if f.name not in ("policy", "tiers")]
        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["policy", *(f"{name}_bytes" for name in names), *rest])
        for point in self.points:
            sizes = [point.tiers.get(name, 0) for name in names]
            rows.writerow([point.policy, *sizes, *(getattr(point, name) for name in rest)])
        return out.getvalue()

    def to_plain(self) -> list[dict[str, Any]]:
        """The points as JSON knows them."""
        return [asdict(point) for point in self.points]


def price_of(tiers: Mapping[str, int], prices: Mapping[str, float] = PRICES) -> float:
    """What tiers of so many bytes cost.

    Raises:
        ConfigError: if there is no price for one.
    """
    for name in tiers:
        if name not in prices:
            raise ConfigError(f"no price for a {name!r} tier: name one, e.g. {name}=1.5 a GiB")
    return sum(size / _GIB * prices[name] for name, size in tiers.items())


def sweep(
    trace: Trace,
    sizes: Sequence[Mapping[str, int]],
    *,
    policies: Sequence[str] = ("lru",),
    base: Setup | None = None,
    sample: float = 1.0,
    prices: Mapping[str, float] = PRICES,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Replay a trace for each policy and each set of sizes.

    Args:
        trace: The trace; read into memory if it is not (``trace.loaded()``) and is used often.
        sizes: Bytes of each tier by name, fastest first; a tier of 0 bytes is not there.
        policies: Names of eviction policies.
        base: Everything else; its sizes, names and policy are not used.
        sample: Share of the blocks to look at; two samples of half of that are replayed, and the
            difference between them is told as the error.
        prices: Price of a GiB of each tier.
        progress: Told how many of how many replays are done.

    Ctrl-C ends it early; what was found by then is returned, and raised on if it is nothing.

    Raises:
        ConfigError: if a policy, tier or share does not exist.
    """
    if not 0 < sample <= 1:
        raise ConfigError(f"a sample is a share above 0 and up to 1, not {sample:g}")
    base = base or Setup(capacity_blocks=1)
    lens = _Lens.of(trace, sample, base.model)
    wanted = [(policy, dict(tiers)) for policy in policies for tiers in sizes]
    points: list[Point] = []

    def told(done: int) -> None:
        if progress is not None:
            progress(len(points) * len(lens.parts) + done, len(wanted) * len(lens.parts))

    try:
        for policy, given in wanted:
            points.append(_point(lens, base, policy, given, prices, told))
    except KeyboardInterrupt:
        if not points:
            raise
        return Sweep(tuple(points), interrupted=True)
    return Sweep(tuple(points))


def _point(
    lens: _Lens,
    base: Setup,
    policy: str,
    given: Mapping[str, int],
    prices: Mapping[str, float],
    told: Callable[[int], None],
) -> Point:
    """Replay one configuration."""
    tiers = {name: size for name, size in given.items() if size}
    if not tiers:
        raise ConfigError("a configuration without any tier finds nothing: give it bytes")
    cost = price_of(tiers, prices)
    found: list[_Found] = []
    for part in lens.parts:
        found.append(lens.look(part, base, policy, tiers))
        told(len(found))
    hits = [one.token_hit_ratio for one in found]
    return Point(
        policy,
        tiers,
        sum(hits) / len(hits),
        sum(one.block_hit_ratio for one in found) / len(found),
        (max(hits) - min(hits)) / 2,
        sum(one.saved_s for one in found) / len(found),
        cost,
    )


class _Lens(NamedTuple):
    """A trace, whole or as two samples, and what it takes to look through them at the whole."""

    parts: list[Trace]
    share: float
    model: CostModel
    whole: _Amounts

    @classmethod
    def of(cls, trace: Trace, sample: float, model: CostModel) -> Self:
        """Cut the samples.

        Raises:
            ConfigError: if nothing is left of the trace.
        """
        share = 1.0 if sample == 1 else sample / 2
        parts = [trace] if sample == 1 else [sampled(trace, share, n).loaded() for n in (0, 1)]
        if any(next(iter(part), None) is None for part in parts):
            why = "the trace has no requests"
            if sample < 1:
                why = f"a sample of {sample:g} leaves nothing of this trace; take a larger one"
            raise ConfigError(why)
        return cls(parts, share, _scaled(model, share), _Amounts.of(trace))

    def look(self, part: Trace, base: Setup, policy: str, tiers: Mapping[str, int]) -> _Found:
        """Replay one part on tiers of its share."""
        setup = replace(
            base,
            capacity_blocks=None,
            capacity_bytes=[int(size * self.share) for size in tiers.values()],
            names=tuple(tiers),
            policy=policy,
            model=self.model,
        )
        return _Found.of(replay(part, setup), self.whole, self.share, self.model)


class _Amounts(NamedTuple):
    """What is asked for, in all."""

    blocks: int
    tokens: int

    @classmethod
    def of(cls, trace: Trace) -> Self:
        blocks = tokens = 0
        for request in trace:
            blocks += len(request.keys)
            tokens += request.tokens
        return cls(max(blocks, 1), max(tokens, 1))


class _Found(NamedTuple):
    """What one replay says of the whole trace."""

    token_hit_ratio: float
    block_hit_ratio: float
    saved_s: float

    @classmethod
    def of(cls, report: Report, whole: _Amounts, share: float, model: CostModel) -> Self:
        # A sample with more or less than its share of the accesses has caught or missed some of
        # the few blocks that everybody uses, and which any cache finds: count them so (SHARDS-adj).
        tokens = report.hit_tokens + whole.tokens * share - report.tokens
        blocks = report.hit_blocks + whole.blocks * share - report.blocks
        return cls(
            min(max(tokens / (whole.tokens * share), 0.0), 1.0),
            min(max(blocks / (whole.blocks * share), 0.0), 1.0),
            tokens / model.prefill - report.stall.total,
        )


def _scaled(model: CostModel, share: float) -> CostModel:
    """A share of the blocks on hardware of that share of the speed takes the same time."""
    rates = [model.rate(tier) * share for tier in range(8)]
    return replace(model, bandwidth=rates, prefill=model.prefill * share)
