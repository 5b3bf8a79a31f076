"""What vLLM's objects are taken for, without vLLM: identity, page groups, KV events, settings."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv.blocks import AdapterId, BlockKey, part_id
from tierkv.errors import AttachError, ConfigError
from tierkv.layout import GroupKind
from tierkv_adapters.serving.pages import PagePools
from tierkv_adapters.vllm import facts
from tierkv_adapters.vllm.events import CPU, STORAGE, EventBook, Removed
from tierkv_adapters.vllm.layouts import page_groups, shapes
from tierkv_adapters.vllm.worker import connector_settings

if TYPE_CHECKING:
    from pathlib import Path


class HFConfig:
    architectures = ("LlamaForCausalLM",)

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.rope_scaling = values.get("rope_scaling")

    def to_dict(self) -> dict[str, Any]:
        return {"hidden_size": 64, "_name_or_path": "/here", **self.values}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for ``VllmConfig``."""
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), dtype=torch.float32, hf_config=HFConfig(), max_model_len=4096
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            world_size=2, rank=1, tensor_parallel_size=2, pipeline_parallel_size=1
        ),
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_connector_extra_config={}
        ),
    )


BACKENDS = {"layers.0": "CPU_ATTN/vec"}


def test_f009_every_fact_changes_the_identity(config: Any, tmp_path: Path) -> None:
    model, parallel = config.model_config, config.parallel_config
    seen = [facts.identity_of(config, BACKENDS)]
    assert seen[0].shard == (1, 2)
    assert facts.identity_of(config, BACKENDS) == seen[0]

    def differs() -> None:
        seen.append(facts.identity_of(config, BACKENDS))

    model.dtype = torch.bfloat16
    differs()
    config.cache_config.cache_dtype = "fp8"
    differs()
    model.hf_config = HFConfig(rope_theta=5.0)
    differs()
    model.hf_config = HFConfig(rope_scaling={"rope_type": "longrope"})
    differs()
    model.max_model_len = 8192
    differs()
    model.quantization = "fp8"
    differs()
    model.quantization_config = {"ignore": ["lm_head"]}
    differs()
    model.quantization_config = {"ignore": ["lm_head", "layers.0"]}
    differs()
    model.multimodal_config = SimpleNamespace(mm_processor_kwargs={"max_pixels": 1000})
    differs()
    model.multimodal_config.video_pruning_rate = 0.5
    differs()
    config.lora_config = SimpleNamespace(lora_dtype="auto", target_modules=["q_proj"])
    differs()
    config.lora_config.enable_tower_connector_lora = True
    differs()
    parallel.rank = 0
    differs()
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = 1, 2
    differs()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"WEIGHTS")
    differs()
    seen.append(facts.identity_of(config, {"layers.0": "FLASH_ATTN"}))
    seen.append(facts.identity_of(config, BACKENDS, weights="v1"))
    assert len({repr(each) for each in seen}) == len(seen)


def test_where_the_files_are_is_no_fact(config: Any) -> None:
    first = facts.identity_of(config, BACKENDS)
    config.model_config.hf_config = HFConfig(_name_or_path="/there", pad_token_id=7)
    assert facts.identity_of(config, BACKENDS) == first


def test_random_weights_and_run_time_scales_are_never_shared(config: Any) -> None:
    config.cache_config.calculate_kv_scales = True
    assert facts.identity_of(config, BACKENDS) != facts.identity_of(config, BACKENDS)
    config.cache_config.calculate_kv_scales = False
    config.load_config.load_format = "dummy"
    assert facts.identity_of(config, BACKENDS) != facts.identity_of(config, BACKENDS)


def test_weights_that_cannot_be_told_apart_are_refused(config: Any) -> None:
    config.load_config.load_format = "tensorizer"
    with pytest.raises(AttachError, match='"weights": "my-model@'):
        facts.identity_of(config, BACKENDS)
    assert facts.identity_of(config, BACKENDS, weights="v1").weights == "given:v1"
    config.load_config.load_format = "auto"
    config.model_config.model = "s3://bucket/model"
    with pytest.raises(AttachError, match="Name their revision yourself"):
        facts.identity_of(config, BACKENDS)


def test_a_name_for_the_weights_stands_for_those_of_a_draft_model(config: Any) -> None:
    draft = SimpleNamespace(model="s3://bucket/draft", hf_config=HFConfig())
    config.speculative_config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    with pytest.raises(AttachError, match="s3://bucket/draft"):
        facts.identity_of(config, BACKENDS)
    first = facts.identity_of(config, BACKENDS, weights="v1")
    draft.model = "s3://bucket/other"
    assert facts.identity_of(config, BACKENDS, weights="v1") != first


