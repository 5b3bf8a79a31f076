"""Why a block of a prompt would be loaded from where it is, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.blocks import part_id, split_part
from tierkv.chains import RAW
from tierkv.decisions.cost import profile
from tierkv.decisions.types import Found, FoundPart, MissReason
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind
from tierkv.mover.slices import sliced
from tierkv.pipeline import Pipeline, parse_chains
from tierkv.session.tails import goes_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, KeyChain, Media, PartId
    from tierkv.decisions.types import PartState
    from tierkv.layout import Group, Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.session.table import SessionState

__all__ = ["BlockReport", "explain", "explain_in_slices", "without_tokens"]

_TELLING: Final = 64 << 10  # raw bytes from which on a chain that pays saves whole pages for sure


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Where one block of a prompt is, or why it is nowhere.

    Attributes:
        index: Number of the block.
        start_token: Its first token.
        end_token: One past its last token.
        tier: Fastest tier in which a prefix load would find it, or None.
        chain: Codec chain of that copy, e.g. ``"raw"``, ``"int8+zstd"``; where the codec is
            ``"auto"``, or rules of compression say it, and the size of a frame on a medium does not
            tell, ``"raw or planes"``.
        exact: Whether its KV is exact: computed without loss, and in a lossless chain there.
        reason: Why it would not be loaded; None if it would.
        about: Tier that the reason is about, if it is about one.
        ago: Seconds since the reason arose, if known.
        rule: What the cost model (SLOWER) or the breaker (FAILED) says, where it is the reason.
    """

    index: int
    start_token: int
    end_token: int
    tier: str | None
    chain: str | None
    exact: bool
    reason: MissReason | None
    about: str | None = None
    ago: float | None = None
    rule: str = ""

    def __str__(self) -> str:
        if self.reason is None:
            return f"block {self.index}: {self.tier}, {self.chain}"
        where = f" in {self.about}" if self.about else ""
        when = f" {self.ago:.0f} s ago" if self.ago is not None else ""
        why = f" ({self.rule})" if self.rule else ""
        return f"block {self.index}: {self.reason.value}{when}{where}{why}"


class _Span(NamedTuple):
    key: BlockKey | None
    start: int
    end: int


def explain(
    core: Core,
    session: SessionState,
    token_ids: Sequence[int] | None,
    media: Sequence[Media] = (),
    *,
    lossy: bool,
) -> list[BlockReport]:
    """Tell, per block of a prompt (or of the session's history), where it is; changes nothing."""
    chain = session.chain
    if token_ids is not None:
        chain = chain.fork()
        chain.follow(token_ids, media)
    else:
        without_tokens(media)
    reader = _Reader(core, session.space, lossy=lossy)
    spans = _spans(session, chain)
    return reader.weighed([reader.report(index, span) for index, span in enumerate(spans)])


async def explain_in_slices(
    core: Core,
    session: SessionState,
    token_ids: Sequence[int] | None,
    media: Sequence[Media] = (),
    *,
    lossy: bool,
) -> list[BlockReport]:
    """As :func:`explain`, but the loop goes on meanwhile: for prompts of thousands of blocks.

    What changes meanwhile may show for some blocks and not for others.
    """
    chain = session.chain.fork()
    if token_ids is not None:
        await core.workers.run(chain.follow, token_ids, media)
    else:
        without_tokens(media)
    reader = _Reader(core, session.space, lossy=lossy)
    reports: list[BlockReport] = []
    async for span in sliced(_spans(session, chain)):
        reports.append(reader.report(len(reports), span))
    return reader.weighed(reports)


def without_tokens(media: Sequence[Media]) -> None:
    """Refuse media where no prompt is given that they could be in: a history has its own.

    Raises:
        ConfigError: if there are some.
    """
    if len(media):
        raise ConfigError("media belong to the token ids of a prompt: give those, too")


def _spans(session: SessionState, chain: KeyChain) -> list[_Span]:
    size = session.space.block_tokens
    spans = [_Span(key, index * size, (index + 1) * size) for index, key in enumerate(chain.keys)]
    done = len(chain.keys) * size
    if done < len(chain.tokens):
        tail = session.tail
        whole = tail is not None and len(tail.tokens) // 4 == len(chain.tokens) - done
        key = tail.key if tail is not None and whole and goes_on(chain, tail) else None
        spans.append(_Span(key, done, len(chain.tokens)))
    return spans


