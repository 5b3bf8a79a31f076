from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.config import (
    OWN_VARIABLES,
    CompressionPolicy,
    EngineConfig,
    Hybrid,
    Policy,
    Tier,
    load_config,
    resolve_policies,
    tier_chain,
    to_plain,
)
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
block_tokens = 16
staging = "64MiB"
compression = "zstd"
tick = "500ms"

[policy]
rules = [{ name = "lru", tier = "ram" }, { name = "lrfu" }]

[[tiers]]
kind = "host"
name = "ram"
capacity = "1GiB"
codec = "raw"

[[tiers]]
kind = "nvme"
capacity = "8GB"
path = "/var/cache/kv/{worker}"
write_through = false
options = { segment = "64MiB" }

[tenants.acme]
session_quota = "1MiB"
quota = { ram = "512MiB" }
"""

CODE = EngineConfig(
    tiers=[
        Tier("host", "1GiB", name="ram", codec="raw"),
        Tier(
            "nvme",
            8 * 10**9,
            path="/var/cache/kv/{worker}",
            write_through=False,
            options={"segment": "64MiB"},
        ),
    ],
    policy=Hybrid([Policy("lru", tier="ram"), Policy("lrfu")]),
    compression="zstd",
    block_tokens=16,
    staging=64 * 2**20,
    tick=0.5,
    tenants={"acme": {"session_quota": 2**20, "quota": {"ram": 2**29}}},
)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "tierkv.toml"
    path.write_text(TOML)
    return path


def test_the_same_composition_in_a_file_and_in_code_is_equal(toml: Path) -> None:
    config, _ = load_config(toml)

    assert config == CODE
    assert load_config(str(toml)).config == load_config(to_plain(CODE)).config == CODE


def test_a_resolved_config_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_THREADS", "9")

    config, sources = load_config(CODE, busy="refuse")

    assert config == CODE.replace(busy="refuse")
    assert (sources["threads"], sources["busy"]) == ("EngineConfig", "argument")


def test_later_layers_win_and_each_source_is_known(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_BLOCK_TOKENS", "32")
    monkeypatch.setenv("TIERKV_STAGING", "32MiB")
    monkeypatch.setenv("TIERKV_TENANTS__ACME__QUOTA__NVME", "3GB")
    monkeypatch.setenv("TIERKV_TENANTS__BETA__SESSION_QUOTA", "1024")

    config, sources = load_config(toml, staging="16MiB")

    assert (config.block_tokens, config.staging, config.tick) == (32, 2**24, 0.5)
    assert config.tenants == {
        "acme": {
            "quota": {"ram": 2**29, "nvme": 3 * 10**9},
            "reserved": {},
            "session_quota": 2**20,
        },
        "beta": {"quota": {}, "reserved": {}, "session_quota": 1024},
    }
    told = {name: origin for name, origin in sources.items() if origin != "default"}
    assert told == {
        "block_tokens": "TIERKV_BLOCK_TOKENS",
        "staging": "argument",
        "tenants.acme.quota.nvme": "TIERKV_TENANTS__ACME__QUOTA__NVME",
        "tenants.beta.session_quota": "TIERKV_TENANTS__BETA__SESSION_QUOTA",
        **dict.fromkeys(
            (
                "tiers",
                "policy",
                "compression",
                "tick",
                "tenants.acme.session_quota",
                "tenants.acme.quota.ram",
            ),
            str(toml),
        ),
    }
    assert sources["threads"] == "default"


def test_the_environment_alone_can_configure_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = to_plain(CODE)
    for name, value in plain.items():
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv(f"TIERKV_{name.upper()}", text)
    monkeypatch.setenv("TIERKV_METRICS_PORT", "none")

    config, sources = load_config()

    assert config == CODE
    assert sources["tiers"] == "TIERKV_TIERS"


def test_the_environment_takes_lists_and_tables_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_TIERS", '[{"kind": "host", "capacity": "2MiB"}]')
    monkeypatch.setenv("TIERKV_POLICY", '[{"name": "lru"}]')
    monkeypatch.setenv("TIERKV_COMPRESSION", '{"chain": "int8"}')
    monkeypatch.setenv("TIERKV_VERIFY_HOST", "off")

    config, _ = load_config()

    assert config == EngineConfig(
        [Tier("host", 2**21)],
        policy=Hybrid([Policy("lru")]),
        compression=CompressionPolicy("int8"),
        verify_host=False,
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TIERKV_THREADZ", "2", "unknown environment variable TIERKV_THREADZ.*'TIERKV_THREADS'"),
        ("TIERKV_LOCAL_DISK", "2", "unknown environment variable TIERKV_LOCAL_DISK"),
        ("TIERKV_THREADS", "two", "TIERKV_THREADS: .*integer.*'two'"),
        ("TIERKV_METRICS", "maybe", "TIERKV_METRICS: .*boolean"),
        ("TIERKV_TIERS", "[{", "TIERKV_TIERS must be valid JSON"),
        ("TIERKV_TIERS", '[{"kind": "host", "capcity": 1}]', "TIERKV_TIERS.*'capcity'.*'capacity'"),
        ("TIERKV_STAGING", "3 bananas", r"staging: not a size.*\(from TIERKV_STAGING\)"),
        ("TIERKV_BUSY", "no", r"busy must be.*\(from TIERKV_BUSY\)"),
        (
            "TIERKV_TENANTS__ACME__QUOTO__RAM",
            "1",
            r"'quoto'.*'quota'.*\(from TIERKV_TENANTS__ACME__QUOTO__RAM\)",
        ),
    ],
)
def test_f078_a_mistake_in_the_environment(
    toml: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigError, match=message):
        load_config(toml)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("blok_tokens = 3", r"unknown setting 'blok_tokens' \(from .*toml\); .*'block_tokens'"),
        ("threads = '4'", r"threads must be int, not '4' \(from .*toml\)"),
        ("threads = true", r"threads must be int, not True \(from .*toml\)"),
        ("threads = 0", r"threads must be positive, not 0 \(from .*toml\)"),
        ("write_queue = '1 gigabyte'", r"write_queue: not a size.*\(from .*toml\)"),
        ("policy = { nam = 'lru' }", "toml: policy: unknown key 'nam'.*'name'"),
        ("policy = { rules = 'lru' }", "toml: policy"),
        ("policy = { rules = [], name = 'lru' }", "toml: policy.*'name'"),
        ("policy = [{ tier = 'host' }]", r"policy.rules\[0\]: 'name' is missing"),
        ("compression = { chain = 'int8', aftersteps = 3 }", "'aftersteps'.*'after_steps'"),
        ("tiers = 'host'", "tiers must be a list of tiers"),
        ("tiers = [{ kind = 'host' }]", r"tiers\[0\]: 'capacity' is missing"),
        ("tiers = ['host']", r"tiers\[0\] must be a Tier or a table, not 'host'"),
        ("tiers = [{ kind = 'host', capacity = '0' }]", "'host': capacity: 0 B cannot hold"),
        ("tenants = 3", "tenants must be a table"),
        ("tenants.a.quota.hots = 3", r"no tier 'hots'; did you mean 'host'\?.*\(from .*toml\)"),
        ("a = [", "is not valid TOML"),
    ],
)
def test_f078_a_mistake_in_the_file(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tierkv.toml"
    tiers = "" if line.startswith("tiers") else "[[tiers]]\nkind = 'host'\ncapacity = '1MiB'\n"
    path.write_text(f"{line}\n{tiers}")

    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_f078_a_mistake_in_an_argument() -> None:
    with pytest.raises(ConfigError, match=r"'stagin' \(from argument\); did you mean 'staging'"):
        load_config(CODE, stagin=1)
    with pytest.raises(ConfigError, match=r"verify_host must be bool, not 1 \(from argument\)"):
        load_config(CODE, verify_host=1)
    with pytest.raises(ConfigError, match="did you mean 'staging'"):
        CODE.replace(stagin=1)


def test_f078_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read.*nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")


def test_nothing_configured_says_how_to_begin() -> None:
    with pytest.raises(ConfigError, match=r"no tiers.*TIERKV_TIERS"):
        load_config()


def test_our_other_variables_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN_VARIABLES:
        monkeypatch.setenv(name, "1")

    assert load_config(to_plain(CODE)).config == CODE


def test_f080_what_the_caller_gave_stays_as_it_was() -> None:
    given: dict[str, Any] = to_plain(CODE)
    given["tiers"][1]["options"] = {"deep": {"list": [1]}}
    before = copy.deepcopy(given)

    first = load_config(given).config
    second = load_config(given).config

    assert given == before
    assert first == second
    given["tiers"][1]["options"]["deep"]["list"].append(2)
    given["tenants"]["acme"]["quota"]["ram"] = 1
    assert first == second
    assert first.tiers[1].options == {"deep": {"list": [1]}}


def test_f080_specs_copy_what_they_are_given() -> None:
    options, tenants = {"segment": 1}, {"acme": {"quota": {"host": 5}}}
    rules, tiers = [Policy("lru")], [Tier("host", "1MiB", options=options)]
    config = EngineConfig(tiers, policy=Hybrid(rules), tenants=tenants)
    options["segment"] = 2
    tenants["acme"]["quota"]["host"] = 6
    rules.clear()
    tiers.clear()

    assert config == EngineConfig(
        [Tier("host", "1MiB", options={"segment": 1})],
        policy=Hybrid([Policy("lru")]),
        tenants={"acme": {"quota": {"host": 5}}},
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tier("", 1), "needs a kind"),
        (lambda: Tier("host", 0), "capacity: 0 B cannot hold"),
        (lambda: Tier("host", 1.5), "capacity: not a size"),  # type: ignore[arg-type]
        (lambda: Tier("host", "1MiB", low=0.9, high=0.8), "low <= high"),
        (lambda: Tier("host", "1MiB", codec=""), "not empty"),
        (lambda: Tier("host", "1MiB", write_through=1), "write_through must be bool"),  # type: ignore[arg-type]
        (lambda: Tier("host", "1KiB"), "capacity: 1 KiB cannot hold .* raise it to 8 KiB"),
        (lambda: Tier("host", "1MiB", path="kv"), "path has no meaning for a 'host' tier"),
        (lambda: Tier("host", "1MiB", device="cuda:0"), "device has no meaning for a 'host' tier"),
        (lambda: Tier("nvme", "1MiB", path="kv", device="sda"), "device has no meaning"),
        (lambda: Tier("nvme", "1MiB", path="r/{wrker}"), "unknown placeholder {wrker} in path"),
        (
            lambda: EngineConfig([Tier("host", "1MiB")], staging="1KiB"),
            "staging: 1 KiB .* raise it",
        ),
        (lambda: EngineConfig([]), "at least one tier"),
        (lambda: EngineConfig(Tier("host", "1MiB")), "list of tierkv.Tier"),  # type: ignore[arg-type]
        (lambda: EngineConfig([Tier("host", "1MiB"), Tier("host", "1MiB")]), "must be unique"),
        (lambda: EngineConfig([Tier("host", "1MiB")], busy="no"), "busy must be"),
        (lambda: EngineConfig([Tier("host", "1MiB")], history=-1), "history"),
        (lambda: EngineConfig([Tier("host", "1MiB")], metrics_port=70000), "metrics_port"),
        (
            lambda: EngineConfig([Tier("host", "1MiB")], metrics=False, metrics_port=0),
            "metrics_port needs",
        ),
        (lambda: EngineConfig([Tier("host", "1MiB")], policy=3), "policy must be"),  # type: ignore[arg-type]
        (
            lambda: EngineConfig(
                [Tier("host", "1MiB")], tenants={"a": {"reserved": {"host": "2MiB"}}}
            ),
            "2097152 bytes of tier 'host' are reserved, but it holds 1048576",
        ),
        (lambda: Policy("lru", unit="block"), "unit must be"),
        (lambda: Policy("lru", action="drop"), "action must be"),
        (lambda: Policy("lru", to="nvme"), "'to' belongs to"),
        (lambda: Policy("lru", action="demote"), "'to' belongs to"),
        (lambda: Hybrid([]), "one tierkv.Policy or more"),
        (lambda: Hybrid(Policy("lru")), "one tierkv.Policy or more"),  # type: ignore[arg-type]
        (lambda: CompressionPolicy("int8", after_steps=-1), "after_steps >= 0"),
    ],
)
def test_specs_check_themselves(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_policies_by_tier() -> None:
    lru, lrfu = Policy("lru", tier="ram"), Policy("lrfu", tier="nvme")
    assert resolve_policies(CODE) == {"ram": (lru,), "nvme": (lrfu,)}

    tiers = [Tier("host", "1MiB"), Tier("nvme", "1MiB", policy="lru")]
    own = (Policy("lru", tier="nvme"),)
    default = (Policy("lrfu", tier="host"),)
    assert resolve_policies(EngineConfig(tiers)) == {"host": default, "nvme": own}
    assert resolve_policies(EngineConfig(tiers, policy=Policy("x", tier="host"))) == {
        "host": (Policy("x", tier="host"),),
        "nvme": own,
    }


def test_rules_apply_in_order_and_demote_above_their_target_only() -> None:
    tiers = [Tier("device", "1MiB"), Tier("host", "1MiB"), Tier("nvme", "1MiB")]
    size = Policy("size_aware", tier="device")
    swap = Policy("lru", unit="session", action="demote", to="host")
    config = EngineConfig(tiers, policy=Hybrid([size, swap, Policy("lrfu")]))
    assert resolve_policies(config) == {
        "device": (
            size,
            Policy("lru", tier="device", unit="session", action="demote", to="host"),
        ),
        "host": (Policy("lru", tier="host"),),
        "nvme": (Policy("lru", tier="nvme"),),
    }


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy("lru", tier="hots"), r"no tier 'hots'; did you mean 'host'"),
        (Policy("lru", action="demote", to="nvm"), r"no tier 'nvm'; did you mean 'nvme'"),
        (Policy("lru", action="demote", to="host"), r"demote to 'host', which is not slower than"),
        (Policy("lru", tier="nvme", action="demote", to="nvme"), r"cannot demote to 'nvme'"),
        (Policy("lru", tier="host"), r"no policy for tier 'nvme'"),
    ],
)
def test_f079_what_a_policy_cannot_do_is_refused(policy: Policy | Hybrid, message: str) -> None:
    config = EngineConfig([Tier("host", "1MiB"), Tier("nvme", "1MiB")], policy=policy)

    with pytest.raises(ConfigError, match=message):
        resolve_policies(config)


def test_codec_chain_by_tier() -> None:
    tiers = [Tier("host", "1MiB", codec="int8"), Tier("nvme", "1MiB")]

    def chains(compression: str | CompressionPolicy | None) -> list[str]:
        config = EngineConfig(tiers, compression=compression)
        return [tier_chain(config, tier) for tier in config.tiers]

    assert chains(None) == ["int8", "raw"]
    assert chains("zstd") == chains(CompressionPolicy("zstd")) == ["int8", "zstd"]


def test_f082_a_path_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier("nvme", "1MiB", path="/kv/{worker}/x")
    monkeypatch.delenv("TIERKV_WORKER", raising=False)

    assert tier.root == "/kv/0/x"
    monkeypatch.setenv("TIERKV_WORKER", "w3")
    assert tier.root == "/kv/w3/x"
    assert Tier("host", "1MiB").root is None
    monkeypatch.setenv("TIERKV_WORKER", "../../etc")
    with pytest.raises(ConfigError, match="TIERKV_WORKER"):
        assert tier.root
