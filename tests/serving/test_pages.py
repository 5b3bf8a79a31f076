"""Page pools: their layout, and views of a request's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.serving.rank_rig import KINDS, PAGES, groups_of
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind, TensorSpec
from tierkv_adapters.serving.pages import (
    PagedLayer,
    PageGroup,
    PagePools,
    block_tokens_for,
    opaque,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.layout import Layout
    from tierkv_adapters.serving.page_views import PagesView


def _sliding() -> PagePools:
    return PagePools(groups_of("sliding"))


def _sections(pools: PagePools, group: int, tokens: int) -> tuple[tuple[object, ...], ...]:
    found = pools.layout(tokens).groups[group]
    return tuple(
        (layer.index, spec.name, spec.dtype, found.stored_shape(spec, tokens))
        for layer in found.layers
        for spec in layer.tensors
    )


# ---------------------------------------------------------------------------- opaque pages


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_opaque_pages_are_the_bytes_in_memory(order: tuple[int, ...], dtype: torch.dtype) -> None:
    raw = torch.arange(6 * 512, dtype=torch.int32).to(torch.uint8).view(dtype).view(6, -1)
    padded = torch.cat([raw, raw], 1)[:, : raw.shape[1]]  # pages with a gap behind each
    pool = padded.unflatten(1, (4, 2, -1)).permute(order)  # type: ignore[no-untyped-call]
    flat = opaque(pool, 8)
    assert flat.shape == (6, 1, 8, 64)
    assert flat.data_ptr() == pool.data_ptr()
    assert torch.equal(flat.reshape(6, -1), raw.view(torch.uint8))
    assert torch.equal(opaque(pool), raw.view(torch.uint8))
    flat[3].fill_(7)
    assert bool((pool[3].contiguous().view(torch.uint8) == 7).all())


def test_pages_that_are_no_stretch_of_memory_are_refused() -> None:
    pool = torch.zeros(4, 2, 8, 16)
    with pytest.raises(LayoutError, match="one stretch of memory"):
        opaque(pool[:, :, :, :8], 8)
    with pytest.raises(LayoutError, match="cannot be divided into 7 tokens"):
        opaque(pool, 7)
    with pytest.raises(LayoutError, match="need a pool"):
        opaque(torch.zeros(4))


# ---------------------------------------------------------------------------- layouts


def test_block_tokens_are_whole_pages_of_every_group() -> None:
    def group(page: int) -> PageGroup:
        return PageGroup(GroupKind.FULL, None, page, ())

    assert block_tokens_for([group(16)], 64) == 64
    assert block_tokens_for([group(128)], 64) == 128
    assert block_tokens_for([group(16), group(24)], 64) == 96
    for wrong in (0, -1, 2.5):
        with pytest.raises(LayoutError, match="positive numbers"):
            block_tokens_for([group(16)], wrong)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="positive numbers"):
            block_tokens_for([group(wrong)], 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_names_every_tensor(kind: str) -> None:
    groups = groups_of(kind)
    layout = PagePools(groups).layout(8)
    for group, described in zip(groups, layout.groups, strict=True):
        assert (group.kind, group.window) == (described.kind, described.window)
        for layer, specs in zip(group.layers, described.layers, strict=True):
            assert layer.index == specs.index
            assert list(layer.tensors) == [spec.name for spec in specs.tensors]


def test_f013_an_inner_order_is_one_of_pages_of_a_size() -> None:
    """Of an opaque page [heads, tokens, dim], where a token's bytes are depends on its size."""

    def layout(tokens: int) -> Layout:
        pool = opaque(torch.zeros(4, 2, tokens, 8), tokens)
        layer = PagedLayer(0, {"page": pool}, "kernel:HND")
        return PagePools([PageGroup(GroupKind.FULL, None, tokens, (layer,))]).layout(8)

    assert layout(4) != layout(8)
    assert layout(4) == layout(4)


def test_packing_keeps_pages_of_another_order_apart() -> None:
    def pools(packing: str) -> PagePools:
        tensor = torch.zeros(4, 1, 8, 16, dtype=torch.uint8)
        layer = PagedLayer(0, {"page": tensor}, packing)
        return PagePools([PageGroup(GroupKind.FULL, None, 8, (layer,))])

    one, other = (pools(packing).layout(8) for packing in ("a:HND", "a:NHD"))
    assert one.fingerprint != other.fingerprint
    assert one.groups[0].layers[0].tensors == (TensorSpec("page", "uint8", (1, 16), "a:HND/8"),)
    with pytest.raises(LayoutError, match="do not fill blocks of 12"):
        pools("x").layout(12)


