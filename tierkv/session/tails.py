"""Prompts that go on with a session's private partial block."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tierkv.blocks import part_id

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey, KeyChain
    from tierkv.session.handle import Session
    from tierkv.session.table import Tail

__all__ = ["goes_on", "with_tail"]


def with_tail(
    session: Session, chain: KeyChain, first: int = 0
) -> tuple[tuple[BlockKey, ...], int]:
    """Keys to look up and tokens they cover: with the private tail where it applies.

    Args:
        session: Whose tail it is.
        chain: Of the prompt.
        first: First block that is looked up: a tail before it is of no use.
    """
    state = session.state
    size, tail = state.space.block_tokens, state.tail
    if tail is None or tail.blocks < first or not _applies(session, chain, tail):
        return tuple(chain.keys), len(chain.keys) * size
    keys = (*chain.keys[: tail.blocks], tail.key)
    return keys, tail.blocks * size + len(tail.tokens) // 4


def _applies(session: Session, chain: KeyChain, tail: Tail) -> bool:
    """Whether the prompt goes on exactly with the session's private partial block."""
    keys = chain.keys
    if not goes_on(chain, tail):
        return False
    if len(keys) > tail.blocks:
        core = session.runtime.core
        if core.decisions.state(part_id(keys[tail.blocks], 0), core.clock()).tiers:
            return False  # the full block is there: better than a part of it
    return True


def goes_on(chain: KeyChain, tail: Tail) -> bool:
    """Whether a prompt holds this partial block where it stands, with the same media in it."""
    if len(chain.keys) < tail.blocks:
        return False
    parent = chain.keys[tail.blocks - 1] if tail.blocks else chain.root
    begin = tail.blocks * chain.block_tokens
    held = array("I")
    held.frombytes(tail.tokens)
    end = begin + len(held)
    return (
        parent == tail.parent
        and chain.tokens[begin:end] == held
        and chain.media_in(begin, end) == tail.media
    )
