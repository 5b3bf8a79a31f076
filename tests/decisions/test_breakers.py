"""Circuit breakers by themselves: when they open, close, and try again."""

from __future__ import annotations

from tierkv.decisions.cost import Breaker, BreakerState, Costs


def test_five_failures_in_a_row_open_a_breaker_and_a_good_batch_starts_over() -> None:
    breaker = Breaker()
    for _ in range(4):
        breaker.failure(0.0)
    breaker.success(0.0)
    for _ in range(4):
        breaker.failure(0.0)
    assert breaker.closed
    breaker.failure(10.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits(10.9)
    assert breaker.admits(11.0)


def test_one_probe_at_a_time_and_the_pause_doubles() -> None:
    breaker = Breaker()
    breaker.failure(0.0, hung=True)  # one batch that hangs is enough
    now, pauses = 0.0, []
    for _ in range(9):
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        assert breaker.admit(now)
        assert breaker.state is BreakerState.HALF_OPEN
        assert not breaker.admit(now)
        breaker.failure(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    now = breaker.retry_at
    assert breaker.admit(now)
    breaker.success(now)
    assert breaker.closed
    breaker.success(now + 60)  # it lasts
    breaker.failure(now + 61, hung=True)
    assert breaker.retry_at - (now + 61) == 1


def test_p3_a_relapse_is_left_alone_for_longer_each_time() -> None:
    """Probes of a page are answered, loads hang: each of them would cost a whole time-out."""
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(8):
        breaker.failure(now, hung=True)
        pauses.append(breaker.retry_at - now)
        if len(pauses) > 1:
            breaker.hint(now + 0.5)  # writes are fine
        now = breaker.retry_at
        assert breaker.admit(now)
        breaker.success(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_what_comes_late_from_earlier_does_not_lengthen_the_pause() -> None:
    breaker = Breaker()
    breaker.failure(0.0, hung=True)
    breaker.failure(0.5)
    assert breaker.retry_at == 1.0


def test_a_sign_of_life_brings_the_probe_forward_only_where_something_hung() -> None:
    hung, failing = Breaker(), Breaker()
    hung.failure(0.0, hung=True)
    for _ in range(5):
        failing.failure(0.0)
    for breaker in (hung, failing):
        breaker.hint(0.2)
    assert hung.admits(0.2)
    assert not failing.admits(0.2)


def test_a_cancelled_probe_tells_nothing() -> None:
    breaker = Breaker()
    breaker.failure(0.0, hung=True)
    assert breaker.admit(5.0)
    breaker.untried(5.0)
    assert breaker.admit(5.0)


def test_a_hanging_tier_is_out_for_reads_and_writes_a_failing_one_for_what_fails() -> None:
    costs = Costs(["host", "disk"])
    for _ in range(5):
        costs.failed(1, "write", 0.0, hung=False)
    assert (costs.readable(), costs.writable(0.5)) == (0b11, 0b01)
    assert costs.writable(1.0) == 0b11  # time to try again
    costs.failed(1, "read", 2.0, hung=True)
    assert (costs.readable(), costs.writable(2.0)) == (0b01, 0b11)
    costs.sample(1, "read", 10, 1.0, 3.0)
    assert costs.readable() == 0b11
