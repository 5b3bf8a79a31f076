"""Views: the caller's memory, token by token, never anything else."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tierkv import views
from tierkv.abc import View
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layer, Layout, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADS, DIM = 2, 3
LAYOUT = Layout.uniform(2, HEADS, DIM, "float32")


def numbered(tokens: int) -> torch.Tensor:
    """Values that name their head, token and channel."""
    heads = torch.arange(HEADS).view(-1, 1, 1) * 10_000
    return (heads + torch.arange(tokens).view(1, -1, 1) * 10 + torch.arange(DIM)).float()


def join(pieces: Sequence[tuple[int, torch.Tensor]], start: int) -> torch.Tensor:
    """What the pieces hold; they must follow each other from ``start``."""
    at = start
    for first, piece in pieces:
        assert first == at
        at += piece.shape[1]
    return torch.cat([piece for _, piece in pieces], 1)


def paged_view(order: str, page_tokens: int, pages: list[int]) -> views.PagedView:
    tokens = len(pages) * page_tokens
    pools = {}
    for layer in (0, 1):
        pool = torch.full((max(pages) + 2, HEADS, page_tokens, DIM), -1.0)
        for index, page in enumerate(pages):
            pool[page] = numbered(tokens)[:, index * page_tokens : (index + 1) * page_tokens]
        if order == "NHD":
            pool = pool.transpose(1, 2).contiguous()
        pools[layer] = {"k": pool, "v": pool + 0.5}
    return views.paged(pools, pages, page_tokens=page_tokens, order=order)  # type: ignore[arg-type]


def test_dense_pieces_are_the_callers_memory() -> None:
    k, v = numbered(10), numbered(10)
    view = views.dense([(k, v)])
    assert view.tokens == 10
    ((first, piece),) = view.pieces(0, "k", 4, 7)
    assert first == 4
    assert torch.equal(piece, k[:, 4:7])
    piece.fill_(-5)
    assert bool((k[:, 4:7] == -5).all())
    assert torch.equal(v, numbered(10))


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_paged_pieces_follow_the_pages(order: str) -> None:
    view = paged_view(order, 4, [5, 0, 3])
    assert view.tokens == 12
    for start in range(13):
        for stop in range(start, 13):
            pieces = view.pieces(1, "v", start, stop)
            if start == stop:
                assert not pieces
            else:
                assert torch.equal(join(pieces, start), numbered(12)[:, start:stop] + 0.5)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_paged_writes_stay_inside_their_pages(order: str) -> None:
    view = paged_view(order, 4, [2, 0])
    for _, piece in view.pieces(0, "k", 3, 6):
        piece.fill_(7)
    expected = numbered(8)
    expected[:, 3:6] = 7
    assert torch.equal(join(view.pieces(0, "k", 0, 8), 0), expected)
    pool = view._tensors[0]["k"]
    assert bool((pool[[1, 3]] == -1).all()), "a page of somebody else was written"


@hypothesis.given(st.permutations(range(4)), st.integers(1, 5), st.data())
def test_any_pages_any_range(pages: list[int], size: int, data: st.DataObject) -> None:
    total = len(pages) * size
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    for order in ("HND", "NHD"):
        pieces = paged_view(order, size, pages).pieces(0, "k", start, stop)
        assert torch.equal(join(pieces, start), numbered(total)[:, start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (11, 11), (5, 4)])
def test_ranges_outside_are_refused(start: int, stop: int) -> None:
    dense = views.dense([(numbered(10), numbered(10))])
    paged = paged_view("HND", 5, [1, 0])
    for view in (dense, paged):
        with pytest.raises(LayoutError, match=r"outside|backed"):
            view.pieces(0, "k", start, stop)


def test_missing_tensors_are_named() -> None:
    view = views.dense({3: {"latent": numbered(4)}})
    with pytest.raises(LayoutError, match="'k' for layer 3"):
        view.pieces(3, "k", 0, 1)
    with pytest.raises(LayoutError, match="layer 0"):
        view.pieces(0, "latent", 0, 1)
    with pytest.raises(LayoutError, match="state"):
        view.state(3, "latent")


def test_states_are_the_callers_memory() -> None:
    conv = torch.zeros(4)
    view = views.dense({}, states={7: {"conv": conv}})
    view.state(7, "conv").fill_(2)
    assert bool((conv == 2).all())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: views.dense([(numbered(4)[0], numbered(4))]), "heads, tokens, dim"),
        (lambda: views.dense([(numbered(4),)]), "pair"),  # type: ignore[list-item]
        (lambda: views.paged([(numbered(4), numbered(4))], [0]), "pages"),
        (lambda: _pool_view([0, 1, 0]), "twice"),
        (lambda: _pool_view([4]), "0 to 3"),
        (lambda: _pool_view([-1]), "0 to 3"),
        (lambda: _pool_view([0], page_tokens=8), "page_tokens=8"),
        (lambda: _pool_view([0], order="DNH"), "'DNH'"),
        (lambda: views.paged([(torch.zeros(4, 2, 5, 3), torch.zeros(4, 2, 6, 3))], [0]), "agree"),
    ],
)
def test_what_cannot_be_a_view_is_refused(make: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make()


def _pool_view(pages: list[int], **options: Any) -> views.PagedView:
    return views.paged([(torch.zeros(4, 2, 5, 3), torch.zeros(4, 2, 5, 3))], pages, **options)


def test_writing_fills_inference_tensors_and_leaves_no_history() -> None:
    with torch.inference_mode():
        k = torch.zeros(HEADS, 4, DIM)
    v = torch.zeros(HEADS, 4, DIM, requires_grad=True)
    view = views.dense([(k, v)])
    with view.writing():
        for name in ("k", "v"):
            view.pieces(0, name, 0, 4)[0][1].copy_(numbered(4))
    assert torch.equal(k, numbered(4))
    assert torch.equal(v.detach(), numbered(4))
    assert v.grad_fn is None


def test_check_accepts_what_fits() -> None:
    views.check(views.dense([(numbered(4), numbered(9))] * 2), LAYOUT)
    views.check(paged_view("HND", 4, [1, 0]), LAYOUT)
    views.check(paged_view("NHD", 4, [1, 0]), LAYOUT)
    state = Layer(2, (TensorSpec("conv", "float16", (4, 5)),))
    hybrid = Layout((*LAYOUT.groups, Group(GroupKind.STATE, (state,))))
    pairs = {i: {"k": numbered(4), "v": numbered(4)} for i in (0, 1)}
    conv = torch.zeros(4, 5, dtype=torch.float16)
    views.check(views.dense(pairs, states={2: {"conv": conv}}), hybrid)
    with pytest.raises(LayoutError, match="layer 2"):
        views.check(views.dense(pairs), hybrid)
    with pytest.raises(LayoutError, match="layer 2"):
        views.check(views.dense(pairs, states={2: {"conv": conv.T}}), hybrid)


@pytest.mark.parametrize(
    "wrong",
    [
        numbered(4).half(),
        numbered(4)[:1],
        numbered(4)[..., :2],
        numbered(4).transpose(0, 2),
    ],
)
def test_check_names_what_does_not_fit(wrong: torch.Tensor) -> None:
    right = numbered(4)
    with pytest.raises(LayoutError, match="layer 1, 'v'"):
        views.check(views.dense([(right, right), (right, wrong)]), LAYOUT)


def test_check_tells_apart_the_page_orders() -> None:
    pool = torch.zeros(3, HEADS, 16, DIM)
    views.check(views.paged([(pool, pool)] * 2, [0], order="HND"), LAYOUT)
    with pytest.raises(LayoutError):
        views.check(views.paged([(pool, pool)] * 2, [0], order="NHD"), LAYOUT)


class _Foreign(View):
    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        if layer > 1:
            raise LayoutError(f"no layer {layer}")
        return [(start, numbered(9)[:, start:stop])]


def test_check_asks_foreign_views() -> None:
    views.check(_Foreign(), LAYOUT)
    with pytest.raises(LayoutError, match="no layer 2"):
        views.check(_Foreign(), Layout.uniform(3, HEADS, DIM, "float32"))
    with pytest.raises(LayoutError, match="bfloat16"):
        views.check(_Foreign(), Layout.uniform(2, HEADS, DIM, "bfloat16"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: views.dense([]), "at least one tensor"),
        (lambda: views.dense(None), "not NoneType"),  # type: ignore[arg-type]
        (lambda: views.dense("kv"), "not str"),  # type: ignore[arg-type]
        (lambda: views.dense([5]), "pair"),  # type: ignore[list-item]
        (lambda: views.dense([numbered(4)]), "pair"),  # type: ignore[list-item]
        (lambda: views.dense({"0": {"k": numbered(4)}}), "layer number"),  # type: ignore[dict-item]
        (lambda: views.dense({0: numbered(4)}), "layer number"),  # type: ignore[dict-item]
        (lambda: views.dense([(numbered(4), None)]), "'v': need a torch tensor"),  # type: ignore[list-item]
        (lambda: views.dense([(numbered(4).numpy(),) * 2]), "torch.from_numpy"),  # type: ignore[list-item]
        (lambda: views.dense([(numbered(4), torch.zeros(2, 4, 3, device="meta"))]), "meta device"),
        (lambda: views.dense([(numbered(4), numbered(4).to_sparse())]), "torch.sparse_coo"),
        (lambda: views.paged([(torch.zeros(4, 2, 5, 3, device="meta"),) * 2], [0]), "meta device"),
        (lambda: views.dense({}, states={0: {"s": None}}), "need a torch tensor"),  # type: ignore[dict-item]
    ],
)
def test_what_holds_no_plain_memory_is_refused(make: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make()


def test_check_refuses_tensors_that_the_layout_does_not_have() -> None:
    pair = (numbered(4), numbered(4))
    with pytest.raises(LayoutError, match="no tensor 'k' for layer 2"):
        views.check(views.dense([pair] * 3), LAYOUT)
    named = {i: {"k": pair[0], "v": pair[1]} for i in (0, 1)}
    with pytest.raises(LayoutError, match="no tensor 'q' for layer 1"):
        views.check(views.dense({**named, 1: {**named[1], "q": pair[0]}}), LAYOUT)
    with pytest.raises(LayoutError, match="no tensor 'ssm' for layer 7"):
        views.check(views.dense(named, states={7: {"ssm": torch.zeros(3)}}), LAYOUT)


def test_check_knows_how_much_room_there_is() -> None:
    view = views.dense([(numbered(9), numbered(4)), (numbered(9), numbered(9))])
    assert view.room() == 4
    views.check(view, LAYOUT, 4)
    with pytest.raises(LayoutError, match="room for 4 tokens, 5 are needed"):
        views.check(view, LAYOUT, 5)
    paged = paged_view("NHD", 4, [1, 0])
    views.check(paged, LAYOUT, 8)
    with pytest.raises(LayoutError, match="room for 8"):
        views.check(paged, LAYOUT, 9)
    views.check(_Foreign(), LAYOUT, 1000)  # it cannot tell: found out when it is read
    states = views.dense({}, states={2: {"conv": torch.zeros(4, 5)}})
    assert states.room() is None


def _fused(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.zeros(HEADS, tokens, 2 * DIM)
    return whole[..., :DIM], whole[..., DIM:]


def test_check_accepts_memory_that_is_interleaved_but_not_shared() -> None:
    apart = torch.zeros(2, 2, 6, HEADS, 4, DIM)  # layer, K or V, page, ...
    beside = torch.zeros(6, 2, 2, HEADS, 4, DIM)  # page, layer, K or V, ...
    by_token = torch.zeros(4, 2, 2, HEADS, DIM).permute(1, 2, 3, 0, 4)
    for view in (
        views.paged([(apart[i, 0], apart[i, 1]) for i in (0, 1)], [3, 0]),
        views.paged([(beside[:, i, 0], beside[:, i, 1]) for i in (0, 1)], [3, 0]),
        views.dense([_fused(4), _fused(4)]),
        views.dense([(by_token[i, 0], by_token[i, 1]) for i in (0, 1)]),
    ):
        views.check(view, LAYOUT, 4, writing=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda one: [(one, one), _fused(8)], "layer 0, 'v': shares memory"),
        (lambda one: [_fused(8), (one, one[:, 2:])], "layer 1, 'v': shares memory"),
        (lambda one: [(one, numbered(8))] * 2, "layer 1, .*: shares memory with layer 0"),
        (lambda one: [_fused(8), (one, torch.zeros(2, 1, 3).expand(-1, 8, -1))], "expanded"),
        (lambda one: [_fused(8), (one, torch.zeros(99).as_strided((2, 8, 3), (12, 3, 1)))], "over"),
    ],
)
def test_check_refuses_to_write_what_is_shared(make: Any, says: str) -> None:
    view = views.dense(make(numbered(8)))
    views.check(view, LAYOUT)
    with pytest.raises(LayoutError, match=says):
        views.check(view, LAYOUT, writing=True)


def test_check_refuses_tensors_whose_memory_is_gone() -> None:
    """Their addresses would be those of nothing, or of somebody else's memory."""
    for left in (0, 8):
        tensors = [numbered(8).clone() for _ in range(4)]
        view = views.dense([(tensors[0], tensors[1]), (tensors[2], tensors[3])])
        views.check(view, LAYOUT)
        tensors[3].untyped_storage().resize_(left)
        with pytest.raises(LayoutError, match="layer 1, 'v': its storage was resized"):
            views.check(view, LAYOUT)


