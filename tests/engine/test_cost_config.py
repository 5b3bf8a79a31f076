"""Settings of the cost model and the breakers."""

from __future__ import annotations

import pytest

from tierkv.config import EngineConfig, Tier, load_config, tier_chain, to_plain
from tierkv.errors import ConfigError


def test_a_codec_may_be_chosen_by_cost() -> None:
    tiers = [
        Tier("nvme", "1MiB", codec="auto"),
        Tier("file", "1MiB", codec="auto:zstd"),
        Tier("nvme", "1MiB", name="plain"),
    ]
    assert [tier.candidate for tier in tiers] == ["planes", "zstd", None]
    config = EngineConfig(tiers, compression="lz4")
    assert [tier_chain(config, tier) for tier in config.tiers] == ["planes", "zstd", "lz4"]
    assert load_config(to_plain(config)).config == config
    with pytest.raises(ConfigError, match=r"'auto:CHAIN' needs a chain"):
        Tier("nvme", "1MiB", codec="auto:")
    for kind in ("host", "device"):
        with pytest.raises(ConfigError, match="is memory"):
            Tier(kind, "1MiB", codec="auto")


def test_the_time_that_a_tier_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_TIER_TIMEOUT", "500ms")
    assert load_config(tiers=[Tier("host", "1MiB")]).config.tier_timeout == 0.5
    monkeypatch.delenv("TIERKV_TIER_TIMEOUT")
    with pytest.raises(ConfigError, match="tier_timeout must be positive"):
        load_config(tiers=[Tier("host", "1MiB")], tier_timeout=0)


@pytest.mark.parametrize(("kind", "setting"), [("file", "device"), ("device", "path")])
def test_f079_what_a_kind_has_no_use_for_is_refused(kind: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} has no meaning for a '{kind}' tier"):
        Tier(kind, "1MiB", **{setting: "x"})  # type: ignore[arg-type]