def test_f005_an_adapter_is_its_content(tmp_path: Path, config: Any) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    lora = SimpleNamespace(lora_name="a", lora_path=str(folder))
    first = facts.adapter_id(lora)
    assert facts.adapter_id(lora) == first
    (folder / "adapter_config.json").write_text('{"alpha": 2}')
    assert facts.adapter_id(lora) != first
    assert isinstance(first, AdapterId)
    with pytest.raises(AttachError):
        facts.adapter_id(SimpleNamespace(lora_name="a", lora_path="/nowhere/at/all"))


def test_f006_an_adapter_touched_since_the_engine_began_is_this_engines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    folder, link = tmp_path / "one", tmp_path / "latest"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_name="a", lora_path=str(folder))
    plain = facts.adapter_id(lora)
    touched = max(one.stat().st_ctime for one in (folder, *folder.iterdir()))
    # the engine began well behind them, so that it has these bytes whenever it read them
    assert facts.adapter_id(lora, since=touched + 60, mark="m") == plain
    mine = facts.adapter_id(lora, since=touched - 60, mark="m")
    assert mine.version == f"{plain.version}:m"
    assert facts.adapter_id(lora, since=touched, mark="m") == mine, "clocks differ"
    link.symlink_to(folder)  # another one was there before
    later = SimpleNamespace(lora_name="a", lora_path=str(link))
    changed = link.lstat().st_ctime
    assert facts.adapter_id(later, since=changed + 60, mark="m") == plain
    assert facts.adapter_id(later, since=changed, mark="m") == mine


def test_ranks_of_replicas_have_numbers_of_their_own(config: Any) -> None:
    config.parallel_config.data_parallel_size = 3
    config.parallel_config.data_parallel_index = 2
    assert facts.rank_of(config) == (1, 2, 5, 6)


def test_pages_that_are_written_before_the_orders_are_told_are_refused(config: Any) -> None:
    zeroed = SimpleNamespace(needs_kv_cache_zeroing=True)
    plain = SimpleNamespace(needs_kv_cache_zeroing=False)
    facts.check_order(config, zeroed)
    config.use_v2_model_runner = True
    facts.check_order(config, plain)
    with pytest.raises(AttachError, match="fills new pages with zeros"):
        facts.check_order(config, zeroed)
    config.cache_config.prefix_match_unit = 16
    with pytest.raises(AttachError, match="prefix-match-unit"):
        facts.check_order(config, plain)


def test_canvases_are_refused(config: Any) -> None:
    facts.check_supported(config)
    config.model_config.is_diffusion = True
    with pytest.raises(AttachError, match="diffusion"):
        facts.check_supported(config)


def test_split_contexts_are_refused(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(AttachError, match="--decode-context-parallel-size 1"):
        facts.check_supported(config)


def test_settings_are_strict(config: Any) -> None:
    transfer = config.kv_transfer_config
    host = {"tiers": [{"kind": "host", "capacity": "64MiB"}]}
    transfer.kv_connector_extra_config = {"weights": "v1", "block_tokens": 32, "config": host}
    own = connector_settings(config)
    assert (own.settings.block_tokens, own.weights, own.token) == (32, "v1", None)
    transfer.kv_connector_extra_config = {"block_token": 32}
    with pytest.raises(ConfigError, match="block_tokens"):
        connector_settings(config)
    transfer.kv_connector_extra_config = {"weights": 1}
    with pytest.raises(ConfigError, match="weights is a text"):
        connector_settings(config)
    transfer.kv_connector_extra_config = {}
    with pytest.raises(ConfigError, match="no tiers"):
        connector_settings(config)
    transfer.kv_load_failure_policy = "fail"
    with pytest.raises(ConfigError, match="kv_load_failure_policy='recompute'"):
        connector_settings(config)


# ---------------------------------------------------------------------- page groups


def spec(name: str, **values: Any) -> Any:
    kind = type(name, (), {})
    made = kind()
    vars(made).update({"block_size": 4, "head_size": 3, "head_size_v": 3, **values})
    return made


def cache_config(*groups: tuple[Any, list[str]], blocks: int = 5) -> Any:
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_layout="LBHNC",
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=s, layer_names=n) for s, n in groups],
    )


def test_pages_in_any_dense_order_are_bytes() -> None:
    rows = torch.arange(5 * 2 * 4 * 6, dtype=torch.float32).view(5, 4, 2, 6)
    caches = {"layers.0": rows.transpose(1, 2)}  # tokens before heads
    config = cache_config((spec("FullAttentionSpec"), ["layers.0"]))
    (group,) = page_groups(caches, config, {"layers.0": "X"})
    page = group.layers[0].tensors["page"]
    assert (page.shape, page.dtype) == ((5, 1, 4, 48), torch.uint8)
    assert bytes(page[3].contiguous().numpy()) == rows[3].numpy().tobytes()
    assert shapes([group]) == (("full", None, 4),)


