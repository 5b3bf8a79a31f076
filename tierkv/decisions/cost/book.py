"""Everything that is known of costs, in one place; what Decisions asks and the log replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.decisions.cost.breaker import Breaker, BreakerState
from tierkv.decisions.cost.planning import LoadChoice, choose
from tierkv.decisions.cost.rates import Line, Speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.cost.planning import Run

__all__ = ["DIRECTIONS", "CodecFigures", "Costs"]

DIRECTIONS: Final = ("read", "write")
_RAW: Final = "raw"
_WORTH_IT: Final = 1.1  # gain above which a chain is taken up; it is given up at none
_MEASURED: Final = 2


class CodecFigures(NamedTuple):
    """What was measured of a codec chain.

    Attributes:
        ratio: Raw bytes per stored byte; 0 while unknown.
        decode: Raw bytes a second that one core decodes; 0 while unknown.
    """

    ratio: float
    decode: float


class _Codec:
    __slots__ = ("decode", "ratio")

    def __init__(self) -> None:
        self.ratio, self.decode = Speed(), Speed()


class Costs:
    """Estimates and breakers of all tiers, prefill speeds, codec figures.

    Attributes:
        names: Names of the tiers, fastest first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._lines = {d: {t: Line() for t in range(len(self.names))} for d in DIRECTIONS}
        self._breakers = {d: [Breaker() for _ in self.names] for d in DIRECTIONS}
        self._speeds: dict[bytes, Speed] = {}
        self._codecs: dict[str, _Codec] = {}
        self._chains: dict[int, str] = {}
        self._sampled = [float("-inf")] * len(self.names)

    # ------------------------------------------------------------------ reading

    def line(self, tier: int, direction: str) -> Line:
        """What batches of a tier cost."""
        return self._lines[direction][tier]

    def breaker(self, tier: int, direction: str) -> Breaker:
        """The breaker of a tier for reads or writes."""
        return self._breakers[direction][tier]

    def speed(self, space: bytes) -> float:
        """Tokens a second of prefill in a space; 0 while unknown."""
        speed = self._speeds.get(space)
        return speed.value if speed is not None else 0.0

    def speeds(self) -> dict[str, float]:
        """Every known speed of prefill, by the fingerprint of its space in hexadecimal."""
        return {space.hex(): speed.value for space, speed in self._speeds.items()}

    def codec(self, chain: str) -> CodecFigures:
        """What was measured of a codec chain."""
        codec = self._codecs.get(chain)
        return CodecFigures(codec.ratio.value, codec.decode.value) if codec else CodecFigures(0, 0)

    def chain(self, tier: int) -> str:
        """Chain chosen last for a tier whose codec is chosen by cost."""
        return self._chains.get(tier, _RAW)

    def sampled(self, tier: int) -> float:
        """When a read of this tier was measured last; minus infinity if never."""
        return self._sampled[tier]

    def plan(self, space: bytes, runs: Sequence[Run], budget: float | None) -> LoadChoice:
        """How much of a prefix is worth loading; see :func:`choose`."""
        return choose(runs, self._lines["read"], self.names, self.speed(space), budget)

    def wanted_chain(self, tier: int, candidate: str, cores: int) -> str:
        """The chain that pays: the candidate only if it makes the tier faster, both measured.

        A tier delivers ``bandwidth`` raw bytes a second, or with a codec
        ``min(bandwidth * ratio, cores * decode speed)``.
        """
        bandwidth = self._lines["read"][tier].bandwidth
        codec = self._codecs.get(candidate)
        known = codec is not None and codec.ratio.count >= _MEASURED <= codec.decode.count
        if codec is None or not known or self._lines["read"][tier].count < _MEASURED:
            return _RAW
        gain = min(bandwidth * codec.ratio.value, cores * codec.decode.value) / bandwidth
        needed = 1.0 if self.chain(tier) == candidate else _WORTH_IT
        return candidate if gain > needed else _RAW

    # ------------------------------------------------------------------ learning

    def sample(self, tier: int, direction: str, nbytes: int, seconds: float, now: float) -> None:
        """A batch came back well."""
        self._breakers[direction][tier].success(now)
        self.alive(tier, now)
        if nbytes > 0:
            self._lines[direction][tier].add(nbytes, seconds)
            if direction == "read":
                self._sampled[tier] = now

    def failed(self, tier: int, direction: str, now: float, *, hung: bool) -> None:
        """A batch failed as a whole; a medium that hangs does so for reads and writes alike."""
        for each in DIRECTIONS if hung else (direction,):
            self._breakers[each][tier].failure(now, hung=hung)

    def alive(self, tier: int, now: float) -> None:
        """A sign of life: it is time to probe what hung."""
        for direction in DIRECTIONS:
            self._breakers[direction][tier].hint(now)

    def computed(self, space: bytes, tokens: int, seconds: float) -> None:
        """A prefill of ``tokens`` took ``seconds``."""
        self._speeds.setdefault(space, Speed()).add(tokens, seconds)

    def coded(self, chain: str, raw: int, stored: int, seconds: float) -> None:
        """Decoding took ``seconds`` on one core for ``raw`` bytes out of ``stored``."""
        codec = self._codecs.setdefault(chain, _Codec())
        codec.ratio.add(raw, stored)
        codec.decode.add(raw, seconds)

    def set_chain(self, tier: int, chain: str) -> None:
        """Take up a chain for a tier."""
        self._chains[tier] = chain

    # ------------------------------------------------------------------ masks

    def readable(self) -> int:
        """Tiers, one bit each, whose copies lookups may count on."""
        breakers = self._breakers["read"]
        return sum(1 << tier for tier, breaker in enumerate(breakers) if breaker.closed)

    def writable(self, now: float) -> int:
        """Tiers, one bit each, into which a copy may be tried now."""
        breakers = self._breakers["write"]
        return sum(
            1 << tier
            for tier, breaker in enumerate(breakers)
            if breaker.admits(now) or breaker.state is BreakerState.HALF_OPEN
        )