def test_tensors_that_were_swapped_for_shorter_ones_have_no_more_room_than_these() -> None:
    """What a view had room for when it was made is no bound for what its tensors are now."""
    layout = Layout.uniform(1, 2, 4, "float32")
    k, v = torch.zeros(2, 32, 4), torch.zeros(2, 32, 4)
    view = views.dense([(k, v)])
    views.check(view, layout, 32, writing=True)
    k.data = torch.zeros(1000)[:64].view(2, 8, 4)
    for _ in range(2):
        with pytest.raises(LayoutError, match="room for 8 tokens, 32 are needed"):
            views.check(view, layout, 32, writing=True)
    views.check(view, layout, 8, writing=True)
    with pytest.raises(LayoutError, match="room for 8"):
        view.locate(np.array([0, 16]), 16)
    k.data = torch.zeros(8, 4)
    with pytest.raises(LayoutError, match="need"):
        views.check(view, layout, 8)


@pytest.mark.parametrize(
    ("shape", "says"), [((2, 2, 8, 4), "pages from 0 to 1"), ((4, 2, 4, 4), "agree on the tokens")]
)
def test_pools_that_were_swapped_for_smaller_ones_are_refused(
    shape: tuple[int, ...], says: str
) -> None:
    layout = Layout.uniform(1, 2, 4, "float32")
    pools = [torch.zeros(4, 2, 8, 4) for _ in "kv"]
    view = views.paged([(pools[0], pools[1])], [0, 3])
    views.check(view, layout, 16, writing=True)
    kept, pools[0].data = pools[0].data, torch.zeros(shape)
    for _ in range(2):  # it is found out each time, not once
        with pytest.raises(LayoutError, match=says):
            views.check(view, layout, 16, writing=True)
    pools[0].data = kept
    views.check(view, layout, 16, writing=True)


