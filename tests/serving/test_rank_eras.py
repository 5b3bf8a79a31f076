"""Named sessions behind a reset: keyed apart, and still the application's own.

vLLM keys what it computes since a reset of its prefix cache apart, since other weights may be in
place. Whoever named a session clears, destroys and looks at it as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving.rank_rig import RankRig, prompt
from tierkv.blocks import Identity
from tierkv.layout import Layout, Space
from tierkv_adapters.serving.eras import Eras
from tierkv_adapters.serving.orders import RequestFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.session import SessionInfo

pytestmark = pytest.mark.usefixtures("no_thread_leaks")

OLD, NEW = b"", b"era-1"


def _engine_sessions(rig: RankRig) -> list[SessionInfo]:
    async def ask() -> Sequence[SessionInfo]:
        return rig.manager.engine.sessions()

    return list(rig.manager.call(ask))


def _turn(rig: RankRig, name: str, length: int, era: bytes, session: str = "chat") -> None:
    """A request that stores its prompt, and goes on living."""
    facts = RequestFacts(name, session=session, era=era)
    assert rig.save(name, prompt(length), facts)[1].tokens == length


def _end(rig: RankRig, *names: str) -> None:
    rig.rank.begin(rig.step(ended=list(names)))
    assert rig.rank.drain(60)


def test_eras_are_spaces_of_their_own() -> None:
    space = Space(Identity("m", "w"), Layout.uniform(1, 1, 4, "float32"), 8)
    eras = Eras()

    assert eras.within(space, b"") is space
    one, two = eras.within(space, b"1"), eras.within(space, b"2")
    assert len({space.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert eras.within(space, b"2") is two
    assert eras.within(space, b"1") == one
    assert (one.layout, one.block_tokens) == (space.layout, space.block_tokens)


@pytest.mark.parametrize("era", [OLD, NEW])
@pytest.mark.parametrize("made_by", ["application", "request"])
def test_clear_frees_what_a_session_stored_also_since_a_reset(era: bytes, made_by: str) -> None:
    with RankRig() as rig:
        if made_by == "application":
            rig.manager.create_session("chat")
        _turn(rig, "a", 16, OLD)
        _end(rig, "a")
        rig.rank.begin(rig.step(reset=True))
        assert rig.rank.drain(60)
        for number, length in enumerate((16, 32, 48)):  # requests side by side
            _turn(rig, f"r{number}", length, era)
        (info,) = rig.manager.sessions()
        assert (info.id, info.tokens, info.handles) == ("chat", 48, 3)
        assert info.nbytes > 0
        _end(rig, "r0", "r1", "r2")
        rig.manager.clear_session("chat")
        assert [(i.tokens, i.nbytes) for i in _engine_sessions(rig)] == [(0, 0)] * len(
            _engine_sessions(rig)
        )
        (info,) = rig.manager.sessions()
        assert (info.tokens, info.nbytes) == (0, 0)
        _turn(rig, "next", 16, era)
        assert rig.manager.sessions()[0].tokens == 16
        _end(rig, "next")
        rig.manager.destroy_session("chat")
        assert rig.manager.sessions() == []
        assert _engine_sessions(rig) == []


def test_looking_at_a_session_does_not_begin_it_anew() -> None:
    with RankRig() as rig:
        rig.manager.create_session("chat")
        _turn(rig, "a", 16, OLD)
        _end(rig, "a")
        rig.rank.begin(rig.step(reset=True))
        _turn(rig, "b", 32, NEW)
        rig.manager.explain(prompt(32), session="chat")  # in the only space that has a name
        rig.manager.hint(session="chat", next_in="1s")
        _turn(rig, "c", 48, NEW)
        assert rig.manager.sessions()[0].tokens == 48


def test_f006_a_request_of_another_era_finds_nothing() -> None:
    with RankRig() as rig:
        _turn(rig, "a", 48, OLD)
        for name, era, found in (("b", NEW, 0), ("c", OLD, 48)):
            facts = RequestFacts(name, session="chat", era=era)
            assert rig.load(name, prompt(48), facts=facts)[1].tokens == found
        _turn(rig, "d", 48, NEW, session="other")
        facts = RequestFacts("e", era=NEW)
        assert rig.load("e", prompt(48), facts=facts)[1].tokens == 48


@pytest.mark.parametrize("made_by", ["application", "request"])
def test_many_resets_leave_no_sessions_of_eras_that_are_over(made_by: str) -> None:
    with RankRig() as rig:
        if made_by == "application":
            rig.manager.create_session("chat")
        for turn in range(5):
            free = {group: list(pages) for group, pages in rig.free.items()}
            _turn(rig, "a", 16, b"era-%d" % turn)
            _end(rig, "a")
            assert len(_engine_sessions(rig)) == 1
            rig.rank.begin(rig.step(reset=True))
            assert rig.rank.drain(60)
            rig.rank.poll()
            rig.manager.flush()  # behind the reset on the engine's loop
            rig.free = free
        rig.manager.clear_session("chat")  # in no space that is over: that would begin it there
        assert _engine_sessions(rig) == []
        _turn(rig, "last", 16, b"era-5")
        assert [len(kept.handles) for kept in rig.rank._side._named.values()] in ([], [1])
        assert [(i.id, i.tokens) for i in rig.manager.sessions()] == [("chat", 16)]


def test_the_speed_of_prefill_is_learned_in_the_era_of_now() -> None:
    with RankRig() as rig:
        _turn(rig, "a", 16, NEW)
        rig.rank.begin(rig.step(prefill=(1000, 0.5)))
        space = Eras().within(rig.space, NEW)

        async def speed() -> float | None:
            return rig.manager.engine.core.decisions.costs.speed(space.fingerprint)

        assert rig.manager.call(speed) == pytest.approx(2000)
