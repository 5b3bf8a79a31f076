"""Which codec chain is used, where and when: a frozen spec, and what a list of them means.

Rules are looked at in order; the first one that applies to a block in a tier counts. A rule applies
once all of its conditions hold: until then a later rule may, and otherwise the block is stored raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierkv.config.fields import NONE, check_types, did_you_mean, set_field
from tierkv.errors import ConfigError
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.config.specs import EngineConfig, Tier

__all__ = [
    "CompressionPolicy",
    "as_rules",
    "base_chain",
    "engine_chains",
    "later_rules",
    "rules_of",
]

_RAW: Final = "raw"
_WHEN: Final = ("in_place", "demotion")


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """One rule: which codec chain is used, where and when.

    ``CompressionPolicy("int8", after_steps=50)`` keeps a block raw while its session has computed
    50 tokens or fewer behind it, and as int8 from the 51st on. A rule without any condition is the
    chain in which new blocks are stored.

    Attributes:
        chain: Codec chain, e.g. ``"int8"``.
        after_steps: Tokens that were given KV in the session after the block's last one, beyond
            which the rule applies; 0 = at once. For a block that several sessions share, the one
            that is furthest ahead counts.
        after: Seconds (or text such as ``"10m"``) since the block was stored; None = at once.
        tier: Name of the tier it is for; None: every tier without a ``codec`` of its own.
        sinks: Blocks with one of so many first tokens stay as they are: attention sinks. 1 keeps
            the first block exact.
        recent: Blocks with one of so many last tokens of their session stay as they are.
        importance_below: Only blocks whose importance (:meth:`tierkv.Session.score`, 0 to 1) is
            known to be below it; above 0, at most 1.
        when: ``"in_place"``: blocks in memory tiers (``host``, ``device``) are converted where they
            are, in the background, and whatever is copied to another tier is converted on its way.
            ``"demotion"``: only what is copied to a slower tier is, on its way. What is on a medium
            (``nvme``, ``file``) is never read again only to be converted.
    """

    chain: str
    after_steps: int = 0
    after: float | str | None = None
    tier: str | None = None
    sinks: int = 0
    recent: int = 0
    importance_below: float | None = None
    when: str = "in_place"

    def __post_init__(self) -> None:
        what, number = "compression", (int, float)
        check_types(self, what, chain=str, after_steps=int, sinks=int, recent=int, when=str)
        check_types(self, what, after=(*number, str, NONE), tier=(str, NONE))
        check_types(self, what, importance_below=(*number, NONE))
        if not self.chain or self.after_steps < 0:
            raise ConfigError("compression needs a chain such as 'int8', and after_steps >= 0")
        if self.chain.partition(":")[0] == "auto":
            raise ConfigError("compression: 'auto' is a codec of a tier; a rule names a chain")
        if self.sinks < 0 or self.recent < 0:
            raise ConfigError("compression: sinks and recent are numbers of tokens, 0 or more")
        if self.importance_below is not None and not 0 < self.importance_below <= 1:
            raise ConfigError(
                f"compression: importance_below is above 0 and at most 1, not "
                f"{self.importance_below!r}: importance is a number from 0 to 1"
            )
        if self.when not in _WHEN:
            hint = did_you_mean(self.when, _WHEN)
            raise ConfigError(f"compression: when={self.when!r} is not known; {hint}")
        if self.after is not None:
            try:
                set_field(self, "after", parse_duration(self.after))
            except ConfigError as error:
                raise ConfigError(f"compression: after: {error}") from None

    @property
    def seconds(self) -> float:
        """Least age in seconds."""
        return float(self.after or 0.0)

    @property
    def steps(self) -> int:
        """Least age in steps: tokens with KV behind the block's last one."""
        return max(self.after_steps + 1 if self.after_steps else 0, self.recent)

    @property
    def at_once(self) -> bool:
        """Whether it applies to every block from the start."""
        age = self.steps > 0 or self.seconds > 0
        return not age and not self.sinks and self.importance_below is None