def test_check_refuses_tensors_on_several_devices() -> None:
    elsewhere = torch.zeros(2, 4, 3, device="meta")  # no other device is here
    view = views.DenseView({0: {"k": numbered(4), "v": numbered(4)}, 1: {"k": elsewhere}})
    with pytest.raises(LayoutError, match="layer 1, 'k': it is on meta, others of the view on cpu"):
        views.check(view, LAYOUT)


def test_owned_views_are_asked_for() -> None:
    pool = torch.zeros(6, HEADS, 4, DIM)
    assert not views.dense([_fused(4)]).owned_by_engine
    assert not views.paged([(pool, pool)], [0]).owned_by_engine
    assert views.dense([_fused(4)], owned=True).owned_by_engine
    assert views.paged([(pool, pool)], [0], owned=True).owned_by_engine


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2", "bool", "int64"])
def test_over_copies_nothing(dtype: str, read_only: bool) -> None:
    memory = bytearray(range(48)) * 2
    if dtype == "bool":
        memory = bytearray(b"\0\1" * 48)
    view = memoryview(memory)[8:]
    tensor = views.over(view.toreadonly() if read_only else view, dtype, (2, 4))
    size = tensor.numel() * tensor.element_size()
    raw = tensor.clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert raw == memory[8 : 8 + size]
    memory[8] ^= 1
    changed = tensor.clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert changed == memory[8 : 8 + size], "it was a copy"


def test_over_nothing() -> None:
    assert views.over(memoryview(b""), "float32", (2, 0, 3)).shape == (2, 0, 3)


def test_the_module_itself_needs_no_torch() -> None:
    code = "import sys, tierkv.views; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