class _Reader:
    """Looks blocks up as a match would, without touching anything."""

    def __init__(self, core: Core, space: Space, *, lossy: bool) -> None:
        self._core = core
        self._space = space
        self._lossy = lossy
        self._parts: list[FoundPart] = []  # what a load would read, as far as the prefix goes
        self._reached: list[int] = []  # tokens of the blocks of the prefix
        self._readable = {level.index for level in core.levels if core.usable(level)}

    def report(self, index: int, span: _Span) -> BlockReport:
        """Where one block is. Call in order."""
        key, start, end = span
        if key is None:
            return BlockReport(index, start, end, None, None, True, MissReason.NEVER_STORED)
        core = self._core
        now = core.clock()
        worst: tuple[PartId, PartState] | None = None
        whole = index == len(self._reached)
        for group in range(len(self._space.layout.groups)):
            part = part_id(key, group)
            state = core.decisions.state(part, now)
            if worst is None or _slower(state, worst[1]):
                worst = (part, state)
            usable = self._usable(state)
            if usable:
                tier, nbytes = usable[0]
                self._parts.append(FoundPart(part, index, group, tier, state.generation, nbytes))
            elif _strict(self._space.layout.groups[group]):
                whole = False
        if whole:
            self._reached.append(end - start)
        assert worst is not None
        return self._tell(index, span, *worst)

    def _tell(self, index: int, span: _Span, part: PartId, state: PartState) -> BlockReport:
        core = self._core
        usable = self._usable(state)
        where = (index, span.start, span.end)
        if usable:
            level = core.levels[usable[0][0]]
            chain = core.chain_of(level, part, state.generation)
            others = self._other_chains(level, state) if chain is None else []
            if others:
                tokens, nbytes = span.end - span.start, usable[0][1]
                chain = " or ".join(others)
                if state.lossless[state.tiers.index(level.index)]:
                    chain = self._by_size(level, split_part(part)[1], tokens, nbytes, chain)
            exact = state.exact and state.lossless[state.tiers.index(level.index)]
            return BlockReport(*where, level.name, chain or level.chain, exact, None)
        broken = self._usable(state, readable=False)
        if broken:
            name = core.levels[broken[0][0]].name
            rule = f"tier {name} failed or hung and is left out for a while"
            reason = MissReason.FAILED
            return BlockReport(*where, None, None, state.exact, reason, name, None, rule)
        why = MissReason.FIDELITY if state.tiers else state.reason
        about = core.levels[state.tier].name if state.tier is not None else None
        return BlockReport(*where, None, None, state.exact, why, about, state.ago)

    def _other_chains(self, level: Level, state: PartState) -> list[str]:
        """Chains that a frame may have where its tier does not say which; raw apart."""
        if level.candidate is not None:
            return [level.candidate]
        rules = self._core.decisions.rule_chains(level.index)
        lossless = state.lossless[state.tiers.index(level.index)]
        fitting = [c for c in (level.chain, *rules) if parse_chains(c).lossless == lossless]
        return [chain for chain in dict.fromkeys(fitting) if chain != RAW] if rules else []

    def _by_size(self, level: Level, group: int, tokens: int, nbytes: int, others: str) -> str:
        """Chain of a frame that cannot be looked at: raw ones are all of one size."""
        raw = Pipeline(self._space, RAW).max_bytes(group, tokens)
        if nbytes != level.backend.charge(raw):
            return others
        return RAW if raw >= _TELLING else f"{RAW} or {others}"

    def _usable(self, state: PartState, *, readable: bool = True) -> list[tuple[int, int]]:
        """Tiers whose copy would do, and its bytes there."""
        return [
            (tier, nbytes)
            for tier, lossless, nbytes in zip(
                state.tiers, state.lossless, state.nbytes, strict=True
            )
            if (self._lossy or (lossless and state.exact))
            and (not readable or tier in self._readable)
        ]

    def weighed(self, reports: list[BlockReport]) -> list[BlockReport]:
        """Name the rule of the cost model for blocks that would not be worth loading."""
        core, space, blocks = self._core, self._space, len(self._reached)
        if not blocks or not core.decisions.costs.speed(space.fingerprint):
            return reports
        groups, tokens = space.layout.groups, sum(self._reached)
        parts = tuple(
            part
            for part in self._parts
            if part.block < blocks and _needed(groups[part.group], part.block, blocks, space)
        )
        near = {x.index for x in core.levels if x.memory is not None or x.resident is not None}
        runs = profile(Found(blocks, tokens, parts, 0, None), space.block_tokens, near)
        choice = core.decisions.costs.plan(space.fingerprint, runs, None)
        if choice.reason is None or choice.tier is None:
            return reports
        name = core.levels[choice.tier].name
        for index in range(choice.blocks, blocks):
            reports[index] = replace(
                reports[index], reason=choice.reason, about=name, rule=choice.rule
            )
        return reports


def _strict(group: Group) -> bool:
    """Whether a prefix needs every part of the group."""
    return group.kind in (GroupKind.FULL, GroupKind.LATENT)


def _needed(group: Group, block: int, blocks: int, space: Space) -> bool:
    """Whether a prefix of so many blocks needs this group's part of a block."""
    if _strict(group):
        return True
    if group.window is None:
        return block == blocks - 1
    return (block + 1) * space.block_tokens > blocks * space.block_tokens - (group.window - 1)


def _slower(state: PartState, than: PartState) -> bool:
    return (not state.tiers, state.tiers[:1]) > (not than.tiers, than.tiers[:1])
