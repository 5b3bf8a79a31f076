"""Rules of compression as settings: in code, TOML and the environment; what contradicts itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.compression_world import LAYOUT, SPACE, chains, realistic
from tierkv.blocking import CacheManager
from tierkv.config import engine_chains, later_rules, load_config, tier_chain, to_plain
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

Rule = tierkv.CompressionPolicy
TIERS = [tierkv.Tier("host", "1MiB"), tierkv.Tier("file", "1MiB", path="/nowhere")]

TOML = """
[[tiers]]
kind = "host"
capacity = "1MiB"

[[compression]]
chain = "int8"
after_steps = 50
tier = "host"
sinks = 4
recent = 32

[[compression]]
chain = "planes"
after = "10m"
when = "demotion"
importance_below = 0.5
"""
RULES = (
    Rule("int8", after_steps=50, tier="host", sinks=4, recent=32),
    Rule("planes", after=600.0, when="demotion", importance_below=0.5),
)


def _config(*rules: Rule, tiers: list[tierkv.Tier] | None = None) -> tierkv.EngineConfig:
    return tierkv.EngineConfig(tiers or TIERS, compression=rules)


def test_a_list_of_rules_is_the_same_in_toml_environment_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tierkv.toml"
    file.write_text(TOML)
    tiers = [tierkv.Tier("host", "1MiB")]
    code = load_config(tiers=tiers, compression=list(RULES)).config
    assert load_config(file).config == code
    assert code.compression == RULES
    assert load_config(to_plain(code)).config == code
    monkeypatch.setenv(
        "TIERKV_COMPRESSION",
        '[{"chain": "int8", "after_steps": 50, "tier": "host", "sinks": 4, "recent": 32},'
        ' {"chain": "planes", "after": "10m", "when": "demotion", "importance_below": 0.5}]',
    )
    assert load_config(tiers=tiers).config == code


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"after_steps": -1}, "after_steps >= 0"),
        ({"after_steps": "50"}, "after_steps must be int"),
        ({"after": "soon"}, "compression: after: not a duration"),
        ({"sinks": -1}, "numbers of tokens, 0 or more"),
        ({"recent": -4}, "numbers of tokens, 0 or more"),
        ({"when": "inplace"}, "when='inplace' is not known; did you mean 'in_place'"),
        ({"importance_below": "low"}, "importance_below must be int or float"),
        ({"importance_below": 0}, "importance_below is above 0"),
        ({"importance_below": 50}, "importance_below is above 0"),
        ({"chain": ""}, "needs a chain"),
        ({"chain": "auto:planes"}, "'auto' is a codec of a tier"),
    ],
)
def test_u1_a_rule_checks_itself(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule(**{"chain": "int8", **settings})


@pytest.mark.parametrize("value", [3, [], ["int8"], [Rule("int8"), "planes"], {"a": 1}])
def test_u1_what_is_no_rule_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"compression must be a codec chain, a tierkv\.Com"):
        tierkv.EngineConfig(TIERS, compression=value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("int8", tier="hots")], "no tier 'hots'; did you mean 'host'"),
        ([Rule("int8"), Rule("planes", after_steps=9)], "'planes': the rule is never reached"),
        ([Rule("int8"), Rule("planes", tier="file")], "'planes': the rule is never reached"),
        ([Rule("int8", when="demotion"), Rule("lz4", tier="file")], "'lz4': the rule is never"),
        (
            [Rule("lz4", when="demotion"), Rule("int8", when="demotion", after=9)],
            "'int8': the rule",
        ),
        ([Rule("int8", tier="host", when="demotion")], "nothing is demoted into the first tier"),
    ],
)
def test_u2_rules_that_cannot_apply_are_refused(rules: list[Rule], message: str) -> None:
    config = _config(*rules)

    with pytest.raises(ConfigError, match=message):
        tier_chain(config, config.tiers[0])


def test_u2_a_rule_for_a_tier_with_a_codec_is_refused() -> None:
    tiers = [tierkv.Tier("host", "1MiB", codec="lz4")]
    config = _config(Rule("int8", tier="host"), tiers=tiers)

    with pytest.raises(ConfigError, match="tier 'host' has a codec of its own"):
        tier_chain(config, config.tiers[0])
    config = _config(Rule("int8"), tiers=tiers)
    assert tier_chain(config, config.tiers[0]) == "lz4"
    assert later_rules(config, config.tiers[0]) == ()


def test_u2_an_unknown_codec_is_found_at_start() -> None:
    config = _config(Rule("int9", after_steps=50))

    with pytest.raises(ConfigError, match="int9"):
        make_decisions(config, make_levels(config, None))


def test_the_chain_of_new_blocks_is_that_of_the_rule_without_conditions() -> None:
    host, file = TIERS
    config = _config(Rule("int4", after_steps=1000), Rule("int8", tier="host"), Rule("planes"))
    assert [tier_chain(config, tier) for tier in TIERS] == ["int8", "planes"]
    assert [r.chain for r in later_rules(config, host)] == ["int4"]
    assert [r.chain for r in later_rules(config, file)] == ["int4"]
    assert engine_chains(config) == {"int4", "int8", "planes"}

    config = _config(Rule("int8", when="demotion"))
    assert [tier_chain(config, tier) for tier in TIERS] == ["raw", "int8"]

    config = _config(Rule("int8", when="demotion"), Rule("planes"))
    assert [tier_chain(config, tier) for tier in TIERS] == ["planes", "int8"]

    config = _config(Rule("int8", sinks=4))
    assert [tier_chain(config, tier) for tier in TIERS] == ["raw", "raw"]


@pytest.mark.parametrize(
    ("rule", "lossy"),
    [
        (Rule("int8", after_steps=50), True),
        (Rule("int8", when="demotion", after="1h"), True),
        (Rule("planes", after_steps=50), False),
        ([Rule("planes", after_steps=9), Rule("lz4")], False),
    ],
)
def test_a_manager_with_lossy_rules_has_lossy_sessions(rule: Any, lossy: bool) -> None:
    ids = kit.tokens(6, seed=1)
    kv = realistic(LAYOUT, len(ids), seed=1)
    tiers = [tierkv.Tier("host", "4MiB"), tierkv.Tier("device", "4MiB", device="cpu")]
    with CacheManager(tiers=tiers, space=SPACE, compression=rule) as manager:
        manager.create_session("a")
        manager.store(ids, kv.view, session="a")
        manager.flush()
        assert manager.call(_is_lossy, manager) is lossy
        back = kit.Memory(LAYOUT, len(ids))
        assert manager.load(ids, back.view, session="a").tokens == len(ids)


async def _is_lossy(manager: CacheManager) -> bool:
    return manager.handle("a").lossy


@pytest.mark.anyio
async def test_a_chain_by_layer_and_tensor_is_a_rule_too(tmp_path: Path) -> None:
    rule = Rule("0:raw,K:int8,V:planes", after_steps=50)
    ids = kit.tokens(6, seed=2)
    kv = realistic(LAYOUT, len(ids), seed=2)
    async with (
        tierkv.open(tiers=kit.tiers("host", tmp_path), space=SPACE, compression=rule) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert chains(session)[:3] == ["int8,planes,raw"] * 2 + ["raw"]
        again = engine.runtime.behind.recoder.converted
        await session.store(ids, kv.view, start=len(ids))
        await session.flush()
        assert engine.runtime.behind.recoder.converted == again
