"""``attach`` without vLLM: what becomes of arguments, managers, sessions and prompts."""

from __future__ import annotations

import ast
import gc
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.serving.vllm_fakes import MODE, AsyncEngineArgs, EngineArgs, config_of, extra_of
from tierkv.blocking import CacheManager
from tierkv.errors import AttachError, ClosedError, ConfigError
from tierkv.metrics import NullObserver
from tierkv_adapters import vllm as tk
from tierkv_adapters.remote import RemoteServer
from tierkv_adapters.serving.managers import open_manager
from tierkv_adapters.serving.registry import borrowed
from tierkv_adapters.vllm.attached.joining import joined_at
from tierkv_adapters.vllm.worker import connector_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIERS = [tierkv.Tier("host", "8MiB")]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core runs in this process."""
    monkeypatch.setenv(MODE, "0")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core runs in a process of its own: the default."""
    monkeypatch.delenv(MODE, raising=False)


# ---------------------------------------------------------------------- arguments


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", [EngineArgs, dict])
def test_u003_arguments_come_back_as_a_copy_of_their_kind(manager: CacheManager, kind: Any) -> None:
    given = kind(model="a")
    args = tk.attach(given, manager, load_deadline="3s")
    assert type(args) is kind
    assert given == kind(model="a")
    transfer = args["kv_transfer_config"] if kind is dict else args.kv_transfer_config
    assert transfer["kv_connector"] == "TierKVConnector"
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = extra_of(args)
    assert extra["load_deadline"] == "3s"
    assert extra["block_tokens"] == manager.config.block_tokens
    assert borrowed(extra["manager"]) is manager
    assert stat.S_IMODE(os.stat(extra["socket_dir"]).st_mode) == 0o700
    own = connector_settings(config_of(args))
    assert own.settings.load_deadline == 3.0
    assert open_manager(own.source, own.token, 0, 1).manager is manager


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kv_connector": "NixlConnector"}, "MultiConnector"),
        (SimpleNamespace(kv_connector="NixlConnector"), "MultiConnector"),
        (
            {"kv_connector": "TierKVConnector", "kv_connector_extra_config": {"config": "a.toml"}},
            "has 'config' already",
        ),
    ],
)
def test_another_connector_is_refused_with_the_line_to_write(
    manager: CacheManager, given: Any, what: str
) -> None:
    with pytest.raises(AttachError, match=what):
        tk.attach(EngineArgs(kv_transfer_config=given), manager)
    with pytest.raises(AttachError, match="kv_offloading_size"):
        tk.attach(EngineArgs(kv_offloading_size=4.0), manager)


