"""Runs from an installed wheel, outside the checkout: store, reopen, load, compare."""

import asyncio
import tempfile
from pathlib import Path

import torch

import tierkv
import tierkv_adapters
import tierkv_backends
import tierkv_codecs

for package in (tierkv, tierkv_adapters, tierkv_backends, tierkv_codecs):
    home = Path(package.__file__).parent
    assert "site-packages" in home.parts, (
        f"{package.__name__} was not loaded from the wheel: {home}"
    )
    assert (home / "py.typed").exists(), f"{package.__name__} ships no py.typed"

TOKENS = list(range(64))
LAYOUT = tierkv.Layout.uniform(2, 2, 16, "float32")
SPACE = tierkv.Space(tierkv.Identity("wheel", "1"), LAYOUT, block_tokens=16)
KV = [(torch.randn(2, 64, 16), torch.randn(2, 64, 16)) for _ in range(2)]


async def main(path: str) -> None:
    """Store with one engine; load with another one over the same directory."""
    tiers = [tierkv.Tier("host", "8MiB"), tierkv.Tier("nvme", "32MiB", path=path, codec="zstd")]
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("s") as session,
    ):
        await session.store(TOKENS, tierkv.views.dense(KV))
        await session.flush()
    back = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in KV]
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("s") as session,
        session.match(TOKENS) as match,
    ):
        loaded = await match.load(into=tierkv.views.dense(back))
    assert loaded.tokens == len(TOKENS), loaded
    for (k, v), (k2, v2) in zip(KV, back, strict=True):
        assert torch.equal(k, k2)
        assert torch.equal(v, v2)
    print(
        f"wheel {tierkv.__version__}: {loaded.tokens} tokens back after a restart, {loaded.by_tier}"
    )


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
