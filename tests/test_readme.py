"""README is held to the code: its commands, its examples, its tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tierkv import load_config
from tierkv.config import EngineConfig, Tier

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DEMO = "pip install -c constraints.txt -e '.[demo]' && tierkv demo"
TEST = "pip install -c constraints.txt -e '.[test]' && pytest"


def _fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_two_commands_stand_there_word_for_word() -> None:
    assert [fence.strip() for fence in _fences("sh")] == [DEMO, TEST]


def test_f089_ci_runs_the_very_command_of_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r'grep -m 1 "(.*)" README\.md', script)
    assert pattern is not None
    found = subprocess.run(
        ["grep", "-c", pattern[1], ROOT / "README.md"], capture_output=True, text=True, check=True
    )

    assert found.stdout.strip() == "1"
    assert re.search(
        r'^inside full bash -c "\$README_TEST".*\|\| status=\$\?$', script, re.MULTILINE
    )
    assert script.rstrip().endswith('exit "$status"')
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    for path in [ROOT / "README.md", ROOT / ".ci" / "run", *(ROOT / "tierkv").rglob("*.py")]:
        for arguments in re.findall(r"pip install ([^&\n]*)", path.read_text()):
            strangers = [a for a in arguments.split() if re.match(r"['\"]?tierkv\b(?!-engine)", a)]
            assert not strangers, path


def test_the_first_example_runs(tmp_path: Path) -> None:
    example = _fences("python")[0]
    assert len(example.splitlines()) <= 30
    for tier in ("host", "nvme"):  # the second time the blocks are those of the first
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"96 of 96 tokens from {{'{tier}': 96}}\n"


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tiny_model() -> dict[str, Any]:
    """A random model and a tokenizer of characters: the example's own words, in a second."""
    reason = "the hf extra is not installed"
    transformers = pytest.importorskip("transformers", reason=reason)
    tokenizers = pytest.importorskip("tokenizers", reason=reason)
    import torch

    letters = {chr(code): code - 32 for code in range(32, 127)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="~"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    config = transformers.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = TEMPLATE
    return {"model": transformers.LlamaForCausalLM(config).eval(), "tokenizer": tokenizer}


def test_the_adapter_example_runs(
    tiny_model: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = compile(_fences("python")[1], "README.md", "exec")
    exec(compiled, tiny_model)

    reused = int(capsys.readouterr().out.splitlines()[-1])
    seen = len(f"[user]{tiny_model['first']}[assistant]") + 24
    assert reused == (seen - 1) // 16 * 16


@pytest.mark.model
def test_the_adapter_example_shows_something_with_a_real_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tests.models import load_model

    model, tokenizer = load_model("smollm2")
    compiled = compile(_fences("python")[1], "README.md", "exec")
    exec(compiled, {"model": model, "tokenizer": tokenizer})

    *text, reused = capsys.readouterr().out.splitlines()
    assert "".join(text).strip()
    assert int(reused) >= 32


def test_the_toml_example_is_a_configuration() -> None:
    (example,) = _fences("toml")
    config, _ = load_config(tomllib.loads(example))

    assert config == EngineConfig(
        [
            Tier("host", "8GiB"),
            Tier("nvme", "200GiB", path="/var/cache/tierkv/{worker}", codec="zstd"),
        ]
    )


def test_environment_examples_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"`(TIERKV_[A-Z_]+)='?(.*?)'?`", README)
    assert len(examples) == 2
    for name, value in examples:
        monkeypatch.setenv(name, value)

    config, _ = load_config()

    assert config.tiers == (Tier("host", "8GiB"),)
    assert config.tenants["acme"]["quota"] == {"host": 2**30}


@pytest.mark.parametrize(
    ("title", "spec"), [("Setting", EngineConfig), ("Tier setting", Tier)], ids=["engine", "tier"]
)
def test_f081_the_tables_show_the_real_defaults(title: str, spec: type) -> None:
    head = README.index(f"| {title} | Default |")
    table = README[head:].partition("\n\n")[0]
    shown = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)

    real = []
    for field in fields(spec):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        text = "required" if default is MISSING else f"`{default!r}`".replace("'", '"')
        real.append((field.name, text))
    assert shown == real


def test_where_things_live_names_what_exists() -> None:
    for dotted in re.findall(r"`(tierkv\.abc\.\w+)", README):
        module, _, name = dotted.rpartition(".")
        assert hasattr(sys.modules.get(module) or __import__(module, fromlist=["x"]), name), dotted
    for path in re.findall(r"\| `((?:backends|codecs|adapters|tierkv)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path
