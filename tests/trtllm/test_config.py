"""Where settings come from, and which of the runtime's are refused (property T12, T11)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.trtllm.running import configure
from tierkv.errors import ConfigError, LayoutError
from tierkv.testing.trtllm import FakeLlmArgs, Mode
from tierkv.testing.trtllm.args import FakeKvCacheConfig
from tierkv_adapters.trtllm import TierKVConnectorScheduler, TierKVConnectorWorker
from tierkv_adapters.trtllm.bases import MODULE_PATHS, find_bases, rank_of
from tierkv_adapters.trtllm.identity import identity_of
from tierkv_adapters.trtllm.requests import request_facts
from tierkv_adapters.trtllm.settings import VARIABLE, read_config
from tierkv_adapters.trtllm.shapes import read_facts, write_facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOST = '[[tiers]]\nkind = "host"\ncapacity = "1MiB"\n'


@pytest.mark.parametrize("make", [TierKVConnectorScheduler, TierKVConnectorWorker])
@pytest.mark.parametrize(
    ("changes", "cache", "named"),
    [
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, {}, "context_parallel_size"),
        ({"enable_attention_dp": True}, {}, "enable_attention_dp"),
        ({"max_beam_width": 4}, {}, "max_beam_width"),
        ({"backend": "tensorrt"}, {}, "backend"),
        ({}, {"host_cache_size": 1 << 30}, "host_cache_size"),
        ({}, {"sink_token_length": 4}, "sink_token_length"),
        ({}, {"cross_kv_cache_fraction": 0.5}, "cross_kv_cache_fraction"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_t12_unsupported_settings_are_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], object],
    changes: dict[str, Any],
    cache: dict[str, Any],
    named: str,
) -> None:
    configure(tmp_path, monkeypatch)
    args = FakeLlmArgs(kv_cache_config=FakeKvCacheConfig(**cache), **changes)
    with pytest.raises(ConfigError, match=named):
        make(args)


def test_t12_all_problems_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch)
    args = FakeLlmArgs(max_beam_width=2, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size.*max_beam_width"):
        TierKVConnectorWorker(args)


def test_t12_windows_of_the_flat_pool_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    configure(tmp_path, monkeypatch)
    cache = FakeKvCacheConfig(max_attention_window=[1024, 4096])
    worker = TierKVConnectorWorker(FakeLlmArgs(kv_cache_config=cache), rank=0)
    with pytest.raises(ConfigError, match="max_attention_window"):
        worker.register_kv_caches(torch.zeros(2, 2, 2, 64))


@pytest.mark.parametrize("paths", [MODULE_PATHS, MODULE_PATHS[1:]], ids=["newer", "older"])
def test_t11_base_classes_come_from_either_module(
    monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...]
) -> None:
    found = ModuleType(paths[0])
    found.KvCacheConnectorScheduler = type("Scheduler", (), {})  # type: ignore[attr-defined]
    found.KvCacheConnectorWorker = type("Worker", (), {})  # type: ignore[attr-defined]
    parts = paths[0].split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, paths[0], found)

    scheduler, worker, path = find_bases()
    assert (scheduler.__name__, worker.__name__, path) == ("Scheduler", "Worker", paths[0])


def test_an_unknown_generation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("tensorrt_llm")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    with pytest.raises(ConfigError, match="none of"):
        find_bases()


def test_without_the_runtime_stand_ins_take_its_place() -> None:
    if "tensorrt_llm" in sys.modules:
        pytest.skip("TensorRT-LLM is installed")
    _, worker, path = find_bases()
    one = worker({})
    one.bind_connector_meta("meta")
    assert (one.get_connector_meta(), path) == ("meta", None)


def test_importing_the_package_loads_no_other_engine() -> None:
    code = (
        "import tierkv_adapters.trtllm, sys; "
        "sys.exit(', '.join({'vllm', 'transformers', 'pydantic'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0


# ---------------------------------------------------------------------- the file


def test_the_file_holds_three_kinds_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        f'policy = "lru"\n[serving]\nblock_tokens = 32\n[identity]\nmodel = "m"\n{HOST}'
    )
    monkeypatch.setenv(VARIABLE, str(file))
    config = read_config()

    assert config.engine.policy == "lru"
    assert config.serving.block_tokens == 32
    assert (config.model, config.weights) == ("m", None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[serving]\nblock_token = 4\n", "block_token"),
        ("[serving]\nlayout = 'described'\n", "opaque"),
        ("[serving]\nconfig = 'x.toml'\n", r"serving\.config"),
        ("[identity]\nweight = 'x'\n", "weight"),
        ("[identity]\nweights = 3\n", "weights"),
        ("serving = 3\n", "serving must be a table"),
        ("polcy = 'lru'\n", "polcy"),
        ("[[[\n", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    file = tmp_path / "t.toml"
    file.write_text(text + HOST if not text.startswith("serving") else text)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ConfigError, match=named) as caught:
        read_config()
    assert str(file) in str(caught.value)


def test_a_missing_file_and_missing_tiers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_config()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=rf"{VARIABLE} is not set.*no tiers"):
        read_config()


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TIERKV_TIERS", '[{"kind": "host", "capacity": "1MiB"}]')
    assert read_config().engine.tiers[0].capacity_bytes == 1 << 20


def test_lossy_codecs_and_a_slow_first_tier_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    file = configure(tmp_path, monkeypatch)
    good = file.read_text()
    file.write_text(good + 'codec = "int8"\n')
    with pytest.raises(ConfigError, match="lossy"):
        TierKVConnectorWorker(FakeLlmArgs(), rank=0)
    file.write_text(
        f'[identity]\nweights = "w"\n[[tiers]]\nkind = "nvme"\ncapacity = "32MiB"\n'
        f'path = "{tmp_path}/kv"\n'
    )
    worker = TierKVConnectorWorker(FakeLlmArgs(), rank=0)
    with pytest.raises(ConfigError, match="'host' tier before it"):
        worker.register_kv_caches(torch.zeros(4, 2, 2, 64))


def test_a_socket_folder_that_cannot_serve_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    for folder in (deep, tmp_path / "missing"):
        configure(tmp_path, monkeypatch, serving=f'socket_dir = "{folder}"')
        with pytest.raises(ConfigError, match="socket_dir"):
            TierKVConnectorScheduler(FakeLlmArgs())
        deep.mkdir(exist_ok=True)


# ---------------------------------------------------------------------- who computes


def test_the_weights_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    configure(tmp_path, monkeypatch)
    config = replace(read_config(), weights=None)
    model = tmp_path / "model"
    model.mkdir()
    args = FakeLlmArgs(model=str(model))
    with pytest.raises(ConfigError, match=r"\[identity\] weights"):
        identity_of(args, config, (0, 1))
    (model / "model.safetensors").write_bytes(b"one")
    one = identity_of(args, config, (0, 1))
    assert one == identity_of(args, config, (0, 1))
    assert one.model == "trtllm:model"
    (model / "config.json").write_text('{"rope_theta": 1}')
    two = identity_of(args, config, (0, 1))
    (model / "model.safetensors").write_bytes(b"two")
    three = identity_of(args, config, (0, 1))
    assert len({one.weights, two.weights, three.weights}) == 3


def _fields(args: FakeLlmArgs) -> dict[str, Any]:
    return {each.name: getattr(args, each.name) for each in fields(args)}


def test_i1_settings_that_change_the_kv_change_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch)
    config = replace(read_config(), weights="w")
    args = [
        FakeLlmArgs(),
        SimpleNamespace(**_fields(FakeLlmArgs()), load_format="AUTO"),
        FakeLlmArgs(speculative_config=SimpleNamespace(max_draft_len=3)),
        FakeLlmArgs(kv_cache_config=FakeKvCacheConfig(max_attention_window=[512])),
        FakeLlmArgs(kv_cache_config=FakeKvCacheConfig(max_attention_window=[1024])),
    ]
    found = [identity_of(each, config, (0, 1)) for each in args]
    assert len(set(found)) == len(found)
    assert found == [identity_of(each, config, (0, 1)) for each in args]


def test_i1_weights_that_are_random_are_those_of_one_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch)
    args = SimpleNamespace(**_fields(FakeLlmArgs()), load_format="dummy")
    config = replace(read_config(), weights="w")
    found = {identity_of(args, config, (0, 1)).weights for _ in range(2)}
    assert len(found) == 2
    assert "w" not in found


def test_the_rank_comes_from_the_launcher_or_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert rank_of(FakeLlmArgs()) == (0, 1)
    two = FakeLlmArgs.of(Mode(ranks=2))
    with pytest.raises(ConfigError, match="which rank"):
        rank_of(two)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert rank_of(two) == (1, 2)
    with pytest.raises(ConfigError, match="does not fit"):
        rank_of(two, 2)


def test_what_a_rank_tells_of_itself_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    configure(tmp_path, monkeypatch)
    worker = TierKVConnectorWorker(FakeLlmArgs.of(Mode()), rank=0)
    worker.register_kv_caches(torch.zeros(4, 2, 2, 64))
    facts = worker._facts
    worker.shutdown()
    assert facts is not None
    folder = str(tmp_path)
    assert read_facts(folder, 0, 1) is None
    write_facts(folder, facts)
    assert read_facts(folder, 0, 1) == facts
    with pytest.raises(LayoutError, match="rank 0"):
        read_facts(folder, 0, 2)
    file = tmp_path / "rank0.json"
    for damage in ("{", "[]", "{}", file.read_text().replace('"format": 2', '"format": 9')):
        file.write_text(damage)
        with pytest.raises(LayoutError, match="cannot be read"):
            read_facts(folder, 0, 1)


# ---------------------------------------------------------------------- what a request says


def _request(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"request_id": 7} | changes))


def test_f010_salt_adapter_and_media_reach_the_facts() -> None:
    plain, why = request_facts(_request(), 10)
    assert (plain.salt, plain.adapter, plain.media, why) == (b"", None, (), None)
    texts = [request_facts(_request(cache_salt=s), 10).facts.salt for s in ("a", "b", "")]
    number = request_facts(_request(cache_salt_id=5), 10).facts.salt
    assert len({b"", number, *texts}) == 5
    one, two = (request_facts(_request(lora_task_id=n), 10).facts.adapter for n in (1, 2))
    assert one is not None
    assert two is not None
    assert one.name != two.name
    seen = request_facts(
        _request(multimodal_hashes=[[1] * 8, [-2] * 8], multimodal_positions=[1, 5]), 10
    )
    assert [item.position for item in seen.facts.media] == [1, 5]
    assert seen.facts.media[0].digest != seen.facts.media[1].digest


@pytest.mark.parametrize(
    "changes",
    [
        {"multimodal_positions": [1], "multimodal_lengths": [3]},
        {"multimodal_hashes": [[1] * 8], "multimodal_positions": [1, 2]},
        {"multimodal_hashes": [[1] * 8], "multimodal_positions": [99]},
        {"prompt_embedding_table": object()},
        {"is_dummy_request": True},
        {"is_generation_only_request": lambda: True},
    ],
    ids=repr,
)
def test_a_request_whose_kv_is_not_named_by_what_is_known_is_not_cached(
    changes: dict[str, Any],
) -> None:
    assert request_facts(_request(**changes), 10).why_not is not None
