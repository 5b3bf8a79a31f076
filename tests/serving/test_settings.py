"""Settings of a serving adapter: strict, and with their types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv_adapters.serving.settings import ServingSettings


def test_defaults_stand() -> None:
    assert ServingSettings.parse(None) == ServingSettings.parse({}) == ServingSettings()
    assert ServingSettings().load_deadline == 10.0


def test_values_get_their_types() -> None:
    found = ServingSettings.parse(
        {
            "config": Path("/etc/tierkv.toml"),
            "socket_dir": Path("/run/x"),
            "block_tokens": 128,
            "load_deadline": "150ms",
            "save_decoded": False,
            "min_load_tokens": 256,
            "retry_after": "1m",
            "layout": "opaque",
            "ready_fraction": 1,
            "lost_after": "1m",
        }
    )
    assert found == ServingSettings(
        "/etc/tierkv.toml", "/run/x", 128, 0.15, False, 256, 60.0, "opaque", 1.0, 60.0
    )
    assert ServingSettings.parse({"load_deadline": None}).load_deadline is None
    assert ServingSettings.parse({"config": {"tiers": []}}).config == {"tiers": []}
    assert ServingSettings.parse({"retry_after": 0}).retry_after == 0
    assert ServingSettings.parse({"lost_after": "never"}).lost_after is None
    assert ServingSettings().lost_after == 30.0


def test_an_unknown_name_says_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'load_deadlin'.* 'load_deadline'") as caught:
        ServingSettings.parse({"load_deadlin": "1s"})
    assert caught.value.setting == "load_deadlin"


def test_what_only_another_engine_reads_is_unknown() -> None:
    given = {"ready_fraction": 0.25}
    assert ServingSettings.parse(given, engine="trtllm").ready_fraction == 0.25
    with pytest.raises(ConfigError, match="unknown setting 'ready_fraction'"):
        ServingSettings.parse(given, engine="vllm")
    with pytest.raises(ConfigError, match="unknown setting 'lost_after'"):
        ServingSettings.parse({"lost_after": "1s"}, engine="vllm")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", 3),
        ("socket_dir", ""),
        ("socket_dir", 3),
        ("block_tokens", 0),
        ("block_tokens", "64"),
        ("block_tokens", True),
        ("load_deadline", 0),
        ("load_deadline", "soon"),
        ("load_deadline", False),
        ("load_deadline", -1),
        ("save_decoded", 1),
        ("min_load_tokens", -1),
        ("retry_after", None),
        ("retry_after", "-3s"),
        ("layout", "raw"),
        ("layout", None),
        ("ready_fraction", 1.5),
        ("ready_fraction", "0.5"),
        ("ready_fraction", True),
        ("lost_after", None),
        ("lost_after", "at some time"),
        ("lost_after", -1),
    ],
)
def test_malformed_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        ServingSettings.parse({name: value})
    assert caught.value.setting == name


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mapping"):
        ServingSettings.parse(["config"])  # type: ignore[arg-type]
