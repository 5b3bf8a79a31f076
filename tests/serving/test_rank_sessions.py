"""Sessions of a rank's requests, what it learns and counts, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tierkv
from tests.serving.rank_rig import RankRig, prompt
from tierkv.blocking import CacheManager
from tierkv.errors import ClosedError
from tierkv_adapters.serving.orders import RequestFacts, SaveOrder
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.session import SessionInfo

pytestmark = pytest.mark.usefixtures("no_thread_leaks")


def _sessions(manager: CacheManager) -> list[SessionInfo]:
    async def ask() -> Sequence[SessionInfo]:
        return manager.engine.sessions()

    return list(manager.call(ask))


def test_a_request_without_a_session_leaves_none() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(48))
        (info,) = _sessions(rig.manager)
        assert info.id.startswith("serving-a")
        rig.rank.begin(rig.step(ended=["a"]))
        assert rig.rank.drain(60)
        assert _sessions(rig.manager) == []
        assert rig.load("b", prompt(48))[1].tokens == 48  # its blocks stay


def test_a_named_session_stays_and_the_oldest_go() -> None:
    with RankRig(settings=RankSettings(sessions=2)) as rig:
        for number in range(4):
            facts = RequestFacts(f"r{number}", session=f"chat{number}", tenant="acme")
            rig.save(f"r{number}", prompt(16, number), facts)
            rig.rank.begin(rig.step(ended=[f"r{number}"]))
            assert rig.rank.drain(60)
        assert {(i.tenant, i.id) for i in _sessions(rig.manager)} == {
            ("acme", "chat2"),
            ("acme", "chat3"),
        }
        assert [rig.manager.knows_session(f"chat{n}") for n in range(4)] == [
            False,
            False,
            True,
            True,
        ]
        rig.manager.clear_session("chat3")


def test_a_session_that_the_application_made_is_its_own() -> None:
    with RankRig(settings=RankSettings(sessions=1)) as rig:
        rig.manager.create_session("chat", tenant="acme", salt=b"s")
        for number, salt in enumerate((b"s", b"other")):
            facts = RequestFacts(f"r{number}", session="chat", tenant="acme", salt=salt)
            rig.save(f"r{number}", prompt(16), facts)
            rig.rank.begin(rig.step(ended=[f"r{number}"]))
            assert rig.rank.drain(60)
            if number == 0:
                assert [(i.id, i.tokens) for i in rig.manager.sessions()] == [("chat", 16)]
        rig.manager.destroy_session("chat")
        assert rig.manager.sessions() == []


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({"tenant": "a"}, {"tenant": "b"}), ({"salt": b"a"}, {"salt": b"b"}), ({}, {"tenant": "b"})],
)
def test_tenants_and_salts_share_nothing(
    mine: dict[str, object], theirs: dict[str, object]
) -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids, RequestFacts("a", **mine))  # type: ignore[arg-type]
        facts = RequestFacts("b", **theirs)  # type: ignore[arg-type]
        assert rig.load("b", ids, facts=facts)[1].tokens == 0
        facts = RequestFacts("c", **mine)  # type: ignore[arg-type]
        assert rig.load("c", ids, facts=facts)[1].tokens == 48


def test_the_speed_of_prefill_is_learned() -> None:
    with RankRig() as rig:
        rig.rank.begin(rig.step(prefill=(1000, 0.5)))

        async def speed() -> float | None:
            return rig.manager.engine.core.decisions.costs.speed(rig.space.fingerprint)

        assert rig.manager.call(speed) == pytest.approx(2000)
        assert _sessions(rig.manager) == []


def test_lossy_ranks_do_not_pass_on_what_they_do_not_know() -> None:
    """Behind the engine's own cache nobody knows how the KV came about: it is stored as derived."""
    with RankRig(compression="int8") as rig:
        ids = prompt(48)
        pages = rig.take(48)
        rig.rank.begin(
            rig.step(
                fresh=[RequestFacts("a")],
                grown=[rig.grown("a", ids, pages)],
                saves=[SaveOrder("a", 0, 24)],
            )
        )
        rig.pages.compute(ids, pages, 0, 48)
        rig.rank.start_saves()
        rig.until(("a", "save"))
        rig.rank.begin(
            rig.step(
                fresh=[RequestFacts("b")],
                grown=[rig.grown("b", ids, pages)],
                saves=[SaveOrder("b", 24, 48)],
            )
        )
        rig.rank.start_saves()
        assert rig.until(("b", "save"))["b", "save"].tokens == 48
        exact = rig.manager.create_session(fidelity="exact")
        reports = rig.manager.explain(ids, session=exact, space=rig.space)
        assert [r.reason is None or r.reason.value for r in reports[3:]] == ["fidelity"] * 3


@pytest.mark.parametrize("fidelity", ["exact", None])
def test_i4_pages_of_a_rank_that_loaded_lossy_kv_are_not_exact(fidelity: str | None) -> None:
    """The engine's own cache gives one request's pages to another, from the first token on."""
    with RankRig(compression="int8") as rig:
        ids, more = prompt(24), prompt(24, seed=1)
        rig.save("a", ids)
        assert rig.load("b", ids)[1].tokens == 24
        facts = RequestFacts("c", session="chat")
        rig.manager.create_session("chat", fidelity=fidelity)
        rig.save("c", more, facts)
        told: list[bool] = []

        async def look() -> None:
            async with rig.manager.handle("chat", rig.space) as session:
                told.append(bool(session.derived))

        rig.manager.call(look)
        assert told == [True]


# ---------------------------------------------------------------------------- the end


def test_nothing_is_done_once_it_is_closed() -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids)
        assert rig.rank.close()
        assert rig.rank.close()
        _, loaded = rig.load("b", ids)
        assert (loaded.tokens, loaded.reason) == (0, "closed")
        assert _sessions(rig.manager) == []


def test_an_engine_that_was_closed_makes_results_short() -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids)
        rig.manager.close()
        _, loaded = rig.load("b", ids)
        assert (loaded.tokens, loaded.reason) == (0, "closed")
        rig.rank.begin(rig.step(prefill=(1000, 0.5), ended=["a"], saves=[SaveOrder("b", 0, 48)]))
        rig.rank.start_saves()
        assert rig.until(("b", "save"))["b", "save"].reason == "closed"
        assert rig.rank.drain(0)


def test_a_rank_needs_an_open_engine() -> None:
    with RankRig() as rig:
        closed = CacheManager(tiers=[tierkv.Tier("host", "1MiB")])
        with pytest.raises(ClosedError):
            Rank(closed, rig.pages.pools, lambda adapter: rig.space)


def test_a_space_that_cannot_be_made_costs_its_requests_only() -> None:
    with RankRig() as rig:
        ids = prompt(48)
        rig.save("a", ids)

        def refuse(adapter: object) -> tierkv.Space:
            raise ValueError("no such adapter")

        sound, rig.rank._spaces._space = rig.rank._spaces._space, refuse
        assert rig.load("b", ids)[1].reason == "no_space"
        rig.rank._spaces._space = sound
        assert rig.load("c", ids)[1].tokens == 48


def test_counters_are_told_once() -> None:
    with RankRig() as rig:
        rig.save("a", prompt(48))
        first = rig.rank.counters.take()
        assert (first["saves"], first["save_tokens"]) == (1, 48)
        assert not any(rig.rank.counters.take().values())
        assert rig.rank.counters.snapshot()["saves"] == 1
