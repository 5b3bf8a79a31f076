"""What the figures say, and their form as JSON."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tierkv_adapters.hf.demo.figures import Report, Restart, Turn

TURN = Turn(
    label="chat 2",
    new_tokens=100,
    prompt_tokens=1024,
    reused_tokens=896,
    tier="nvme",
    ttft_cold_s=8.0,
    ttft_restored_s=1.0,
    cpu_cold_s=7.0,
    cpu_restored_s=0.5,
    identical=True,
    identical_to_cold=True,
)
BACK = Restart(1200, 1152, "nvme", 0.5, identical=True)


def report(*turns: Turn, restart: Restart = BACK) -> Report:
    held, capacity = {"host": 1 << 20, "nvme": 3 << 20}, {"host": 2 << 20, "nvme": 1 << 30}
    return Report("tiny", turns, restart, held, capacity)


def test_only_long_prompts_with_little_new_text_count() -> None:
    slow = replace(TURN, ttft_restored_s=8.0)
    short = replace(slow, prompt_tokens=1023, new_tokens=10)
    fresh = replace(slow, new_tokens=103)

    assert report(TURN, short, fresh).ttft_ratio_median == pytest.approx(1 / 8)
    assert report(TURN, replace(TURN, ttft_restored_s=3.0)).ttft_ratio_median == pytest.approx(0.25)
    assert report(short, fresh).ttft_ratio_median is None


def test_identical_means_every_reply() -> None:
    assert report(TURN).identical
    assert not report(TURN, replace(TURN, identical=False)).identical
    assert not report(TURN, restart=replace(BACK, identical=False)).identical
    # another answer than from nothing is shown, but it is not what the store promises
    assert report(replace(TURN, identical_to_cold=False)).identical


def test_json_has_exactly_the_promised_fields() -> None:
    result = report(TURN).as_json()

    assert list(result) == ["schema_version", "model", "turns", "restart", "totals"]
    assert set(result["turns"][0]) == {
        "prompt_tokens",
        "reused_tokens",
        "tier",
        "ttft_cold_s",
        "ttft_restored_s",
        "cpu_cold_s",
        "cpu_restored_s",
        "identical",
        "identical_to_cold",
    }
    assert set(result["restart"]) == {
        "reused_tokens",
        "prompt_tokens",
        "ttft_restored_s",
        "identical",
    }
    assert result["totals"] == {
        "ttft_ratio_median": 0.125,
        "bytes_by_tier": {"host": 1 << 20, "nvme": 3 << 20},
        "identical": True,
    }


def test_the_table_fits_an_old_terminal() -> None:
    text = io.StringIO()
    turns = [TURN, replace(TURN, label="document 1", reused_tokens=0, tier=None, identical=False)]
    report(*turns).show(Console(file=text, width=80))
    shown = text.getvalue()

    assert max(map(len, shown.splitlines())) <= 80
    for expected in ("chat 2", "1024", "896", "nvme", "8.00 s", "8.0x", "yes", "NO", "12%"):
        assert expected in shown
    assert "after restart" in shown
    assert "What to try next" in shown
    assert "…" not in shown
