"""What is called wrongly is told so at once, by a typed error that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import Rig, load
from tierkv.errors import ClosedError, ConfigError, LayoutError, SessionBusyError
from tierkv.layout import Layout
from tierkv.session.batches import StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.engine import Engine

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, 64, seed=1)
HOST = [tierkv.Tier("host", "4MiB")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def _engine() -> Engine:
    return tierkv.open(tiers=HOST, space=SPACE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": None}, "name is a text"),
        ({"name": 5}, "name is a text"),
        ({"name": ["a"]}, "name is a text"),
        ({"name": ""}, "not empty"),
        ({"tenant": None}, "tenant is a text"),
        ({"tenant": 5}, "tenant is a text"),
        ({"tenant": "é" * 129}, "at most 256 bytes"),
        ({"salt": "secret"}, "salt is bytes"),
        ({"space": "model"}, "tierkv.Space"),
        ({"ttl": "soon"}, "not a duration"),
        ({"fidelity": "good"}, "'exact' or 'lossy'"),
    ],
)
async def test_a_session_is_named_properly(options: dict[str, Any], says: str) -> None:
    async with _engine() as engine:
        with pytest.raises(ConfigError, match=says):
            engine.session(**{"name": "a", **options})
        assert engine.sessions() == []
        async with engine.session("a", tenant="é" * 128) as session:  # as long as a name may be
            assert (await session.store(IDS, KV.view)).stored == 4


async def test_probes_are_named_properly_too() -> None:
    async with _engine() as engine:
        for call in (
            lambda: engine.explain(IDS, tenant=5),  # type: ignore[arg-type]
            lambda: engine.explain(IDS, space=5),  # type: ignore[arg-type]
            lambda: engine.forget_session(None),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError):
                call()
        with pytest.raises(ConfigError):
            await engine.prefetch(session=5)  # type: ignore[arg-type]
        with pytest.raises(LayoutError):
            await engine.prefetch(tokens=b"abcd")
        for size in (0, "16", 1.5):
            with pytest.raises(LayoutError, match="block_tokens"):
                engine.space(SPACE.identity, SPACE.layout, size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tierkv.open(5), "TOML file"),  # type: ignore[arg-type]
        (lambda: tierkv.open(b"tierkv.toml"), "TOML file"),  # type: ignore[arg-type]
        (lambda: tierkv.open(tiers=HOST, space=5), "tierkv.Space"),  # type: ignore[arg-type]
        (lambda: tierkv.open(tiers=HOST, speed=5), "unknown"),
    ],
)
async def test_open_refuses_at_once(call: Callable[[], Engine], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


async def test_an_engine_that_was_never_entered_says_what_to_write() -> None:
    engine = _engine()
    for call in (
        lambda: engine.session("a"),
        engine.stats,
        engine.sessions,
        lambda: engine.explain(IDS),
        lambda: engine.call_soon_threadsafe(print),
    ):
        with pytest.raises(ClosedError, match="async with"):
            call()
    for method in (engine.flush, engine.reset, lambda: engine.prefetch(tokens=IDS)):
        with pytest.raises(ClosedError, match="async with"):
            await method()
    with pytest.raises(ClosedError, match="CacheManager"), engine:
        pass
    assert engine.metrics_port is None
    async with engine:  # and it may be entered still
        pass
    with pytest.raises(ClosedError, match="closed"):
        engine.session("a")


async def test_metrics_port_is_known_while_it_is_served() -> None:
    async with tierkv.open(tiers=HOST, metrics_port=0) as engine:
        assert engine.metrics_port
    async with _engine() as engine:
        assert engine.metrics_port is None


BAD_IDS = [
    b"x" * 64,
    bytearray(64),
    memoryview(bytes(64)),
    "0123456789abcdef",
    None,
    5,
    {1, 2},
    {1: 2},
    (n for n in IDS),
    [*IDS[:-1], 1.5],
    [*IDS[:-1], "7"],
    [*IDS[:-1], -1],
    np.zeros((1, 64), np.int64),
    np.zeros(64, np.float32),
    np.zeros(64, bool),
    torch.zeros(1, 64, dtype=torch.long),
    torch.zeros(64),
    torch.tensor(5),
]


@pytest.mark.parametrize("ids", BAD_IDS, ids=lambda ids: type(ids).__name__)
async def test_what_is_no_list_of_token_ids_is_refused(ids: Any) -> None:
    async with _engine() as engine, engine.session("a") as session:
        with pytest.raises(LayoutError, match="token ids"):
            await session.store(ids, KV.view)
        with pytest.raises(LayoutError, match="token ids"):
            async with session.match(ids):
                pass
        with pytest.raises(LayoutError, match="token ids"):
            engine.explain(ids)
        assert session.token_ids == []
        await Rig(engine, {}).at_rest()


@pytest.mark.parametrize(
    "make",
    [tuple, np.array, lambda ids: np.array(ids, np.uint16), torch.tensor, lambda ids: ids],
)
async def test_token_ids_may_come_as_any_vector(make: Callable[[list[int]], Any]) -> None:
    async with _engine() as engine, engine.session("a") as session:
        assert (await session.store(make(IDS), KV.view)).stored == 4
        assert session.token_ids == IDS
        tokens, back = await load(session, make(IDS))
        assert tokens == 64
        assert back.same(KV, 64)


NO_VIEWS = [None, 5, "kv", [(torch.zeros(2, 64, 8),) * 2] * 3, {0: {"k": torch.zeros(2, 64, 8)}}]


@pytest.mark.parametrize("kv", NO_VIEWS, ids=lambda kv: type(kv).__name__)
async def test_a_view_is_asked_for(kv: Any) -> None:
    async with _engine() as engine, engine.session("a") as session:
        with pytest.raises(LayoutError, match=r"tierkv\.views\.dense\(kv\)"):
            await session.store(IDS, kv)
        await session.store(IDS, KV.view)
        async with session.match(IDS) as match:
            with pytest.raises(LayoutError, match=r"tierkv\.views\.dense\(kv\)"):
                await match.load(into=kv)
            with pytest.raises(LayoutError, match=r"tierkv\.views\.dense\(kv\)"):
                match.layers(into=kv)
        await Rig(engine, {}).at_rest()


async def test_a_view_that_is_too_short_is_refused_before_anything_happens() -> None:
    short = kit.Memory(SPACE.layout, 63, seed=1)
    async with _engine() as engine, engine.session("a") as session:
        with pytest.raises(LayoutError, match="room for 63 tokens, 64 are needed"):
            await session.store(IDS, short.view)
        assert session.token_ids == []
        assert (await session.store(IDS[:63], short.view)).stored == 3
        with pytest.raises(LayoutError, match="room for 40"):  # the tail counts if it is stored
            await session.store(IDS[:41], kit.Memory(SPACE.layout, 40).view, tail=True)
        await session.store(IDS, KV.view)
        with pytest.raises(LayoutError, match="room for 63"):  # although all is present
            await session.store(IDS, short.view)
        back = kit.Memory(SPACE.layout, 63)
        async with session.match(IDS) as match:
            with pytest.raises(LayoutError, match="room for 63"):
                await match.load(into=back.view)
        assert back.untouched()


async def test_memory_of_another_model_or_shared_memory_is_not_loaded_into() -> None:
    async with _engine() as engine, engine.session("a") as session:
        await session.store(IDS, KV.view)
        async with session.match(IDS) as match:
            more = kit.Memory(Layout.uniform(4, 2, 8, "float32"), 64)
            with pytest.raises(LayoutError, match="no tensor 'k' for layer 3"):
                await match.load(into=more.view)
            one = torch.zeros(2, 64, 8)
            with pytest.raises(LayoutError, match="shares memory"):
                await match.load(into=tierkv.views.dense([(one, one)] * 3))
            pairs = [(torch.zeros(2, 64, 8), torch.zeros(2, 64, 8)) for _ in range(3)]
            pairs[1] = (pairs[1][0], torch.zeros(2, 1, 8).expand(2, 64, 8))
            with pytest.raises(LayoutError, match="layer 1, 'v': an expanded tensor"):
                await match.load(into=tierkv.views.dense(pairs))
        # to store from them is no harm
        twin = tierkv.views.dense([(one, one)] * 3)
        assert (await session.store(kit.tokens(4, seed=2), twin)).stored == 4


@pytest.mark.parametrize("start", [1.5, "3", None, -1, 65])
async def test_start_is_a_token_index(start: Any) -> None:
    async with _engine() as engine, engine.session("a") as session:
        with pytest.raises(LayoutError, match="start must be"):
            await session.store(IDS, KV.view, start=start)
        assert (await session.store(IDS, KV.view, start=np.int64(0))).stored == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("requests", [5, None, "ab", [5], ["ab"], [(1, 2)], [(None, IDS, KV.view)]])
async def test_batches_of_rubbish_are_refused(requests: Any) -> None:
    async with _engine() as engine:
        with pytest.raises(LayoutError):
            await engine.store_many(requests)
        with pytest.raises(LayoutError):
            await engine.load_many(requests)
        with pytest.raises(LayoutError):
            async with engine.match_many(requests):
                pass
        async with engine.session("a") as session:  # plain tuples are fine
            plain: Any = [(session, IDS, KV.view)]
            assert (await engine.store_many(plain))[0].stored == 4
            assert (await engine.store_many([StoreRequest(*plain[0])]))[0].present == 4


async def test_history_can_be_told_without_kv() -> None:
    async with _engine() as engine, engine.session("a") as one, engine.session("a") as two:
        await one.store(IDS, KV.view)
        one.remember([*IDS, 7])
        assert two.token_ids == [*IDS, 7]
        async with one.match(IDS):
            with pytest.raises(SessionBusyError, match="own turn"):
                two.remember([1])
            one.remember(IDS[:5])
        assert two.token_ids == IDS[:5]
        with pytest.raises(LayoutError):
            one.remember(b"ab")
