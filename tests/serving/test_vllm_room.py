"""Tiers that could never hold a block of this model: told when the engine starts."""

from __future__ import annotations

import pytest

import tierkv
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv_adapters.vllm.attached.room import check_blocks

BLOCK = 6 << 20


def _config(*tiers: tierkv.Tier, **more: str) -> EngineConfig:
    return EngineConfig(tiers=tiers, **more)  # type: ignore[arg-type]


def test_no_tier_for_a_block_is_refused_with_both_sizes() -> None:
    config = _config(tierkv.Tier("host", "1MiB"), tierkv.Tier("file", "4MiB", path="kv"))
    with pytest.raises(ConfigError, match=r"128 tokens, 6 MiB.*'host' has 1 MiB, 'file'") as caught:
        check_blocks(config, 128, BLOCK)
    assert caught.value.setting == "tiers"


def test_one_tier_that_stays_empty_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = _config(tierkv.Tier("host", "1MiB"), tierkv.Tier("file", "1GiB", path="kv"))
    check_blocks(config, 128, BLOCK)
    (record,) = caplog.records
    assert "'host' has 1 MiB" in record.getMessage()
    assert "file" not in record.getMessage()


@pytest.mark.parametrize(
    "config",
    [
        _config(tierkv.Tier("host", BLOCK)),
        _config(tierkv.Tier("host", "1MiB", codec="int4")),
        _config(tierkv.Tier("host", "1MiB"), compression="int4"),
    ],
    ids=["fits", "codec", "compression"],
)
def test_what_fits_or_may_fit_is_left_alone(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    check_blocks(config, 128, BLOCK)
    assert not caplog.records