@pytest.mark.usefixtures("here")
def test_ours_may_be_one_of_several(manager: CacheManager) -> None:
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    ours = {"kv_connector": "TierKVConnector", "kv_connector_extra_config": {"weights": "v2"}}
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, ours]},
    }
    args = tk.attach(EngineArgs(kv_transfer_config=given), manager)
    first, second = extra_of(args)["connectors"]
    assert first == other
    assert second["kv_connector_extra_config"]["weights"] == "v2"
    assert borrowed(second["kv_connector_extra_config"]["manager"]) is manager
    assert ours == {
        "kv_connector": "TierKVConnector",
        "kv_connector_extra_config": {"weights": "v2"},
    }


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("target", "more", "error", "what"),
    [
        (EngineArgs(), {"lode_deadline": 1}, ConfigError, "did you mean 'load_deadline'"),
        (EngineArgs(), {"ready_fraction": 0.5}, ConfigError, "unknown setting"),
        (object(), {}, AttachError, "not object"),
    ],
)
def test_mistakes_are_told_before_anything_happens(
    manager: CacheManager, target: Any, more: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        tk.attach(target, manager, **more)
    with pytest.raises(AttachError, match="a manager, or settings"):
        tk.attach(EngineArgs())
    with pytest.raises(AttachError, match=r"a TOML file.*not int"):
        tk.attach(EngineArgs(), 42)
    with pytest.raises(ConfigError, match="did you mean 'host'"):
        tk.attach(EngineArgs(), {"tiers": [{"kind": "hots", "capacity": "1MiB"}]})
    assert manager.stats().sessions == 0


@pytest.mark.usefixtures("here")
def test_a_manager_that_is_not_open_cannot_serve() -> None:
    with pytest.raises(ClosedError):
        tk.attach(EngineArgs(), CacheManager(tiers=TIERS))


@pytest.mark.usefixtures("here")
def test_a_manager_that_was_lent_elsewhere_is_told(manager: CacheManager) -> None:
    extra = extra_of(tk.attach(EngineArgs(), manager))
    with pytest.raises(AttachError, match=MODE):
        open_manager(None, extra["manager"] + "x", 0, 1)


@pytest.mark.usefixtures("here")
def test_what_was_lent_goes_with_its_manager() -> None:
    manager = CacheManager(tiers=TIERS).open()
    extra = extra_of(tk.attach(EngineArgs(), manager))
    manager.close()
    del manager
    gc.collect()
    assert borrowed(extra["manager"]) is None
    assert joined_at(extra["socket_dir"]) is None


@pytest.mark.usefixtures("here")
def test_the_sockets_folder_goes_with_the_process() -> None:
    code = """
import tierkv
from tests.serving.vllm_fakes import EngineArgs, extra_of
from tierkv_adapters import vllm as tk
print(extra_of(tk.attach(EngineArgs(), {"tiers": [{"kind": "host", "capacity": "8MiB"}]})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=kit_root()
    )
    extra = ast.literal_eval(done.stdout)
    assert extra["config"]["tiers"][0]["kind"] == "host"
    assert not os.path.exists(extra["socket_dir"])


def kit_root() -> Path:
    return Path(kit.__file__).parents[1]


# ---------------------------------------------------------------------- device tiers

GIB = 1 << 30


@pytest.mark.parametrize(
    ("is_open", "free", "fits"),
    [
        (False, 79 * GIB, True),
        (False, 77 * GIB, False),
        (True, 73 * GIB, True),  # its tier has its memory already
        (True, 71 * GIB, False),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_device_tiers_count_beside_what_vllm_takes(is_open: bool, free: int, fits: bool) -> None:
    tier = tierkv.Tier("device", "6GiB" if not is_open else "8MiB", device="cpu")
    manager = CacheManager(tiers=[tier])
    asked = []

    def memory(device: str) -> tuple[int, int]:
        asked.append(device)
        return free, 80 * GIB

    with manager if is_open else SimpleNamespaceContext():
        if fits:
            tk.attach(EngineArgs(gpu_memory_utilization=0.9), manager, memory=memory)
        else:
            with pytest.raises(AttachError, match=r"takes 72.*GiB.*are free.*at most 0\.8") as told:
                tk.attach(EngineArgs(gpu_memory_utilization=0.9), manager, memory=memory)
            assert "80" in str(told.value)
    assert asked == ["cpu"]
    manager.close()


class SimpleNamespaceContext:
    """Nothing to open."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


# ---------------------------------------------------------------------- the core elsewhere


class Worker:
    """What the worker's process does with its settings, here."""

    def __init__(self, args: Any, number: int = 0, workers: int = 1) -> None:
        own = connector_settings(config_of(args))
        self.manager, owned = open_manager(own.source, own.token, number, workers)
        assert owned
        self.manager.bind(kit.space())
        path = os.path.join(str(own.settings.socket_dir), f"rank{number}.sock")
        self.requests = 0
        self.server = RemoteServer(self.manager, path, self.about).start()

    def about(self) -> dict[str, Any]:
        counters = {"save_blocks": 3, "load_tokens": 32, "loads_short": 1, "saves_failed": 0}
        return {"block_tokens": 16, "requests": self.requests, "counters": counters}

    def close(self) -> None:
        self.server.close()
        self.manager.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Starts workers; they are closed afterwards."""
    started: list[Worker] = []

    def call(args: Any, number: int = 0, workers: int = 1) -> Worker:
        started.append(Worker(args, number, workers))
        return started[-1]

    yield call
    for worker in started:
        worker.close()


@pytest.mark.usefixtures("elsewhere", "no_thread_leaks")
def test_a_manager_is_a_client_of_the_engine_to_come(start: Callable[..., Worker]) -> None:
    with CacheManager(tiers=TIERS, name="mine") as manager:
        manager.create_session("early", tenant="acme", ttl="2h", salt=b"grain")
        manager.create_session("dropped")
        args = tk.attach(EngineArgs(), manager)
        with pytest.raises(ClosedError, match="vLLM engine is not there"):
            manager.stats()
        with pytest.raises(ClosedError, match="another CacheManager"):
            _ = manager.engine
        manager.create_session("later")
        manager.destroy_session("dropped")
        assert {i.id: i.ttl for i in manager.sessions()} == {"early": 7200.0, "later": None}
        engine = SimpleNamespace(vllm_config=config_of(args))
        dead = tk.status(engine)
        assert not dead.attached
        assert "no engine answers at" in str(dead.reason)

        worker = start(args)
        assert worker.manager.config == manager.config
        assert manager.stats().sessions == 2
        assert {i.id: (i.tenant, i.ttl) for i in worker.manager.sessions()} == {
            "early": ("acme", 7200.0),
            "later": ("", None),
        }
        worker.manager.create_session(
            "early", tenant="acme", ttl="2h", salt=b"grain", adopt=True
        )  # opened alike
        told = tk.status(engine)
        assert told.attached
        assert (told.blocks_stored, told.blocks_reused, told.restores_failed) == (3, 2, 1)
        assert told.reason == "no request yet"
        worker.requests = 5
        assert tk.status(engine).requests_seen == 5
        assert tk.status(engine).ranks[0].health["status"] == "open"
        manager.clear_session("early")
        manager.destroy_session("early")
        assert {i.id for i in manager.sessions()} == {"later"}


@pytest.mark.usefixtures("elsewhere", "no_thread_leaks")
def test_every_rank_hears_of_sessions(start: Callable[..., Worker]) -> None:
    with CacheManager(tiers=TIERS) as manager:
        args = tk.attach(EngineArgs(tensor_parallel_size=2), manager)
        workers = [start(args, number, 2) for number in range(2)]
        manager.create_session("a")
        assert [w.manager.stats().sessions for w in workers] == [1, 1]
        for worker in workers:
            worker.manager.store(
                kit.tokens(2), kit.Memory(kit.LAYOUTS["full"], 32, seed=1).view, session="a"
            )
        manager.clear_session("a")
        assert [w.manager.sessions()[0].tokens for w in workers] == [0, 0]
        assert manager.reset() == 2
        assert [w.manager.stats().tiers["host"].entries for w in workers] == [0, 0]
        manager.destroy_session("a")
        assert manager.stats().sessions == 0
        both = tk.status(SimpleNamespace(vllm_config=config_of(args, 2)))
        assert [rank.alive for rank in both.ranks] == [True, True]
        workers[1].close()
        half = tk.status(SimpleNamespace(vllm_config=config_of(args, 2)))
        assert not half.attached
        assert "rank1.sock" in str(half.reason)


@pytest.mark.usefixtures("here")
def test_async_engines_and_several_workers_are_always_elsewhere() -> None:
    for args in (AsyncEngineArgs(), EngineArgs(tensor_parallel_size=2)):
        with CacheManager(tiers=TIERS) as manager:
            assert "manager" not in extra_of(tk.attach(args, manager))


@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_travel_is_refused() -> None:
    with CacheManager(tiers=TIERS, observer=NullObserver()) as manager:
        with pytest.raises(AttachError, match="observer of this process"):
            tk.attach(EngineArgs(), manager)
        manager.stats()  # it goes on


@pytest.mark.usefixtures("elsewhere")
def test_the_environment_does_not_change_a_managers_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CacheManager(tiers=TIERS, policy="lru") as manager:
        args = tk.attach(EngineArgs(), manager)
        monkeypatch.setenv("TIERKV_POLICY", "lfu")
        assert connector_settings(config_of(args)).source.policy == "lru"


# ---------------------------------------------------------------------- built engines


@pytest.mark.usefixtures("here")
def test_a_built_engine_works_through_public_means_or_says_the_line(
    manager: CacheManager, elsewhere_engine: Any
) -> None:
    bare = SimpleNamespace(vllm_config=config_of(EngineArgs()))
    with pytest.raises(AttachError, match=r"args = attach\(EngineArgs\(...\), manager\)"):
        tk.attach(bare, manager)
    assert not tk.status(bare).attached
    args = tk.attach(EngineArgs(), manager)
    engine = SimpleNamespace(vllm_config=config_of(args))
    assert tk.attach(engine, manager).manager is manager
    assert tk.attach(engine).manager is manager
    with pytest.raises(AttachError, match="not built with the manager"):
        tk.attach(engine, CacheManager(tiers=TIERS))
    with pytest.raises(AttachError, match="settings go with the arguments"):
        tk.attach(engine, manager, load_deadline="1s")
    with pytest.raises(AttachError, match="not dict"):
        tk.attach(engine, {"tiers": []})
    with pytest.raises(AttachError, match="is expected"):
        tk.status(object())
    assert "socket_dir" in str(tk.status(elsewhere_engine).reason)
    with pytest.raises(AttachError, match="socket_dir"):
        tk.attach(elsewhere_engine)


@pytest.fixture
def elsewhere_engine() -> Any:
    """An engine whose connector was configured by hand."""
    given = {"kv_connector": "TierKVConnector", "kv_connector_extra_config": {"config": "a.toml"}}
    return SimpleNamespace(vllm_config=config_of(EngineArgs(kv_transfer_config=given)))
