"""Views of serving engines: windows whose older pages are gone, groups with pages of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import kit
from tests.engine.rig import load, running
from tierkv.abc import View
from tierkv.errors import LayoutError
from tierkv.views import DenseView

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

pytestmark = pytest.mark.anyio
SIZE = kit.BLOCK
IDS = kit.tokens(8)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


class Windowed(View):
    """A dense memory of which some layers have nothing before a token."""

    def __init__(self, memory: kit.Memory, gone: dict[int, int], *, tells: bool = True) -> None:
        self.memory = memory
        self.gone = gone
        self.tells = tells

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """A slice, where the layer has memory."""
        if start < self.gone.get(layer, 0):
            raise LayoutError(f"layer {layer} has no memory for token {start}")
        return ((start, self.memory.layers[layer][tensor].narrow(1, start, stop - start)),)

    def sample(self, layer: int, tensor: str) -> tuple[str, int, int]:
        """Known without looking at a token."""
        found = self.memory.layers[layer][tensor]
        return str(found.dtype).removeprefix("torch."), found.shape[0], found.shape[2]

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The state, whether or not its page is there: see :meth:`backs`."""
        return self.memory.states[layer][tensor]

    def backs(self, layer: int, start: int, stop: int) -> bool:
        """Whether the layer has memory there."""
        return not self.tells or start >= self.gone.get(layer, 0)


@pytest.mark.parametrize("gone", [1, SIZE, 5 * SIZE, 6 * SIZE])
async def test_parts_that_slid_out_of_the_window_are_left_out(gone: int, tmp_path: Path) -> None:
    """Stores of hybrid models: the other group's parts of the same blocks are stored."""
    space = kit.space("sliding")
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    async with running("host", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            done = await session.store(IDS, Windowed(kv, {0: gone}))
            assert (done.stored, done.skipped) == (8, 0)
            first = -(-gone // SIZE)
            parts = {part for part, _, _ in rig.engine.core.decisions.parts(0)}
            assert len(parts) == 8 + 8 - first
            tokens, back = await load(session, IDS)
            # the window of 24 tokens reaches back to block 6
            assert tokens == len(IDS)
            assert back.same(kv, tokens)
        await rig.at_rest()


async def test_a_state_without_a_page_is_left_out(tmp_path: Path) -> None:
    space = kit.space("state")
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    async with running("host", tmp_path, space=space) as rig, rig.engine.session("a") as session:
        assert (await session.store(IDS, Windowed(kv, {1: 8 * SIZE}))).stored == 8
        assert (await load(session, IDS))[0] == 0  # no state, no prefix
        assert (await session.store(IDS, Windowed(kv, {}))).skipped == 0
        assert (await load(session, IDS))[0] == len(IDS)


async def test_strict_groups_must_be_backed(tmp_path: Path) -> None:
    space = kit.space("sliding")
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    async with running("host", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            with pytest.raises(LayoutError):
                await session.store(IDS, Windowed(kv, {1: SIZE}))
            with pytest.raises(LayoutError):
                await session.store(IDS, Windowed(kv, {0: SIZE}, tells=False))
        await rig.at_rest()


class Shuffled(DenseView):
    """Each group has its blocks in another order: where they are depends on the layer asked."""

    def __init__(self, memory: kit.Memory) -> None:
        super().__init__(memory.layers)
        self.asked: set[int] = set()

    def locate(
        self, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Nobody may ask without naming a layer."""
        raise AssertionError("locate() instead of locate_in()")

    def locate_in(
        self, layer: int, starts: NDArray[np.int64], tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Layer 0 lies backwards."""
        self.asked.add(layer)
        return starts * 0, self.tokens - SIZE - starts if layer == 0 else starts


async def test_groups_may_have_pages_of_their_own(tmp_path: Path) -> None:
    layout = kit.LAYOUTS["sliding"]
    space = kit.space("sliding")
    ids = kit.tokens(32)
    kv = kit.Memory(layout, len(ids), seed=1)
    async with running("host", tmp_path, space=space) as rig, rig.engine.session("a") as session:
        await session.store(ids, kv.view)
        back = kit.Memory(layout, len(ids))
        view = Shuffled(back)
        async with session.match(ids) as match:
            assert (await match.load(view)).tokens == len(ids)
        assert 1 in view.asked
        for name, tensor in back.layers[1].items():
            assert torch.equal(tensor, kv.layers[1][name])