def _of(*layers: PagedLayer, page: int = 8) -> Callable[[], PagePools]:
    return lambda: PagePools([PageGroup(GroupKind.FULL, None, page, layers)])


_POOL = torch.zeros(4, 1, 8, 16)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: PagePools([]), "at least one group"),
        (_of(), "no layers"),
        (_of(PagedLayer(0, {})), "no tensors"),
        (_of(PagedLayer(0, {"k": _POOL}), page=4), "need .* 4 tokens"),
        (_of(PagedLayer(0, {"k": _POOL[0]})), "need .*pages, heads"),
        (_of(PagedLayer(0, {"k": _POOL, "v": torch.zeros(5, 1, 8, 16)})), "number of pages"),
        (_of(PagedLayer(0, {"k": _POOL, "v": _POOL})), "shares memory"),
        (_of(PagedLayer(0, {"k": _POOL.to(torch.complex64)})), "complex64"),
        (_of(PagedLayer(0, {"k": _POOL}), PagedLayer(0, {"v": _POOL + 0})), "two page groups"),
        (
            _of(PagedLayer(0, {"k": _POOL, "v": torch.zeros(4, 1, 8, 16, device="meta")})),
            "several devices",
        ),
    ],
)
def test_pools_that_cannot_be_used_are_refused(make: Callable[[], PagePools], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        make()


def test_groups_may_lie_in_the_same_memory() -> None:
    """A page belongs to one group at a time."""
    layers = [PagedLayer(i, {"k": _POOL}) for i in range(2)]
    full = PageGroup(GroupKind.FULL, None, 8, (layers[0],))
    window = PageGroup(GroupKind.SLIDING, 4, 8, (layers[1],))
    assert PagePools([full, window]).pages == [4, 4]


# ---------------------------------------------------------------------------- views


def test_pieces_are_the_pages_in_order() -> None:
    pools = PagePools(groups_of("full"))
    view = pools.view([[5, 2, 9]])
    pool = pools.tensors[0, "k"]
    found = view.pieces(0, "k", 2, 10)
    assert [(at, piece.shape[1]) for at, piece in found] == [(2, 2), (4, 4), (8, 2)]
    assert [piece.data_ptr() for _, piece in found] == [
        pool[5][:, 2:].data_ptr(),
        pool[2].data_ptr(),
        pool[9].data_ptr(),
    ]
    assert view.room() == 12
    assert view.sample(0, "k") == ("bfloat16", 2, 8)


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ([[0]], "2 page groups, 1 lists"),
        ([[0], [PAGES]], "page group 1 has pages 0 to"),
        ([[0], [-2]], "page group 1 has pages 0 to"),
    ],
)
def test_pages_that_are_not_there_are_refused(pages: list[list[int]], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        _sliding().view(pages)


def test_a_page_named_twice_is_not_written() -> None:
    _sliding().view([[-1, -1, 3], [4, 4, 5]])  # to be read it may be, and -1 is no page
    with pytest.raises(LayoutError, match="page group 1: a page is named twice"):
        _sliding().view([[-1, -1, 3], [4, 4, 5]], spill=True)


def test_what_is_outside_is_refused() -> None:
    view = _sliding().view([[-1, 1, 2], [3, 4, 5]], 8)
    with pytest.raises(LayoutError, match="outside of the 8 tokens"):
        view.pieces(0, "k", 4, 12)
    with pytest.raises(LayoutError, match="no memory"):
        view.pieces(1, "page", 0, 8)
    with pytest.raises(LayoutError, match="no layer 9"):
        view.backs(9, 0, 4)
    with pytest.raises(LayoutError, match="no tensor 'q'"):
        view.pieces(0, "q", 0, 4)
    with pytest.raises(LayoutError, match="hold 12 tokens, 13 are meant"):
        _sliding().view([[-1, 1, 2], [3, 4, 5]], 13)
    with pytest.raises(LayoutError, match="no recurrent state"):
        view.state(0, "k")
    assert view.backs(1, 4, 8)
    assert not view.backs(1, 0, 8)
    assert view.backs(0, 0, 8)


def test_what_falls_on_no_page_goes_nowhere() -> None:
    pools = _sliding()
    view = pools.view([[-1, 1, -1, -1], [3, 4, 5, 6]], spill=True)
    (_, spilt), (_, kept) = view.pieces(1, "page", 0, 8)
    assert kept.data_ptr() == pools.tensors[1, "page"][1].data_ptr()
    assert spilt.shape == kept.shape
    low = pools.tensors[1, "page"].data_ptr()
    assert not low <= spilt.data_ptr() < low + pools.tensors[1, "page"].numel()
    with pytest.raises(LayoutError, match="no memory"):
        view.pieces(1, "page", 8, 16)


def _addresses(view: PagesView, sections: tuple[tuple[object, ...], ...], tokens: int) -> bool:
    """Whether the rule of a view says the same as its pieces."""
    found = view.map(sections, tokens)
    if found is None:
        return False
    starts = np.arange(0, view.room() or 0, found.tokens, dtype=np.int64)
    for section, tensor, step in zip(sections, found.tensors, found.steps, strict=True):
        layer, name = section[:2]
        assert isinstance(layer, int)
        assert isinstance(name, str)
        pages, lows = view.locate_in(layer, starts, found.tokens)
        for start, page, low in zip(starts.tolist(), pages, lows, strict=True):
            piece = view.pieces(layer, name, start, start + found.tokens)[0][1]
            at = int(page * step[0] + low * step[2]) * tensor.element_size()
            assert tensor.data_ptr() + at == piece.data_ptr()
            assert piece.stride() == step[1:]
    return True


def test_the_rule_of_each_group_is_its_own() -> None:
    pools = _sliding()
    view = pools.view([[7, 1, 2, 0], [3, 4, 9, 6]])
    sections = [_sections(pools, group, 8) for group in (0, 1)]
    assert all(_addresses(view, mine, 8) for mine in sections)
    # another request of these pools has the same rule, which costs nothing to find
    other = pools.view([[9, 8], [1, 2]])
    assert all(other.map(mine, 8) is view.map(mine, 8) for mine in sections)
    with pytest.raises(LayoutError, match="several page groups"):
        view.locate(np.zeros(1, np.int64), 4)


def test_there_is_no_rule_where_pages_are_missing_inside_a_block() -> None:
    pools = _sliding()
    sections = _sections(pools, 0, 8)
    assert pools.view([[-1, 1, 2, 0], [3, 4, 5, 6]], spill=True).map(sections, 8) is None
    whole = pools.view([[-1, -1, 2, 0], [3, 4, 5, 6]], spill=True)
    assert whole.map(sections, 8) is not None
    with pytest.raises(LayoutError, match="no memory"):
        whole.locate_in(1, np.array([4], np.int64), 4)
    with pytest.raises(LayoutError, match="outside"):
        whole.locate_in(1, np.array([16], np.int64), 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: ((9, *s[0][1:]),),
        lambda s: ((*s[0][:2], "float64", s[0][3]),),
        lambda s: ((*s[0][:3], (2, 8, 8)),),
        lambda s: (*s, (0, "k", "bfloat16", (2, 8, 8))),
    ],
)
def test_there_is_no_rule_for_what_differs(change: Callable[..., object]) -> None:
    pools = _sliding()
    view = pools.view([[7, 1], [3, 4]])
    wrong = change(_sections(pools, 0, 8))
    assert view.map(wrong, 8) is None  # type: ignore[arg-type]
    assert view.map(_sections(pools, 0, 8), 6) is None


