"""An exact session over tiers that are all lossy finds nothing: it is told so, once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio
SPACE = kit.space()


async def _warnings(
    tiers: Sequence[tierkv.Tier], fidelity: str, caplog: pytest.LogCaptureFixture
) -> list[str]:
    with caplog.at_level(logging.WARNING, "tierkv.session"):
        async with tierkv.open(tiers=tiers, space=SPACE, metrics_port=None) as engine:
            for name in ("chat-1", "chat-2"):
                async with engine.session(name, fidelity=fidelity):
                    pass
    return [r.getMessage() for r in caplog.records if r.name == "tierkv.session"]


async def test_where_every_tier_is_lossy(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = await _warnings([tierkv.Tier("host", "8MiB", codec="int8")], "exact", caplog)
    assert "'chat-1'" in message
    assert "fidelity='lossy'" in message


@pytest.mark.parametrize(("codec", "fidelity"), [("int8", "lossy"), ("zstd", "exact")])
async def test_nobody_else_is_told(
    codec: str, fidelity: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await _warnings([tierkv.Tier("host", "8MiB", codec=codec)], fidelity, caplog) == []
