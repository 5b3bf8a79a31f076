"""The search finds what is planted, goes on where it was ended, and writes what an engine opens."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.tuning.planted import FRAME, HEADER, request, scans
from tierkv.config import EngineConfig, Tier, load_config
from tierkv.errors import ConfigError, MissingDependencyError
from tierkv.replay import Setup, replay
from tierkv.traces import Trace
from tierkv.tuning import Choices, settings_text, shipped, tune
from tierkv.tuning.space import sizes_of

if TYPE_CHECKING:
    from pathlib import Path

CHOICES = Choices(
    policies=("lru", "lru2"), admissions=("all",), prefetches=("",), marks=((1.0, 1.0),)
)


def base(blocks: int = 16, **more: object) -> Setup:
    return Setup(capacity_bytes=[blocks * FRAME], names=("host",), policy="lru", **more)  # type: ignore[arg-type]


def test_the_shipped_settings_are_those_of_an_engine() -> None:
    setup = shipped({"host": 10 * FRAME, "nvme": None})
    engine = EngineConfig([Tier("host", "1GiB")])
    assert setup.tier_names() == ["host", "nvme"]
    assert setup.policy == engine.policy
    assert setup.prefetch == engine.prefetch
    assert (setup.high, setup.low) == (engine.tiers[0].high, engine.tiers[0].low)


@pytest.fixture
def optuna() -> None:
    pytest.importorskip("optuna")


@pytest.mark.usefixtures("optuna")
def test_what_is_planted_is_found() -> None:
    tuned = tune(scans(), base(), objective="hit", choices=CHOICES, seconds=None, trials=6)
    assert tuned.setup.policy == "lru2"
    before, after = tuned.held_out
    assert after.token_hit_ratio > before.token_hit_ratio + 0.1
    assert tuned.gain > 0
    assert not tuned.interrupted


@pytest.mark.usefixtures("optuna")
def test_it_is_never_worse_than_the_base_on_what_it_saw() -> None:
    worse = replace(CHOICES, policies=("fifo",))
    tuned = tune(scans(20), base(), objective="hit", choices=worse, seconds=None, trials=2)
    assert tuned.setup == tuned.base


@pytest.mark.usefixtures("optuna")
def test_the_cheapest_that_is_as_quick() -> None:
    """A tenth of the tier holds all that ever comes again."""
    hot = Trace.of(HEADER, [request(float(n), (1, 2, 3)) for n in range(40)])
    tuned = tune(hot, base(100), objective="cost", choices=CHOICES, seconds=None, trials=12)
    size = sizes_of(tuned.setup)["host"]
    assert 3 * FRAME <= size < 50 * FRAME
    assert tuned.held_out[1].ttft.mean <= tuned.held_out[0].ttft.mean


@pytest.mark.usefixtures("optuna")
def test_a_study_goes_on(tmp_path: Path) -> None:
    study = tmp_path / "study"
    seen: list[int] = []

    def more(**changes: object) -> int:
        options: dict[str, object] = {"objective": "hit", "choices": CHOICES, "study": study}
        options |= {"seconds": None, "trials": 3, "on_trial": lambda done, _: seen.append(done)}
        return tune(scans(), base(), **(options | changes)).trials  # type: ignore[arg-type]

    assert more() == 3
    assert more() == 6
    assert seen == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="of another trace"):
        more(objective="ttft")


@pytest.mark.usefixtures("optuna")
def test_the_best_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    study = tmp_path / "study"
    first = tune(
        scans(), base(), objective="hit", choices=CHOICES, study=study, seconds=None, trials=6
    )
    again = tune(
        scans(), base(), objective="hit", choices=CHOICES, study=study, seconds=0.0, trials=0
    )
    assert again.setup == first.setup != first.base


@pytest.mark.usefixtures("optuna")
def test_ctrl_c_keeps_what_was_found() -> None:
    def stop(done: int, _: float) -> None:
        if done == 4:
            raise KeyboardInterrupt

    tuned = tune(
        scans(), base(), objective="hit", choices=CHOICES, seconds=None, trials=50, on_trial=stop
    )
    assert tuned.interrupted
    assert tuned.trials == 4
    assert tuned.setup.policy == "lru2"


@pytest.mark.usefixtures("optuna")
def test_the_settings_open(tmp_path: Path) -> None:
    start = Setup(capacity_bytes=[16 * FRAME, None], names=("host", "nvme"), policy="lru")
    wide = replace(CHOICES, prefetches=("arrival",), budgets=("1MiB",), floors=(0.5,))
    tuned = tune(scans(), start, choices=wide, seconds=None, trials=2)
    file = tmp_path / "tierkv.toml"
    file.write_text(settings_text(tuned, path=str(tmp_path / "kv"), unlimited=1 << 20))
    config = load_config(file).config
    assert config.policy == tuned.setup.policy
    assert config.prefetch == tuned.setup.prefetch
    assert [(t.kind, t.capacity_bytes) for t in config.tiers] == [
        ("host", 16 * FRAME),
        ("nvme", 1 << 20),
    ]
    assert config.tiers[1].path == str(tmp_path / "kv")
    assert [t.high for t in config.tiers] == [tuned.setup.high] * 2
    assert "second half, which was not" in file.read_text()
    # what was found is what the settings say
    assert replay(scans(), tuned.setup).requests == len(list(scans()))


@pytest.mark.usefixtures("optuna")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "speed"}, "an objective is one of ttft, hit, cost"),
        ({"seconds": None}, "a search without end"),
        ({"trace": Trace.of(HEADER, [request(0.0, (1,))])}, "cannot be cut in two"),
        ({"base": Setup(capacity_blocks=4)}, "needs the bytes of each tier"),
    ],
)
def test_what_cannot_be_searched(changes: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"trace": scans(4), "base": base()}
    with pytest.raises(ConfigError, match=message):
        tune(**(options | changes))  # type: ignore[arg-type]


def test_without_optuna_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependencyError, match=r"\[tune\]"):
        tune(scans(4), base())
