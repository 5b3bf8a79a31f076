"""Prompts that go on with a session's private partial block."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tierkv.blocks import part_id

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey, KeyChain
    from tierkv.session.handle import Session
    from tierkv.session.table import Tail

__all__ = ["with_tail"]


def with_tail(session: Session, chain: KeyChain) -> tuple[tuple[BlockKey, ...], int]:
    """Keys to look up and tokens they cover: with the private tail where it applies."""
    state = session.state
    size, tail = state.space.block_tokens, state.tail
    if tail is None or not _applies(session, chain, tail):
        return tuple(chain.keys), len(chain.keys) * size
    keys = (*chain.keys[: tail.blocks], tail.key)
    return keys, tail.blocks * size + len(tail.tokens) // 4


def _applies(session: Session, chain: KeyChain, tail: Tail) -> bool:
    """Whether the prompt goes on exactly with the session's private partial block."""
    state, keys = session.state, chain.keys
    if len(keys) < tail.blocks:
        return False
    parent = keys[tail.blocks - 1] if tail.blocks else state.root
    if parent != tail.parent:
        return False
    if len(keys) > tail.blocks:
        core = session.runtime.core
        if core.decisions.state(part_id(keys[tail.blocks], 0), core.clock()).tiers:
            return False  # the full block is there: better than a part of it
    begin = tail.blocks * state.space.block_tokens
    held = array("I")
    held.frombytes(tail.tokens)
    return chain.tokens[begin : begin + len(held)] == held