def test_the_state_is_the_one_behind_the_last_token() -> None:
    pools = PagePools(groups_of("state"))
    pool = pools.tensors[1, "ssm"]
    view = pools.view([[0, 1, 2, 3], [-1, 5, -1, 7]], 8)
    assert view.state(1, "ssm").data_ptr() == pool[5].data_ptr()
    assert view.holds_states()
    assert view.backs(1, 0, 8)
    assert not view.backs(1, 0, 4)  # a view holds one state
    early = pools.view([[0, 1, 2, 3], [-1, 5, -1, 7]], 12)
    assert not early.holds_states()
    with pytest.raises(LayoutError, match="no page for the state behind token 12"):
        early.state(1, "ssm")
    assert pools.view([[0, 1], [4, 5]]).state(1, "ssm").data_ptr() == pool[5].data_ptr()


def test_raw_bytes_count_what_is_written() -> None:
    pools = _sliding()
    per_page = {0: 2 * 4 * 3 * 8 * 4, 1: 2 * 4 * 8 * 2 * (2 + 1)}
    # a window of 10 before token 32: pages of tokens 20 to 31
    assert pools.raw_bytes(0, 32) == 3 * per_page[0] + 8 * per_page[1]
    assert pools.raw_bytes(28, 32) == per_page[0] + per_page[1]
    assert pools.raw_bytes(32, 32) == 0