def test_kernel_blocks_make_pages() -> None:
    caches = {"layers.0": torch.zeros(10, 2, 2, 6)}  # two kernel blocks of 2 tokens a page
    config = cache_config((spec("FullAttentionSpec"), ["layers.0"]))
    (group,) = page_groups(caches, config, {"layers.0": "X"})
    assert group.layers[0].tensors["page"].shape == (5, 1, 4, 48)


def test_pages_with_other_layers_between_their_heads_are_taken_head_by_head() -> None:
    pool = torch.zeros(5, 2, 3, 4, 6)  # block, head, layer, token, content
    caches = {f"layers.{n}": pool[:, :, n] for n in range(3)}
    config = cache_config((spec("FullAttentionSpec"), list(caches)))
    (group,) = page_groups(caches, config, dict.fromkeys(caches, "X"))
    assert group.layers[1].tensors["cells"].shape == (5, 2, 4, 24)
    PagePools([group]).layout(4)


def test_described_pages_have_true_axes() -> None:
    keys, values = torch.randn(5, 2, 4, 3), torch.randn(5, 2, 4, 3)
    halves = torch.cat([keys, values], dim=-1)
    # the CPU's: each head's page holds K channel by channel, then V token by token
    packed = torch.cat([keys.transpose(2, 3).flatten(2), values.flatten(2)], dim=-1)
    config = cache_config((spec("FullAttentionSpec"), ["layers.7"]))
    for backend, cache in (
        ("FLASH_ATTN", halves),
        ("TRITON_ATTN", halves.transpose(1, 2).contiguous().transpose(1, 2)),
        ("CPU_ATTN/vec", packed.view(5, 2, 4, 6)),
    ):
        (group,) = page_groups({"layers.7": cache}, config, {"layers.7": backend}, described=True)
        layer = group.layers[0]
        assert layer.index == 7
        assert torch.equal(layer.tensors["k"], keys), backend
        assert torch.equal(layer.tensors["v"], values), backend
    with pytest.raises(AttachError, match=r"CPU_ATTN/amx.*cannot be described"):
        page_groups({"layers.7": halves}, config, {"layers.7": "CPU_ATTN/amx"}, described=True)


def test_groups_of_several_kinds() -> None:
    caches = {f"layers.{n}": torch.zeros(5, 1, 4, 3) for n in range(3)}
    caches["layers.9"] = caches["layers.0"]  # uses another layer's KV
    config = cache_config(
        (spec("SlidingWindowSpec", sliding_window=8), ["layers.1"]),
        (spec("MLAAttentionSpec", head_size_v=0), ["layers.0", "layers.2", "layers.9"]),
    )
    sliding, latent = page_groups(caches, config, dict.fromkeys(caches, "X"))
    assert (sliding.kind, sliding.window) == (GroupKind.SLIDING, 8)
    assert (latent.kind, [layer.index for layer in latent.layers]) == (GroupKind.LATENT, [0, 2])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("MambaSpec", "set --enable-prefix-caching"),  # states of the running token only
        ("ChunkedLocalAttentionSpec", "set --disable-hybrid-kv-cache-manager"),
        ("CrossAttentionSpec", "CrossAttentionSpec.*take the connector out"),
    ],
)
def test_kinds_that_cannot_be_brought_back_are_refused(name: str, advice: str) -> None:
    config = cache_config((spec(name), ["layers.0"]))
    with pytest.raises(AttachError, match=advice):
        page_groups({"layers.0": torch.zeros(5, 1, 4, 3)}, config, {"layers.0": "X"})


# ---------------------------------------------------------------------- events


def test_events_follow_what_comes_and_goes() -> None:
    book = EventBook(2, storage=0b10)
    key = BlockKey(b"k" * 32)
    part = part_id(key, 1)
    book.changed(part, 0b10)  # an earlier process stored it; nobody knows its name yet
    assert book.take() == []
    book.seen(key, [b"h1", b"h2"], b"h0", range(8), "lora")
    (stored,) = book.take()
    assert stored == ((b"h1", b"h2"), b"h0", tuple(range(8)), 4, STORAGE, 1, "lora")
    book.changed(part, 0b11)
    assert [event.medium for event in book.take()] == [CPU]
    book.changed(part, 0b01)
    assert book.take() == [Removed((b"h1", b"h2"), STORAGE, 1)]
    book.changed(part, 0)
    assert book.take() == [Removed((b"h1", b"h2"), CPU, 1)]
    assert book.take() == []


def test_the_book_of_events_is_bounded() -> None:
    book = EventBook(1, storage=0, most=2)
    for number in range(4):
        book.seen(BlockKey(bytes([number]) * 32), [b"h"], None, [1])
    for number in range(4):
        book.changed(part_id(BlockKey(bytes([number]) * 32), 0), 1)
    assert len(book.take()) == 2


def test_the_package_needs_no_vllm() -> None:
    code = (
        "import sys, tierkv_adapters.vllm as v, tierkv_adapters.vllm.plugin\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
        "assert {'TierKVConnector', 'register'} <= set(dir(v))\n"
        "v.register()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
