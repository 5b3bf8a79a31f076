"""One store under several engines: a block of equal shape is reused or refused by key, never
misread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

import tierkv
from tierkv.blocking import CacheManager
from tierkv.testing.trtllm import FakeLlmArgs
from tierkv_adapters.trtllm.identity import identity_of as of_trtllm
from tierkv_adapters.vllm.facts import identity_of as of_vllm

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tierkv.blocks import Identity

LAYOUT = tierkv.Layout.uniform(layers=2, heads=2, dim=4, dtype="float32")
TOKENS = list(range(32))


class _HFConfig:
    architectures = ("LlamaForCausalLM",)

    def to_dict(self) -> dict[str, Any]:
        return {"hidden_size": 8}


def _identities(folder: Path) -> dict[str, Identity]:
    """The same model's files, as each adapter names what they compute."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    vllm = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), dtype=torch.float32, hf_config=_HFConfig(), max_model_len=64
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            world_size=1, rank=0, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
    )
    named = SimpleNamespace(weights=None, model=None)
    return {
        "vllm": of_vllm(vllm, {"layers.0": "CPU_ATTN/vec"}),
        "trtllm": of_trtllm(FakeLlmArgs(model=str(folder)), named, (0, 1)),  # type: ignore[arg-type]
        "hf": tierkv.Identity("transformers.models.llama:LlamaForCausalLM", "0" * 64),
    }


def _kv(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    return [(torch.randn(2, 32, 4), torch.randn(2, 32, 4)) for _ in range(2)]


def test_i1_what_one_engine_stored_is_no_other_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    spaces = {
        name: tierkv.Space(identity, LAYOUT, block_tokens=16)
        for name, identity in _identities(tmp_path / "model").items()
    }
    with CacheManager(tiers=[tierkv.Tier("host", "8MiB")]) as manager:
        manager.create_session("chat")
        for seed, space in enumerate(spaces.values()):
            mine = _kv(99)
            view = tierkv.views.dense(mine)
            # nobody's block of the same tokens, shape and dtype is taken for this engine's
            assert manager.load(TOKENS, view, session="chat", space=space).tokens == 0
            manager.store(TOKENS, tierkv.views.dense(_kv(seed)), session="chat", space=space)
        for seed, space in enumerate(spaces.values()):
            mine = _kv(99)
            view = tierkv.views.dense(mine)
            assert manager.load(TOKENS, view, session="chat", space=space).tokens == 32
            for got, put in zip(mine, _kv(seed), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, put, strict=True))


def test_i2_the_same_engine_finds_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    first, second = (_identities(tmp_path / name) for name in ("one", "two"))
    assert first["vllm"] == second["vllm"]  # the same files in another folder
    assert first["trtllm"].weights == second["trtllm"].weights
