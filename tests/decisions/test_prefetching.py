"""What is granted, what it comes to, and who is believed: the object that replays drive, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.abc import Arrival, Departure, Predictor, Wish
from tierkv.blocks import BlockKey, PartId, part_id
from tierkv.decisions.lines import LineLog
from tierkv.decisions.predict.arrival import AtArrival
from tierkv.decisions.predict.budget import Budget
from tierkv.decisions.predict.chain import MostRecentChild
from tierkv.decisions.predict.return_time import ReturnTime
from tierkv.decisions.predict.sequential import ReadAhead
from tierkv.decisions.predict.trust import Trust
from tierkv.decisions.prefetch_log import replay_prefetching
from tierkv.decisions.prefetching import ASKED, Plan, Prefetching
from tierkv.errors import ConfigError
from tierkv.testing.predictors import chain, story

if TYPE_CHECKING:
    from tierkv.decisions.predict import PrefetchFigures


class Eager(Predictor):
    """Wishes for whatever comes in, as a guess."""

    name: ClassVar[str] = "eager"

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        return [Wish(event.keys)]

    def ended(self, event: Departure, now: float) -> list[Wish]:
        return []


class Broken(Eager):
    name: ClassVar[str] = "broken"

    def ended(self, event: Departure, now: float) -> list[Wish]:
        raise KeyError("oops")

    def next_due(self) -> float | None:
        return 7.0


def parts_of(keys: tuple[BlockKey, ...], nbytes: int = 10) -> list[tuple[PartId, int, int]]:
    return [(part_id(key, 0), 1, nbytes) for key in keys]


def fetch(books: Prefetching, name: str, now: float, blocks: int = 16) -> list[PartId]:
    """One wish of the only predictor, granted and landed."""
    (plan,) = books.arrived(Arrival(1, chain(name, blocks)), now)
    parts = parts_of(plan.keys)
    numbers = books.grant(plan, parts, now)
    landed = [parts[n][0] for n in numbers]
    books.landed(landed, now)
    books.finish(plan, now)
    return landed


def row(books: Prefetching, name: str = "eager", now: float = 0.0) -> PrefetchFigures:
    return next(f for f in books.figures(now) if f.name == name)


def test_each_part_comes_to_one_end() -> None:
    books = Prefetching([Eager()])
    (plan,) = books.arrived(Arrival(1, chain("a", 6)), 0.0)
    parts = parts_of(plan.keys)
    assert books.grant(plan, parts, 0.0) == [0, 1, 2, 3, 4, 5]
    names = [part for part, _, _ in parts]
    books.landed(names[:3], 1.0)
    books.refused([names[3]], 1.0)
    books.demand([(names[0], 0), (names[4], 1)], 2.0)  # found above; still on its way
    books.dropped(names[1], 1, 2.0)  # out of the tier that it came from: still above
    books.dropped(names[1], 0, 2.0)
    books.landed([names[4]], 3.0)  # late: it is not counted again
    books.demand([(names[0], 0)], 3.0)
    books.finish(plan, 4.0)
    got = row(books)
    assert (got.issued, got.used, got.late, got.wasted, got.refused, got.out) == (6, 1, 1, 1, 2, 1)
    assert got.nbytes == 60
    assert got.precision == pytest.approx(2 / 3)
    assert got.timely == 0.5
    books.due(299.0)
    assert row(books).out == 1
    books.due(300.0)  # nobody came for the last one
    assert (row(books).wasted, row(books).out) == (2, 0)


def test_f046_what_does_not_come_gives_its_budget_back() -> None:
    books = Prefetching([Eager()], budget=1000.0, minimum=10**6)
    for number in range(10_000):
        (plan,) = books.arrived(Arrival(1, chain(f"f046-{number % 50}", 8)), 0.0)
        granted = books.grant(plan, parts_of(plan.keys, 100), 0.0)
        assert len(granted) == 8, f"the budget is gone after {number} aborted prefetches"
        books.finish(plan, 0.0)  # cancelled before anything arrived
    got = row(books)
    assert (got.issued, got.refused, got.out) == (80_000, 80_000, 0)
    assert not books.any_out


def test_p6_the_budget_cuts_the_tail_and_comes_back() -> None:
    books = Prefetching([Eager()], budget=100.0)
    (plan,) = books.arrived(Arrival(1, chain("a", 8)), 0.0)
    assert books.grant(plan, parts_of(plan.keys, 40), 0.0) == [0, 1, 2]  # into debt by one part
    (again,) = books.arrived(Arrival(2, chain("b", 8)), 0.1)
    assert books.grant(again, parts_of(again.keys, 40), 0.1) == []
    assert books.grant(again, parts_of(again.keys, 40), 1.0) == [0, 1]
    # who asks himself is heeded, and predictions pay for it
    mine = books.asked(chain("c", 50), 1.0)
    assert len(books.grant(mine, parts_of(mine.keys, 40), 1.0)) == 50
    (later,) = books.arrived(Arrival(3, chain("d", 8)), 1.5)
    assert books.grant(later, parts_of(later.keys, 40), 1.5) == []
    assert books.grant(later, parts_of(later.keys, 40), 3.01) != [], "a debt is a second's worth"


def test_what_a_request_needs_that_is_there_is_charged_and_never_refused() -> None:
    books = Prefetching([AtArrival(), Eager()], budget=100.0)
    needed, guessed = books.arrived(Arrival(1, chain("a", 8)), 0.0)
    parts = parts_of(needed.keys, 40)
    assert len(books.grant(needed, parts[:5], 0.0)) == 5
    assert books.grant(guessed, parts, 0.0) == []


@given(
    spends=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=60),
    fails=st.booleans(),
)
def test_p6_over_any_time_no_more_than_the_rate_is_spent(
    spends: list[tuple[float, int]], fails: bool
) -> None:
    budget, now, total = Budget(100.0), 0.0, 0
    for pause, nbytes in spends:
        now += pause
        before = budget.left(now)
        if not budget.spend(nbytes, now):
            assert before <= 0
        elif fails:
            budget.give_back(nbytes, now)
            assert budget.left(now) == pytest.approx(before)
        else:
            total += nbytes
            assert total < 100.0 * (now + 1.0) + 400, "at most one part ahead of the rate"
    assert budget.left(now + 5.001) == 100.0


@given(
    calls=st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 400), st.sampled_from("cg")), max_size=60
    )
)
def test_f046_what_callers_ask_for_is_a_debt_of_a_second_at_most(
    calls: list[tuple[float, int, str]],
) -> None:
    budget, now = Budget(100.0), 0.0
    for pause, nbytes, what in calls:
        now += pause
        if what == "c":
            budget.charge(nbytes, now)
        else:
            budget.give_back(nbytes, now)
        assert -100.0 <= budget.left(now) <= 100.0
    later = now + 2.001  # sums of floats
    assert budget.left(later) == 100.0
    assert budget.spend(1000, later)
    budget.charge(50, later)
    assert budget.left(later) == -900.0, "and pays no other debt"


def test_a_predictor_that_is_wrong_is_off_and_is_tried_again() -> None:
    books = Prefetching([Eager()], floor=0.5, minimum=32, pause=10.0)
    now = 0.0
    for number in range(8):
        for part in fetch(books, f"wrong-{number}", now, 4):
            books.dropped(part, 0, now)
    assert not row(books).enabled
    assert row(books).times_off == 1
    assert books.arrived(Arrival(1, chain("more", 4)), 9.9) == []
    assert row(books, now=10.0).enabled
    for number in range(8):  # no better: off for twice as long
        for part in fetch(books, f"worse-{number}", 10.0, 4):
            books.dropped(part, 0, 10.0)
    assert row(books).times_off == 2
    assert books.arrived(Arrival(1, chain("more", 4)), 29.9) == []
    for number in range(40):  # better: on for good
        for part in fetch(books, f"right-{number}", 30.0, 4):
            books.demand([(part, 0)], 30.0)
    got = row(books, now=30.0)
    assert got.enabled
    assert got.times_off == 2
    for number in range(60):  # what was good once does not excuse everything
        if not row(books, now=30.0).enabled:
            break
        for part in fetch(books, f"bad-{number}", 30.0, 4):
            books.dropped(part, 0, 30.0)
    assert not row(books, now=30.0).enabled
    assert books.arrived(Arrival(1, chain("more", 4)), 39.9) == []
    assert row(books, now=40.0).enabled, "the first pause again, after it was good"


def test_one_long_guess_is_no_verdict() -> None:
    books = Prefetching([Eager()], floor=0.5, minimum=32)
    for part in fetch(books, "long", 0.0, 300):
        books.dropped(part, 0, 0.0)
    assert row(books).enabled


def test_two_long_guesses_that_end_side_by_side_are_two() -> None:
    trust = Trust(0.5, 32, 1.0)
    for number in range(100):
        trust.note(1 + number % 2, right=False, now=0.0)
    assert not trust.proven
    for plan in range(3, 9):
        trust.note(plan, right=False, now=0.0)
    assert not trust.on(0.0)


def test_what_it_costs_to_find_out_is_bounded() -> None:
    books = Prefetching([Eager()], minimum=32)
    issued = 0
    for number in range(200):
        for plan in books.arrived(Arrival(1, chain(f"n-{number}", 16)), 0.0):
            issued += len(books.grant(plan, parts_of(plan.keys), 0.0))
            books.landed([part for part, _, _ in parts_of(plan.keys)], 0.0)
            books.finish(plan, 0.0)
    assert issued == 4 * 32, "nothing was asked for yet, and nothing has come to an end"


def test_a_floor_of_zero_believes_everything() -> None:
    trust = Trust(0.0, 8, 1.0)
    for number in range(1000):
        trust.note(number, right=False, now=0.0)
    assert trust.on(0.0)


def test_an_asked_prefix_counts_as_arrival_and_is_never_off() -> None:
    books = Prefetching()
    for number in range(100):
        plan = books.asked(chain(f"p-{number}", 4), 0.0)
        assert plan.asked
        parts = parts_of(plan.keys)
        assert books.grant(plan, parts, 0.0) == [0, 1, 2, 3]
        for part, _, _ in parts:
            books.dropped(part, 0, 0.0)
        books.finish(plan, 0.0)
    assert row(books, ASKED).wasted == 400
    assert not books.asked(chain("x", 1), 0.0, guess=True).asked


def test_a_part_belongs_to_who_wanted_it_first() -> None:
    class Other(Eager):
        name: ClassVar[str] = "other"

    books = Prefetching([Eager(), Other()])
    first, second = books.arrived(Arrival(1, chain("a", 4)), 0.0)
    assert books.grant(first, parts_of(first.keys)[:2], 0.0) == [0, 1]
    assert books.grant(second, parts_of(second.keys), 0.0) == [2, 3]
    books.finish(first, 0.0)
    assert row(books).refused == 2
    assert row(books, "other").out == 2


def test_a_broken_predictor_fails_nobody() -> None:
    books = Prefetching([Broken(), Eager()])
    books.ended(Departure(1, chain("a", 1)), 0.0)
    plans = books.arrived(Arrival(1, chain("a", 4)), 1.0)
    assert [plan.predictor for plan in plans] == ["eager"]
    assert row(books, "broken").broken == "KeyError: 'oops'"
    assert books.next_due() is None, "what it still plans is nobody's business"
    assert not row(books, "broken").enabled


def test_a_finished_or_overdue_plan_is_granted_nothing() -> None:
    books = Prefetching([Eager()])
    (plan,) = books.arrived(Arrival(1, chain("a", 2)), 0.0)
    books.finish(plan, 0.0)
    books.finish(plan, 0.0)
    assert books.grant(plan, parts_of(plan.keys), 0.0) == []
    late = Plan(99, "eager", chain("b", 2), 5.0, False)
    assert books.grant(late, parts_of(late.keys), 4.0) == []


def test_parts_that_are_out_are_bounded() -> None:
    books = Prefetching([Eager()], limit=5, minimum=10**6)
    assert len(fetch(books, "a", 0.0)) == 5
    assert fetch(books, "b", 0.0) == []
    books.due(300.0)
    assert len(fetch(books, "b", 300.0)) == 5


@pytest.mark.parametrize(
    "options",
    [{"floor": 1.5}, {"budget": 0.0}, {"minimum": 0}, {"keep": 0.0}, {"limit": 0}, {"pause": -1.0}],
)
def test_senseless_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="prefetch"):
        Prefetching([Eager()], **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="twice"):
        Prefetching([Eager(), Eager()])


def make() -> Prefetching:
    predictors = [MostRecentChild(), ReadAhead(), ReturnTime()]
    return Prefetching(predictors, budget=200.0, minimum=16, pause=5.0, keep=20.0)


@settings(max_examples=10)
@given(fates=st.lists(st.sampled_from("uldrx"), min_size=1, max_size=40))
def test_equal_calls_make_equal_lines(fates: list[str]) -> None:
    """A recorded run is replayed byte for byte, whatever became of the parts."""
    books, log = make(), LineLog()
    books.attach(log)
    number = 0
    events = story()[:160]
    for now, event in events:
        for plan in books.due(now):
            books.finish(plan, now)
        if isinstance(event, Arrival):
            plans = books.arrived(event, now)
            plans += [books.asked(event.keys, now)] if len(event.keys) % 7 == 0 else []
        else:
            plans = books.ended(event, now)
        for plan in plans:
            parts = parts_of(plan.keys)
            for n in books.grant(plan, parts, now):
                part, fate = parts[n][0], fates[number % len(fates)]
                number += 1
                if fate == "u":
                    books.landed([part], now)
                    books.demand([(part, 0)], now)
                elif fate == "l":
                    books.demand([(part, 1)], now)
                elif fate == "d":
                    books.landed([part], now)
                    books.dropped(part, 0, now)
                elif fate == "r":
                    books.refused([part], now)
            books.finish(plan, now)
    assert number > 0
    again = make()
    assert list(replay_prefetching(log.lines, again)) == log.lines
    now = events[-1][0]
    assert again.figures(now) == books.figures(now)
    for got in books.figures(now):
        ends = got.used + got.late + got.wasted + got.refused
        assert got.issued == ends + got.out


def test_a_log_of_another_kind_is_refused() -> None:
    log = LineLog()
    make().attach(log)
    with pytest.raises(ConfigError, match="another configuration"):
        list(replay_prefetching(log.lines, Prefetching()))
    with pytest.raises(ConfigError, match="line 2"):
        list(replay_prefetching([*log.lines, b'{"op":"prefetch.grant","now":1}\n'], make()))
    assert list(replay_prefetching([b'{"op":"tick"}\n'], make())) == []


class Rotten(Eager):
    """Breaks while its wishes are looked at, and wishes for what is none."""

    name: ClassVar[str] = "rotten"

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        return [Wish(event.keys), None]  # type: ignore[list-item]


def test_wishes_that_are_none_fail_no_request() -> None:
    books = Prefetching([Rotten(), Eager()])
    plans = books.arrived(Arrival(1, tuple(chain("a", 4))), 0.0)
    assert [plan.predictor for plan in plans] == ["eager"]
    assert "AttributeError" in books.figures(0.0)[0].broken
