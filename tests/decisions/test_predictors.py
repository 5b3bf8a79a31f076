"""What each predictor bets on."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.abc import Arrival, Departure, Predictor
from tierkv.decisions.predict import make_predictors
from tierkv.decisions.predict.chain import MostRecentChild
from tierkv.decisions.predict.children import Children
from tierkv.decisions.predict.gaps import Gaps
from tierkv.decisions.predict.oracle import Oracle
from tierkv.decisions.predict.recent import Recent
from tierkv.decisions.predict.return_time import ReturnTime
from tierkv.decisions.predict.sequential import ReadAhead
from tierkv.errors import ConfigError
from tierkv.registry import names, resolve
from tierkv.testing.predictors import chain

BOOK = chain("book", 200)


# --------------------------------------------------------------------------- most recent child


def test_the_chain_goes_on_as_it_did_last_time() -> None:
    predictor = MostRecentChild(blocks=20)
    predictor.ended(Departure(1, BOOK[:40]), 0.0)
    (wish,) = predictor.arrived(Arrival(2, BOOK[:3]), 1.0)
    assert wish.keys == BOOK[:23]
    assert predictor.arrived(Arrival(2, BOOK[:40]), 2.0) == [], "nothing follows"


def test_where_users_take_turns_nothing_is_guessed() -> None:
    """Block 0 of a chat is shared by all; from block 1 on the way is clear."""
    predictor = MostRecentChild()
    system = BOOK[:1]
    for number in range(6):
        predictor.arrived(Arrival(number, chain(f"user-{number % 2}", 5, system)), float(number))
        predictor.ended(Departure(number, chain(f"user-{number % 2}", 6, system)), float(number))
    assert predictor.arrived(Arrival(9, system), 10.0) == []
    mine = chain("user-0", 6, system)
    (wish,) = predictor.arrived(Arrival(9, mine[:2]), 11.0)
    assert wish.keys == mine


def test_who_comes_back_to_another_way_is_believed_once_it_is_confirmed() -> None:
    children, old, new = Children(64), chain("old", 4, BOOK[:2]), chain("new", 4, BOOK[:2])
    children.learn(old)
    assert children.follow(BOOK[1], 9) == list(old[2:])
    children.learn(new)
    children.learn(new, confirm=False)  # the same turn, told of twice
    assert children.follow(BOOK[1], 9) == []
    children.learn(new)
    assert children.follow(BOOK[1], 9) == list(new[2:])


def test_a_ring_ends() -> None:
    children = Children(64)
    a, b = BOOK[:2]
    children.learn([a, b, a])
    assert children.follow(a, 100) == [b]


# --------------------------------------------------------------------------- read-ahead


def test_read_ahead_grows_while_it_is_read_in_order() -> None:
    predictor = ReadAhead(first=8, most=32)
    predictor.ended(Departure(1, BOOK), 0.0)
    ahead = []
    for blocks in range(4, 100, 4):
        wishes = predictor.arrived(Arrival(2, BOOK[:blocks]), float(blocks))
        ahead += [(blocks, len(wish.keys) - blocks) for wish in wishes]
        assert all(wish.keys == BOOK[: len(wish.keys)] for wish in wishes)
    assert ahead[:3] == [(8, 8), (12, 16), (20, 32)]
    assert max(more for _, more in ahead) == 32
    ends = [blocks + more for blocks, more in ahead]
    assert ends == sorted(set(ends)), "each window goes beyond the last"
    # from the second request on, what is read next was always wished for
    assert all(any(b < at <= b + more for b, more in ahead) for at in range(12, 100, 4))


def test_a_step_larger_than_the_first_window_is_covered() -> None:
    predictor = ReadAhead(first=4)
    predictor.ended(Departure(1, BOOK), 0.0)
    predictor.arrived(Arrival(2, BOOK[:30]), 1.0)
    (wish,) = predictor.arrived(Arrival(2, BOOK[:60]), 2.0)
    assert wish.keys == BOOK[:90]


def test_who_jumps_or_goes_back_is_not_read_ahead_for() -> None:
    predictor = ReadAhead()
    other = chain("other", 50)
    predictor.ended(Departure(1, BOOK), 0.0)
    predictor.ended(Departure(1, other), 0.0)
    told = [BOOK[:40], BOOK[:20], other[:30], BOOK[:60], other[:10], other[:10]]
    for number, keys in enumerate(told):
        assert predictor.arrived(Arrival(2, keys), float(number)) == []
    assert predictor.arrived(Arrival(2, other[:12]), 9.0), "in order again"
    assert predictor.arrived(Arrival(0, BOOK[:4]), 9.0) == []
    assert predictor.arrived(Arrival(0, BOOK[:8]), 9.0) == [], "of no session"


# --------------------------------------------------------------------------- return times


def _come_and_go(predictor: ReturnTime, reason: str, gaps: list[float], start: float) -> float:
    """One session that stays away for these gaps; when it went away last."""
    now = start
    for gap in gaps:
        predictor.ended(Departure(7, BOOK[:5], reason), now)
        now += gap
        predictor.arrived(Arrival(7, BOOK[:5]), now)
    return now


def test_it_wishes_shortly_before_the_likely_return() -> None:
    predictor = ReturnTime(hold=10.0, sessions=8)
    now = _come_and_go(predictor, "tool_use", [100.0 + n % 5 for n in range(60)], 0.0)
    predictor.ended(Departure(7, BOOK[:5], "tool_use"), now)
    when = predictor.next_due()
    assert when is not None
    assert now + 60 < when < now + 105
    assert predictor.due(when - 0.001) == []
    (wish,) = predictor.due(when)
    assert wish.keys == BOOK[:5]
    assert wish.deadline is not None
    assert now + 100 < wish.deadline < now + 150
    wishes = [
        wish for later in range(int(when) + 1, int(now) + 9000) for wish in predictor.due(later)
    ]
    assert len(wishes) <= 2, "once it is late, it is not expected any more"
    assert predictor.next_due() is None


def test_who_may_come_at_any_time_is_wished_for_again_and_again() -> None:
    predictor = ReturnTime()
    gaps = [5.0 * 1.5 ** (n % 9) for n in range(90)]
    now = _come_and_go(predictor, "tool_use", gaps, 0.0)
    predictor.ended(Departure(7, BOOK[:5], "tool_use"), now)
    times = []
    while (when := predictor.next_due()) is not None:
        times.append(when - now)
        assert len(predictor.due(when)) == 1
    assert len(times) > 5
    assert times[-1] < 160
    assert times == sorted(set(times))


def test_classes_are_learned_apart_and_the_hopeless_one_is_left_alone() -> None:
    predictor = ReturnTime(hold=30.0)
    now = 0.0
    for n in range(80):
        now = _come_and_go(predictor, "tool_use", [15.0 + n % 3], now + 1)
        now = _come_and_go(predictor, "end_turn", [40.0 * 2.0 ** (n % 12)], now + 1)
    predictor.ended(Departure(7, BOOK[:5], "end_turn"), now)
    assert predictor.next_due() is None
    predictor.ended(Departure(7, BOOK[:5], "tool_use"), now)  # a later word on the same turn
    assert predictor.next_due() is not None
    blind = ReturnTime(chance=0.0, hold=30.0)
    now = _come_and_go(blind, "end_turn", [40.0 * 2.0 ** (n % 12) for n in range(80)], 0.0)
    blind.ended(Departure(7, BOOK[:5], "end_turn"), now)
    assert blind.next_due() is not None


def test_what_a_caller_says_is_taken_as_it_is() -> None:
    predictor = ReturnTime(hold=60.0, lead=2.0)
    predictor.ended(Departure(7, BOOK[:5], None, 30.0), 100.0)
    assert predictor.next_due() == 128.0
    (wish,) = predictor.due(128.0)
    assert wish.deadline == 190.0
    assert predictor.due(129.0) == []
    assert predictor.next_due() is None


def test_reasons_are_bounded_too() -> None:
    predictor = ReturnTime()
    for number in range(1000):
        predictor.ended(Departure(7, BOOK[:2], f"reason-{number}"), float(number))
        predictor.arrived(Arrival(7, BOOK[:2]), number + 0.5)
    assert len(predictor._gaps) <= 65


@given(
    gaps=st.lists(st.floats(0.1, 1e4), min_size=40, max_size=80),
    away=st.floats(0.1, 1e4),
    width=st.floats(1, 1000),
)
def test_the_chance_is_that_of_those_still_away(
    gaps: list[float], away: float, width: float
) -> None:
    book = Gaps()
    for gap in gaps:
        book.left()
        book.came(gap)
    chance = book.chance(away, width)
    assert chance is not None
    assert 0 <= chance <= 1
    wide = 2**0.25 + 1e-9  # buckets are a quarter of an octave
    sure = sum(away * wide <= gap <= (away + width) / wide for gap in gaps)
    perhaps = sum(away / wide <= gap <= (away + width) * wide for gap in gaps)
    still = sum(gap >= away / wide for gap in gaps)
    assert chance <= perhaps / max(sum(gap >= away * wide for gap in gaps), 1) + 1e-9
    assert chance >= sure / max(still, 1) - 1e-9


def test_little_is_known_of_a_new_class() -> None:
    book = Gaps()
    for _ in range(31):
        book.left()
        book.came(1.0)
    assert book.chance(0.5, 10.0) is None


def test_those_who_never_come_back_lower_the_chance() -> None:
    book = Gaps()
    for number in range(400):
        book.left()
        if number % 4 == 0:
            book.came(20.0)
    assert book.chance(4.0, 60.0) == pytest.approx(0.25)
    for _ in range(10_000):
        book.left()
    chance = book.chance(4.0, 60.0)
    assert chance is not None
    assert chance < 0.1


# --------------------------------------------------------------------------- oracle, names, memory


def test_the_oracle_is_offline_only() -> None:
    find = partial(resolve, "predictors")
    with pytest.raises(ConfigError, match="future"):
        make_predictors("arrival,oracle", find)
    (oracle,) = make_predictors("oracle:lead=1", find, [(50.0, 7)])
    oracle.ended(Departure(7, BOOK[:3]), 10.0)
    assert oracle.next_due() == 49.0
    assert [wish.keys for wish in oracle.due(49.0)] == [BOOK[:3]]
    oracle.ended(Departure(7, BOOK[:3]), 60.0)
    assert oracle.next_due() is None


def test_names_and_options() -> None:
    find = partial(resolve, "predictors")
    assert names("predictors") == ["arrival", "chain", "oracle", "return_time", "sequential"]
    made = make_predictors(" arrival, return_time:chance=0.5:hold=30 ,chain", find)
    assert [predictor.name for predictor in made] == ["arrival", "return_time", "chain"]
    assert make_predictors("", find) == make_predictors("  ", find) == []
    for text, said in (
        ("arival", "did you mean 'arrival'"),
        ("chain:deep=3", "no option 'deep'; it has blocks=256, memory=131072"),
        ("arrival:deep=3", "it has none"),
        ("chain:blocks=0", "a whole number above 0"),
        ("chain:blocks=0.5", "a whole number above 0"),
        ("chain:blocks=-1", "of 0 or more"),
        ("return_time:hold=inf", "of 0 or more"),
        ("return_time:chance=2", "a probability from 0 to 1, not 2"),
        ("chain:blocks", "key=number"),
        ("chain:blocks=many", "key=number"),
        ("arrival,,chain", "unknown"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_predictors(text, find)
    assert all(issubclass(resolve("predictors", name), Predictor) for name in names("predictors"))
    with pytest.raises(ConfigError, match="future"):
        Oracle()


@given(keys=st.lists(st.integers(0, 30), max_size=200), limit=st.integers(2, 20))
def test_recent_keeps_what_was_used_lately(keys: list[int], limit: int) -> None:
    recent: Recent[int, int] = Recent(limit)
    lately: list[int] = []
    for number, key in enumerate(keys):
        if number % 3 == 0:
            recent.drop(key)
            lately = [k for k in lately if k != key]
            assert recent.peek(key) is None
            continue
        if recent.get(key) is None:
            assert key not in lately[-(limit // 2) :]
            recent.set(key, key)
        assert recent.peek(key) == key
        lately = [k for k in lately if k != key] + [key]
        assert len(recent) <= limit
        assert len(list(recent)) == len(recent)
