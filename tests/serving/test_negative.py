"""Blocks whose load failed are not offered for a while; and the log that this fills."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tierkv.blocks import BlockKey
from tierkv_adapters.serving.limited_log import LimitedLog
from tierkv_adapters.serving.negative import NegativeCache

if TYPE_CHECKING:
    import pytest

KEYS = [BlockKey(bytes([n]) * 32) for n in range(6)]


def test_what_failed_is_blocked_for_a_while() -> None:
    cache = NegativeCache(30.0)
    cache.failed(KEYS[:2], 100.0)
    assert [cache.blocked(key, 100.0) for key in KEYS[:3]] == [True, True, False]
    assert cache.blocked(KEYS[0], 129.9)
    assert not cache.blocked(KEYS[0], 130.0)


def test_a_second_failure_counts_anew() -> None:
    cache = NegativeCache(30.0)
    cache.failed(KEYS[:2], 100.0)
    cache.failed(KEYS[:1], 120.0)
    assert cache.blocked(KEYS[0], 149.0)
    assert not cache.blocked(KEYS[1], 149.0)


def test_what_was_stored_anew_is_offered_at_once() -> None:
    cache = NegativeCache(30.0)
    cache.failed(KEYS[:2], 100.0)
    cache.came_back(KEYS[0])
    cache.came_back(KEYS[5])
    assert not cache.blocked(KEYS[0], 100.0)
    assert cache.blocked(KEYS[1], 100.0)
    assert len(cache) == 1


def test_it_is_bounded_and_forgets_what_is_over() -> None:
    cache = NegativeCache(30.0, most=3)
    cache.failed(KEYS[:5], 100.0)
    assert len(cache) == 3
    assert [cache.blocked(key, 100.0) for key in KEYS[:5]] == [False, False, True, True, True]
    cache.failed(KEYS[5:], 200.0)
    assert len(cache) == 1


def test_no_time_blocks_nothing() -> None:
    cache = NegativeCache(0.0)
    cache.failed(KEYS, 100.0)
    assert not any(cache.blocked(key, 100.0) for key in KEYS)
    assert len(cache) == 0


def test_one_cause_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = LimitedLog(logging.getLogger("test.limited"), 10.0, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for at in (0.0, 1.0, 9.0, 10.0, 12.0):
            now[0] = at
            log.warning("short load", f"at {at:g}")
        log.warning("other", "also")
    assert caplog.messages == [
        "short load: at 0",
        "short load: at 10 (2 more like it)",
        "other: also",
    ]
