from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import typer

import tierkv
from tierkv import cli, jit, registry
from tierkv.cli import LazyCommand, main
from tierkv_backends.host import HostBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOML = """
threads = 2
[[tiers]]
kind = "vault"
name = "host"
capacity = "1GiB"
options = { password = "hunter2", segment = 3 }
[tenants.acme.quota]
host = "1MiB"
"""


class Vault(HostBackend):
    """A third party's backend whose options hold a secret."""

    def __init__(self, tier: tierkv.Tier) -> None:
        super().__init__(dataclasses.replace(tier, options={}))


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = type(sys)("tests_fake_backend")
    module.Vault = Vault  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_fake_backend", module)
    row = ("tests_fake_backend:Vault", "install the vault")
    monkeypatch.setitem(registry._BUILT_IN, ("backends", "vault"), row)
    path = tmp_path / "tierkv.toml"
    path.write_text(TOML)
    return path


def _run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )


def test_f078_config_show_gives_each_value_and_its_source(
    toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_TENANTS__ACME__SESSION_QUOTA", "1024")

    assert main(["config", "show", "--sources", str(toml)]) == 0

    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert f"threads = 2  # {toml}" in lines
    assert f"tiers[0].capacity = {2**30}  # {toml}" in lines
    assert f"tenants.acme.quota.host = {2**20}  # {toml}" in lines
    assert "tenants.acme.session_quota = 1024  # TIERKV_TENANTS__ACME__SESSION_QUOTA" in lines
    assert 'policy = "lrfu"  # default' in lines
    assert f'tiers[0].name = "host"  # {toml}' in lines
    assert "tiers[0].high = 0.95  # default" in lines
    assert "tiers[0].codec is unset  # default" in lines
    assert "tenants.acme.reserved = {}  # default" in lines
    assert "metrics_port is unset  # default" in lines
    assert "1 tier, 1 GiB together, for each process" in err  # F082: whose bytes they are


def test_config_show_as_json_is_read_back_equal(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--json", "--sources", str(toml)]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["schema_version"] == 1
    assert shown["sources"]["threads"] == str(toml)
    assert shown["sources"]["tiers[0].low"] == "default"
    assert shown["config"]["metrics_port"] is None
    shown["config"]["tiers"][0]["options"]["password"] = "hunter2"
    assert tierkv.load_config(shown["config"]).config == tierkv.load_config(toml).config


def test_config_show_prints_no_secret(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--json"]):
        assert main(["config", "show", *flags, str(toml)]) == 0
        out = capsys.readouterr().out
        assert "hunter2" not in out
        assert "***" in out


def test_a_wrong_configuration_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("thread = 3\n")

    assert main(["config", "show", str(path)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean 'threads'" in err
    assert main(["config", "show", "--frob"]) == 2
    assert main(["frobnicate"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = 'hst'\ncapacity = '1GiB'", "did you mean 'host'"),
        ("kind = 'nvme'\ncapacity = '1GiB'", "needs a path"),
        ("kind = 'nvme'\ncapacity = '1GiB'\npath = ''", "names no directory"),
        ("kind = 'nvme'\ncapacity = '1GiB'\npath = \"a\\u0000b\"", "names no directory"),
        ("kind = 'host'\ncapacity = '1GiB'\n[top]\ntrace = ''", "names no file"),
        ("kind = 'host'\ncapacity = '1GiB'\nhigh = nan", "0 < low <= high <= 1"),
        ("kind = 'host'\ncapacity = 0", "cannot hold even the smallest block"),
        ("kind = 'host'\ncapacity = -1", "cannot be negative"),
        ("kind = 'nvme'\ncapacity = '1GiB'\npath = 'kv/{wrker}'", "unknown placeholder {wrker}"),
        ("kind = 'host'\ncapacity = '1GiB'\npolicy = 'lrux'", "unknown name 'lrux'"),
        ("kind = 'host'\ncapacity = '1GiB'\ncodec = 'zst'", "did you mean 'zstd'"),
        ("kind = 'host'\ncapacity = '1GiB'\noptions = { tuoch = 1 }", "no option 'tuoch'"),
        ("kind = 'host'\ncapacity = '1GiB'\nadmission = 'tinlfu'", "did you mean 'tinylfu'"),
        ("kind = 'host'\ncapacity = '1GiB'\n[top]\nprefetch = 'arivl'", "did you mean 'arrival'"),
        ("kind = 'host'\ncapacity = '1GiB'\n[top]\nprefetch = 'oracle'", "works offline"),
    ],
)
def test_config_show_refuses_what_no_engine_could_be_opened_with(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.toml"
    tier, _, setting = text.partition("[top]")
    path.write_text(f"{setting}\n[[tiers]]\n{tier}\n")

    assert main(["config", "show", str(path)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert str(path) in err
    assert len(err.splitlines()) == 1


def test_config_show_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, root = tmp_path / "good.toml", tmp_path / "kv"
    path.write_text(f"[[tiers]]\nkind = 'nvme'\ncapacity = '1GiB'\npath = '{root}'\n")

    assert main(["config", "show", str(path)]) == 0
    assert "nvme" in capsys.readouterr().out
    assert not root.exists()


def test_a_full_disk_is_said_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text("[[tiers]]\nkind = 'host'\ncapacity = '1GiB'\n")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "tierkv", "config", "show", str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "tierkv: [Errno 28] No space left on device"
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{tierkv.__version__}\n"
    assert main(["version", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema_version"] == 1
    assert facts["tierkv"] == tierkv.__version__
    assert {"host", "nvme"} <= set(facts["plugins"]["backends"])
    assert facts["machine_code"] is (jit.host() is not None)
    assert main(["version"]) == 0
    assert {"backends", "machine"} <= set(capsys.readouterr().out.split())


def test_version_tells_which_adapters_have_something_to_adapt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "lacks", lambda kind, name: "vllm" if name == "vllm" else None)

    assert main(["version", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plugins"]["adapters"] == ["hf", "trtllm", "vllm"]
    assert facts["not_installed"] == {"adapters": {"vllm": "vllm"}}
    assert main(["version"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("adapters")]
    assert line.split(maxsplit=1)[1] == "hf trtllm vllm (vllm is not installed)"


def test_version_imports_no_plug_in_and_no_engine() -> None:
    code = (
        "import sys; from tierkv.cli import main; main(['version']); heavy = {'torch', "
        "'transformers', 'vllm', 'tensorrt_llm', 'tierkv_adapters', 'tierkv_backends', "
        "'tierkv_codecs'} & set(sys.modules); sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def _command(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None] | None) -> None:
    target = "tierkv_no_such_module:x" if function is None else "tests_fake_command:run"
    if function is not None:
        module = type(sys)("tests_fake_command")
        module.run = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tests_fake_command", module)
    fresh = typer.Typer(add_completion=False, rich_markup_mode=None)
    fresh.callback()(lambda: None)
    monkeypatch.setattr(cli, "app", fresh)
    cli._register(LazyCommand("fake", target, "A fake command.", "install the fake"))


def test_a_later_command_gets_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, count: int = 1) -> None:
        """Say it."""
        print(name * count)

    _command(monkeypatch, run)

    assert main(["fake", "ab", "--count", "2"]) == 0
    assert capsys.readouterr().out == "abab\n"
    assert main(["fake", "--help"]) == 0
    assert "--count" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "A fake command." in capsys.readouterr().out
    assert main(["fake", "--nope"]) == 2


def test_the_help_of_a_later_command_fills_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        """Do it.

        This sentence is about as long as a line of source may be, and a word or two longer than
        that; so a terminal of eighty columns must not show where it was broken.
        """

    monkeypatch.setenv("COLUMNS", "80")
    _command(monkeypatch, run)

    assert main(["fake", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "This sentence" in line)
    for line, following in zip(lines[first : first + 2], lines[first + 1 :], strict=False):
        assert len(f"{line} {following.split()[0]}") > 76, lines


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (tierkv.errors.BackendError("nvme", "broken"), 1),
        (tierkv.errors.ConfigError("wrong"), 2),
        (tierkv.errors.MissingDependencyError("not installed"), 2),
        (OSError(28, "the disk is full"), 1),
        (KeyboardInterrupt(), 130),
        (typer.Exit(7), 7),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def run() -> None:
        raise error

    _command(monkeypatch, run)

    assert main(["fake"]) == code


def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _command(monkeypatch, None)

    assert main(["fake"]) == 2
    assert "install the fake" in capsys.readouterr().err


def test_every_row_of_the_table_is_in_the_help() -> None:
    result = _run("--help")

    assert result.returncode == 0
    for row in cli.COMMANDS:
        assert row.name in result.stdout
        assert row.help in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout


def test_help_is_quick_and_loads_neither_torch_nor_a_plug_in() -> None:
    code = (
        "import sys; from tierkv.cli import main; main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'tierkv_backends', 'tierkv_codecs', "
        "'tierkv_adapters'} & set(sys.modules); sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")

    used = []
    for _ in range(3):  # CPU time, best of three: the machine may be busy
        before = os.times()
        assert _run("--help").returncode == 0
        after = os.times()
        used.append(after.children_user + after.children_system)
        used[-1] -= before.children_user + before.children_system
    assert min(used) < 0.3, used


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "tierkv", "version"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)

    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff\xfe", b"a = 1\n"])
def test_a_file_that_is_no_configuration_is_told_in_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)

    for odd in (path, tmp_path / "none.toml"):
        assert main(["config", "show", str(odd)]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert err.startswith("tierkv: ")


@pytest.mark.parametrize(("name", "option"), [("demo", "--keep"), ("codec-report", "--chains")])
def test_help_can_be_read_before_an_extra_is_installed(name: str, option: str) -> None:
    lacking = ("transformers", "gguf", "safetensors", "tokenizers", "torch", "matplotlib")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); "
        f"from tierkv.cli import main; code = main(['{name}', '--help']); "
        f"sys.exit(10 * code + main(['{name}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 2, done.stderr
    assert option in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tierkv: tierkv {name} needs ")
    assert line.endswith("which is not installed; pip install -c constraints.txt -e '.[demo]'")


def test_no_color_is_kept() -> None:
    assert "\x1b" not in _run("config", "--help", NO_COLOR="1", FORCE_COLOR="1").stdout
