"""A codec that leaves the packing to a bytes codec: who forgets that one is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tierkv import CompressionPolicy, EngineConfig, Tier
from tierkv.chains import parse_chains
from tierkv.engine.compose import make_decisions, make_levels

if TYPE_CHECKING:
    from collections.abc import Sequence

LOUD = ["ecq4", "ecq2", "K:ecq3,V:int8", "0-1:raw,V:ecq2"]
QUIET = ["ecq4+rans", "ecq3+zstd", "int4", "raw", "planes", "K:ecq4+rans,V:rot4"]


def warnings(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    with caplog.at_level(logging.WARNING, "tierkv"):
        make_decisions(config, make_levels(config, None))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("chain", LOUD)
def test_a_chain_without_its_bytes_codec_is_told_of(
    chain: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = warnings(EngineConfig(tiers=(Tier("host", "1MiB", codec=chain),)), caplog)
    name = parse_chains(chain).uncoded[0]
    assert "tier 'host'" in message
    assert f"{name}+rans" in message


@pytest.mark.parametrize("chain", QUIET)
def test_other_chains_are_not(chain: str, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(EngineConfig(tiers=(Tier("host", "1MiB", codec=chain),)), caplog) == []


def test_rules_of_compression_are_looked_at_too(caplog: pytest.LogCaptureFixture) -> None:
    rules = [CompressionPolicy("ecq4", after="10m"), CompressionPolicy("ecq3+rans", after="1m")]
    config = EngineConfig(tiers=(Tier("host", "1MiB"),), compression=rules)
    (message,) = warnings(config, caplog)
    assert message.startswith("compression: 'ecq4'")
