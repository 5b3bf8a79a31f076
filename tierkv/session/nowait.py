"""One block in place: a leased view of a frame in RAM, without an await and without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from tierkv.blocks import KEY_BYTES, part_id
from tierkv.chains import RAW
from tierkv.errors import ClosedError, IntegrityError, LayoutError
from tierkv.pipeline import likeness, open_frame, verify
from tierkv.views import over

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from tierkv.blocks import PartId
    from tierkv.frame import Header
    from tierkv.mover.core import Core
    from tierkv.pipeline import Like
    from tierkv.session.base import Handle
    from tierkv.session.table import SessionState

__all__ = ["Held", "get_nowait"]

_GROUP_0: Final = (0).to_bytes(2, "little")  # as part_id names it


class Held:
    """A part of one block where it lies in RAM, leased until :meth:`release`.

    The lease is as real as a match's: the memory is neither evicted, moved nor overwritten while
    it lasts, and the decision log records it. Release it on the engine's loop, once
    (``with session.get_nowait(3) as held``); tensors taken out of it are memory of the tier, which
    must not be written, and not be read once it is released or the engine is closed.
    """

    __slots__ = ("_core", "_found", "_lease", "_like", "_memory", "_part", "_state")

    def __init__(
        self, core: Core, state: SessionState, part: PartId, found: tuple[int, int, int]
    ) -> None:
        # a view of 64 KiB is worth 1 us: what can wait until somebody looks at it waits
        self._core = core
        self._state = state
        self._part = part
        self._found = found
        self._lease = found[0]
        self._memory: memoryview | None = None  # its frame and what it is like, once looked at
        self._like: Like | None

    def __repr__(self) -> str:
        state = f"lease {self._lease}" if self._lease else "released"
        return f"<Held {self._part.hex()[:12]}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lease, self._lease = self._lease, 0  # as release() does
        if lease:
            core = self._core
            drops = core.decisions.release(lease, core.clock())
            if drops:
                core.free(drops)

    @property
    def tokens(self) -> int:
        """Tokens of the block.

        Raises:
            ClosedError: if it was released, or the engine is closed.
            IntegrityError: if the frame is not the one that was asked for.
        """
        like = self._look()
        return self._read().tokens if like is None else like.tokens

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        """One tensor ``[heads, tokens, dim]`` (a state: its own shape), in the tier's memory.

        The first call checks that the frame is this part of this space in this generation, and
        keeps its tensors where they are taken from. The payload is not summed: see :meth:`verify`.

        Raises:
            ClosedError: if it was released, or the engine is closed.
            IntegrityError: if the frame is not the one that was asked for.
            LayoutError: if it has no such tensor, or keeps it through a codec (then there is
                nothing to look at in place: load it).
        """
        like = self._look()
        spot = None if like is None else like.spots.get((layer, name))
        if spot is not None:
            frombuffer, dtype, count, offset, shape = spot
            tensor = frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            return tensor.view(*shape)  # sizes one by one take torch half a microsecond less
        for section in self._read().sections:
            if section.layer == layer and section.tensor == name:
                break
        else:
            raise LayoutError(f"the block has no {name!r} of layer {layer}")
        if section.chain != RAW:
            raise LayoutError(
                f"layer {layer}, {name!r} is stored as {section.chain}: load it with match.load()"
            )
        data = self._frame()[section.offset : section.offset + section.nbytes]
        return over(data, section.dtype, section.shape)

    def verify(self) -> None:
        """Check all checksums, the header's as well, at the cost of reading every byte.

        Raises:
            ClosedError: if it was released, or the engine is closed.
            IntegrityError: if the frame is damaged. Loads find that too, and forget it.
        """
        verify(self._read(), self._frame())

    def release(self) -> None:
        """Give the lease back. Idempotent; no await."""
        lease, self._lease = self._lease, 0
        if lease:
            core = self._core
            drops = core.decisions.release(lease, core.clock())
            if drops:
                core.free(drops)

    def _look(self) -> Like | None:
        """Find the frame and check that it is the right one; what it is like, if known."""
        if self._memory is not None and self._lease and not self._core.closing.is_set():
            return self._like
        frame, part, state = self._frame(), self._part, self._state
        group = part[KEY_BYTES:]
        like = state.likes.get(group)
        if like is None or not like.has(frame, part, self._found[2]):
            like = likeness(self._read(), frame)
            if like is not None:
                state.likes[group] = like
        self._memory, self._like = frame, like
        return like

    def _frame(self) -> memoryview:
        """Its bytes."""
        if not self._lease:
            raise ClosedError("this view was released; get a new one")
        if self._core.closing.is_set():  # the tier gives its memory back, whoever leases it
            raise ClosedError("the engine is closed, and its memory with it; open it again")
        _, tier, generation = self._found
        memory = self._core.levels[tier].memory
        frame = memory.look(self._part, generation) if memory is not None else None
        if frame is None:  # damaged: its bytes are kept for the lease, but no longer given out
            raise IntegrityError("the block was taken back as damaged; treat it as missing")
        return frame

    def _read(self) -> Header:
        """Its header, read with every check."""
        frame, state = self._frame(), self._state
        header = open_frame(frame, state.space, self._part, self._found[2], state.root)
        if header.fidelity != "exact":
            raise IntegrityError("the block's KV is not exact; treat it as missing")
        return header


def get_nowait(session: Handle, block: int, group: int = 0) -> Held | None:
    """Take a block of the session's history where it lies in RAM.

    It is found by its key, moves nothing and counts as no use of the block for the eviction
    policy: what a reader wants kept, it matches.

    Args:
        session: An open handle on the session.
        block: Number of the block in the history (the tokens of the last match or store).
        group: Group of layers.

    Returns:
        The leased view; None if the block has no exact copy in a memory tier now, or the history
        is not that long.

    Raises:
        ClosedError: if the session or the engine is closed.
    """
    core, state = session.runtime.core, session.state
    if not session._open or core.closing.is_set():
        session.check_open()
    keys = state.chain.keys
    if not 0 <= block < len(keys):
        return None
    part: PartId = keys[block] + _GROUP_0  # type: ignore[assignment]
    if group:
        part = part_id(keys[block], group)
    found = core.decisions.hold_part(part, core.clock(), False, core.memories)
    return None if found is None else Held(core, state, part, found)
