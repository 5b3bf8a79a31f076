"""Small spaces and KV whose every value tells which token, layer and tensor it belongs to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

import tierkv
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, Space, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.abc import View

BLOCK = 16
LAYOUTS: dict[str, Layout] = {
    "full": Layout.uniform(3, 2, 8, "float32"),
    "mixed": Layout(
        (
            Group(
                GroupKind.FULL,
                (Layer.kv(0, 2, 8, "bfloat16"), Layer.kv(2, 1, 16, "float32", v_dim=4)),
            ),
        )
    ),
    "sliding": Layout(
        (
            Group(GroupKind.SLIDING, (Layer.kv(0, 1, 8, "float32"),), window=24),
            Group(GroupKind.FULL, (Layer.kv(1, 1, 8, "float32"),)),
        )
    ),
    "latent": Layout(
        (Group(GroupKind.LATENT, (Layer(0, (TensorSpec("latent", "float16", (1, 12)),)),)),)
    ),
    "state": Layout(
        (
            Group(GroupKind.FULL, (Layer.kv(0, 1, 8, "float32"),)),
            Group(GroupKind.STATE, (Layer(1, (TensorSpec("ssm", "float32", (4, 6)),)),)),
        )
    ),
}


def on_every_loop(values: Sequence[str], *chosen: str) -> list[Any]:
    """Parameters of a test that runs on every event loop for the chosen ones, else on one."""
    import pytest  # not at the top: processes that tests start need only the rest

    assert set(chosen) <= set(values)
    marks = pytest.mark.every_loop
    return [pytest.param(x, marks=marks) if x in chosen else x for x in values]


async def until(true: Callable[[], object]) -> None:
    """Wait for what threads or other tasks bring about, and nothing tells; at most a minute."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - it says nothing
            await asyncio.sleep(0.001)


def space(
    layout: str = "full", *, model: str = "m", block: int = BLOCK, **identity: object
) -> Space:
    """A small space."""
    return Space(
        tierkv.Identity(model, "rev1", **identity),  # type: ignore[arg-type]
        LAYOUTS[layout],
        block_tokens=block,
    )


def tokens(blocks: float, seed: int = 0, block: int = BLOCK) -> list[int]:
    """Token ids of ``blocks`` blocks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50_000, (int(blocks * block),), generator=generator).tolist()


def _tensor(spec: TensorSpec, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator)
    return values.to(getattr(torch, spec.dtype))


class Memory:
    """The caller's tensors for one sequence of a layout, and a view of them."""

    def __init__(self, layout: Layout, length: int, seed: int | None = None) -> None:
        self.layout = layout
        self.length = length
        self.layers: dict[int, dict[str, torch.Tensor]] = {}
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        for group in layout.groups:
            for layer in group.layers:
                target = self.layers if group.per_token else self.states
                for number, spec in enumerate(layer.tensors):
                    shape = group.stored_shape(spec, length)
                    if seed is None:  # a sentinel that no stored value equals
                        tensor = torch.full(shape, 77.0).to(getattr(torch, spec.dtype))
                    else:
                        tensor = _tensor(spec, shape, seed * 1000 + layer.index * 10 + number)
                    target.setdefault(layer.index, {})[spec.name] = tensor
        assert all(
            spec.dtype in DTYPE_BYTES for g in layout.groups for x in g.layers for spec in x.tensors
        )

    @property
    def view(self) -> View:
        """The memory as a dense view."""
        return tierkv.views.dense(self.layers, states=self.states or None)

    def same(self, other: Memory, tokens_: int) -> bool:
        """Whether the first ``tokens_`` tokens that a load must restore are bit-equal."""
        for group in self.layout.groups:
            for layer in group.layers:
                for spec in layer.tensors:
                    if not group.per_token:
                        mine = self.states[layer.index][spec.name]
                        theirs = other.states[layer.index][spec.name]
                    else:
                        first = 0
                        if group.window is not None:
                            first = max(0, tokens_ - (group.window - 1))
                        mine = self.layers[layer.index][spec.name][:, first:tokens_]
                        theirs = other.layers[layer.index][spec.name][:, first:tokens_]
                    if not torch.equal(
                        mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)
                    ):
                        return False
        return True

    def untouched(self, start: int = 0) -> bool:
        """Whether no token from ``start`` on was written."""
        return all(
            bool((tensor[:, start:] == torch.tensor(77.0).to(tensor.dtype)).all())
            for layer in self.layers.values()
            for tensor in layer.values()
        )


def tiers(
    kinds: str, path: Path, capacity: int | str = "4MiB", **options: object
) -> list[tierkv.Tier]:
    """Tiers by name, e.g. ``"host+nvme"``."""
    out = []
    for kind in kinds.split("+"):
        where = None if kind in ("host", "device") else str(path / kind)
        size = capacity if kind == "host" else "64MiB"
        out.append(tierkv.Tier(kind, size, path=where, **options))  # type: ignore[arg-type]
    return out