def as_rules(value: object) -> str | CompressionPolicy | tuple[CompressionPolicy, ...] | None:
    """Take the setting ``compression``: a chain, a rule, a list of rules, or None.

    Raises:
        ConfigError: if it is something else.
    """
    if value is None or isinstance(value, str | CompressionPolicy):
        return value
    rules = tuple(value) if isinstance(value, list | tuple) else ()
    if not rules or not all(isinstance(rule, CompressionPolicy) for rule in rules):
        raise ConfigError(
            f"compression must be a codec chain, a tierkv.CompressionPolicy or a list of them, "
            f"not {value!r}",
            setting="compression",
        )
    return rules


def rules_of(config: EngineConfig, tier: Tier) -> list[CompressionPolicy]:
    """The rules that can apply in a tier, in order, up to the first that always does.

    Raises:
        ConfigError: if a rule names no tier, or one with a codec of its own, or is never reached.
    """
    rules = _listed(config.compression)
    names = [spec.name for spec in config.tiers]
    own = {spec.name for spec in config.tiers if spec.codec is not None}
    first = config.tiers[0].name
    for rule in rules:
        if rule.tier is not None and rule.tier not in names:
            hint = did_you_mean(rule.tier, names)
            raise ConfigError(f"compression {rule.chain!r}: no tier {rule.tier!r}; {hint}")
        if rule.tier in own:
            raise ConfigError(
                f"compression {rule.chain!r}: tier {rule.tier!r} has a codec of its own, which "
                f"counts; drop one of them"
            )
        if rule.tier == first and rule.when == "demotion":
            raise ConfigError(
                f"compression {rule.chain!r}: nothing is demoted into the first tier, {first!r}; "
                f"name a slower one, or say when='in_place'"
            )
    _check_reached(rules, first)
    if tier.name in own:
        return []
    mine = [rule for rule in rules if rule.tier in (None, tier.name)]
    if tier.name == first:
        mine = [rule for rule in mine if rule.when != "demotion"]
    end = next((n for n, rule in enumerate(mine, 1) if rule.at_once), len(mine))
    return mine[:end]


def _listed(
    compression: str | CompressionPolicy | Sequence[CompressionPolicy] | None,
) -> tuple[CompressionPolicy, ...]:
    if compression is None:
        return ()
    if isinstance(compression, str):
        return (CompressionPolicy(compression),)
    if isinstance(compression, CompressionPolicy):
        return (compression,)
    return tuple(compression)


def _check_reached(rules: Sequence[CompressionPolicy], first: str) -> None:
    for number, rule in enumerate(rules):
        slower = rule.when == "demotion" or rule.tier not in (None, first)
        for other in rules[:number]:
            wider = other.tier in (None, rule.tier) and (slower or other.when == "in_place")
            if other.at_once and wider:
                raise ConfigError(
                    f"compression {rule.chain!r}: the rule is never reached, {other.chain!r} comes "
                    f"first and always applies; put the one with conditions first"
                )


def base_chain(config: EngineConfig, tier: Tier) -> str:
    """Chain in which new blocks are stored in a tier without a codec of its own.

    Raises:
        ConfigError: if the rules contradict each other; see :func:`rules_of`.
    """
    rules = rules_of(config, tier)
    return rules[-1].chain if rules and rules[-1].at_once else _RAW


def later_rules(config: EngineConfig, tier: Tier) -> tuple[CompressionPolicy, ...]:
    """The rules whose conditions a block in this tier may come to meet."""
    return tuple(rule for rule in rules_of(config, tier) if not rule.at_once)


def engine_chains(config: EngineConfig) -> set[str]:
    """Every chain that a frame of this engine may be stored in.

    Whether any of them is lossy tells whether its owner asked for lossy copies.
    """
    chains = set()
    for tier in config.tiers:
        chains.add(tier.candidate or tier.codec or base_chain(config, tier))
        chains.update(rule.chain for rule in later_rules(config, tier))
    return chains
