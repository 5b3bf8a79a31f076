"""How the scheduler's side learns what a rank's blocks are: a small file that the rank writes.

It lies in the private directory of the job beside the rank's socket. It is JSON, read with every
field checked: names of blocks are made from it.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tierkv.blocks import Identity
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec

if TYPE_CHECKING:
    from tierkv.blocks import AdapterId

__all__ = ["RankFacts", "host_name", "read_facts", "socket_path", "write_facts"]

_FORMAT: Final = 2
_LARGEST: Final = 4 << 20  # bytes of a file: a layout of a thousand layers is a tenth of it


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, as the scheduler's side needs to know it.

    Attributes:
        rank: Which.
        world: Of how many.
        identity: What it computes, without a LoRA adapter.
        layout: Its blocks.
        block_tokens: Tokens of a block.
        page_tokens: Tokens of a page, by group.
        memory: Bytes of its first memory tier: what holds may take a share of.
        memory_tiers: Which of its tiers are in memory: bit i is set for tier i.
    """

    rank: int
    world: int
    identity: Identity
    layout: Layout
    block_tokens: int
    page_tokens: tuple[int, ...]
    memory: int
    memory_tiers: int = 1

    def space(self, adapter: AdapterId | None) -> Space:
        """The space of requests that run with this adapter."""
        adapters = () if adapter is None else (adapter,)
        return Space(replace(self.identity, adapters=adapters), self.layout, self.block_tokens)


def host_name() -> str:
    """Name of this machine: sockets of another one are out of reach."""
    return socket.gethostname()


def socket_path(directory: str, rank: int) -> str:
    """The socket of a rank."""
    return os.path.join(directory, f"rank{rank}.sock")


def _file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank{rank}.json"


def write_facts(directory: str, facts: RankFacts) -> None:
    """Tell the scheduler's side about a rank whose socket is open; the file appears whole.

    Raises:
        OSError: if it cannot be written.
    """
    identity, layout = facts.identity, facts.layout
    plain = {
        "format": _FORMAT,
        "rank": facts.rank,
        "world": facts.world,
        "model": identity.model,
        "weights": identity.weights,
        "context_policy": identity.context_policy,
        "extra": identity.extra,
        "groups": [
            {
                "kind": group.kind.value,
                "window": group.window,
                "layers": [
                    [layer.index, [[t.name, t.dtype, t.shape, t.packing] for t in layer.tensors]]
                    for layer in group.layers
                ],
            }
            for group in layout.groups
        ],
        "block_tokens": facts.block_tokens,
        "page_tokens": facts.page_tokens,
        "memory": facts.memory,
        "memory_tiers": facts.memory_tiers,
    }
    path = _file(directory, facts.rank)
    fresh = path.with_suffix(".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as stream:
        json.dump(plain, stream)
    os.replace(fresh, path)


def read_facts(directory: str, rank: int, world: int) -> RankFacts | None:
    """What a rank told; None if it has told nothing yet.

    Raises:
        LayoutError: if the file is malformed, or is about another rank.
    """
    try:
        raw = _file(directory, rank).read_bytes()
    except FileNotFoundError:
        return None
    try:
        if len(raw) > _LARGEST:
            raise ValueError(f"{len(raw)} bytes")
        facts = _facts(json.loads(raw))
        if (facts.rank, facts.world) != (rank, world):
            raise ValueError(f"it is about rank {facts.rank} of {facts.world}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LayoutError(f"what rank {rank} told of itself cannot be read: {error}") from error
    return facts


def _facts(plain: dict[str, Any]) -> RankFacts:
    if plain["format"] != _FORMAT:
        raise ValueError(f"format {plain['format']!r}, not {_FORMAT}")
    numbers = [plain[name] for name in ("rank", "world", "block_tokens", "memory", "memory_tiers")]
    if not all(type(value) is int for value in (*numbers, *plain["page_tokens"])):
        raise ValueError("a number is none")
    rank, world, block_tokens, memory, memory_tiers = numbers
    identity = Identity(
        plain["model"],
        plain["weights"],
        shard=(rank, world),
        context_policy=plain["context_policy"],
        extra=tuple((name, value) for name, value in plain["extra"]),
    )
    groups = tuple(
        Group(
            GroupKind(group["kind"]),
            tuple(
                Layer(index, tuple(TensorSpec(n, d, tuple(s), p) for n, d, s, p in tensors))
                for index, tensors in group["layers"]
            ),
            group["window"],
        )
        for group in plain["groups"]
    )
    pages = tuple(plain["page_tokens"])
    layout = Layout(groups)
    return RankFacts(rank, world, identity, layout, block_tokens, pages, memory, memory_tiers)
