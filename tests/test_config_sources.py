"""Where each setting comes from, down to the fields of tiers and rules; what is unset."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import TYPE_CHECKING

import pytest

from tierkv.config import EngineConfig, Hybrid, Policy, Tier, load_config, to_plain
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
compression = { chain = "int8", after_steps = 3 }
[policy]
rules = [{ name = "lru", tier = "ram" }, { name = "lrfu" }]
[[tiers]]
kind = "host"
name = "ram"
capacity = "1GiB"
codec = "raw"
[[tiers]]
kind = "nvme"
capacity = "4GiB"
path = "kv"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "tierkv.toml"
    path.write_text(TOML)
    return path


def test_u1_a_field_that_nobody_set_has_no_other_source(toml: Path) -> None:
    _, sources = load_config(toml)

    given = {
        "tiers[0]": {"kind", "name", "capacity", "codec"},
        "policy.rules[0]": {"name", "tier"},
        "policy.rules[1]": {"name"},
    }
    for spec, names in given.items():
        kind = Tier if spec.startswith("tiers") else Policy
        left = {f.name for f in dataclasses.fields(kind)} - names
        found = {path: origin for path, origin in sources.items() if path.startswith(f"{spec}.")}
        assert found == dict.fromkeys((f"{spec}.{name}" for name in left), "default")


def test_u1_a_setting_that_a_later_layer_gives_keeps_no_source_of_before(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_POLICY", '{"name": "lru", "unit": "part"}')

    _, sources = load_config(toml, tiers=iter([Tier("host", "1GiB", name="ram", high=0.9)]))

    assert (sources["tiers"], sources["policy"]) == ("argument", "TIERKV_POLICY")
    assert not any(path.startswith(("tiers[1]", "policy.rules")) for path in sources)
    told = {path for path in sources if path.startswith("policy.")}
    assert told == {"policy.tier", "policy.action", "policy.to"}
    assert sources["tiers[0].low"] == sources["tiers[0].options"] == "default"
    assert not {"tiers[0].kind", "tiers[0].name", "tiers[0].high"} & set(sources)


def test_u1_what_is_unset_can_be_listed_and_read_back() -> None:
    code = load_config(tomllib.loads(TOML)).config
    plain = to_plain(code, unset=True)

    assert plain["metrics_port"] is None
    assert plain["tiers"][0]["path"] is None
    assert {f.name for f in dataclasses.fields(EngineConfig)} == set(plain)
    assert load_config(plain).config == code


def test_u1_a_spec_made_in_code_tells_what_differs_from_the_defaults() -> None:
    tiers = [Tier("host", "1GiB", low=0.85, options={"touch": False}), Tier("host", 9999, name="b")]
    policy = Hybrid([Policy("lru", unit="session", action="demote", to="b"), Policy("lrfu")])

    for sources in (
        load_config(tiers=tiers, policy=policy).sources,
        load_config(EngineConfig(tiers, policy=policy)).sources,
    ):
        left = {path for path, origin in sources.items() if "[" in path and origin == "default"}
        same = {"path", "codec", "policy", "admission", "device", "write_through", "high", "low"}
        assert left == {
            *(f"tiers[0].{name}" for name in same | {"name"}),
            *(f"tiers[1].{name}" for name in same | {"options"}),
            "policy.rules[0].tier",
            *(f"policy.rules[1].{name}" for name in ("tier", "unit", "action", "to")),
        }


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_s2_what_names_no_file_is_no_path(path: str) -> None:
    with pytest.raises(ConfigError, match="names no directory"):
        Tier("nvme", "1GiB", path=path)
    for key in ("trace", "decision_log"):
        with pytest.raises(ConfigError, match=f"{key} .* names no file"):
            EngineConfig([Tier("host", "1GiB")], **{key: path})  # type: ignore[arg-type]
