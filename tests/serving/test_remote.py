"""Asking an engine in another process: the same calls, the same answers, the same errors."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv import errors
from tierkv.blocking import CacheManager
from tierkv.blocks import KeyChain, Media
from tierkv.errors import BackendError, ClosedError, ConfigError, TierKVError
from tierkv.workers import Signal
from tierkv_adapters.remote import RemoteManager, RemoteServer
from tierkv_adapters.remote.records import error_from, error_to
from tierkv_adapters.remote.wire import unpack_media

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierkv.session import FlushResult

GUARD = 60.0
IDS = kit.tokens(4)
TIERS = [tierkv.Tier("host", "8MiB")]


@pytest.fixture
def client(server: RemoteServer) -> Iterator[RemoteManager]:
    with RemoteManager(server.path) as remote:
        yield remote


def _store(manager: CacheManager, session: str) -> None:
    manager.store(IDS, kit.Memory(kit.LAYOUTS["full"], 64, seed=1).view, session=session)


def _wait(manager: CacheManager, leases: int) -> None:
    end = time.monotonic() + GUARD
    while manager.stats().leases != leases:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_answers_are_those_of_the_manager(manager: CacheManager, client: RemoteManager) -> None:
    assert client.create_session("a", tenant="t", ttl="2m") == "a"
    _store(manager, "a")
    assert client.sessions() == manager.sessions()
    assert client.health() == manager.health()
    assert client.flush() == manager.flush()
    assert client.explain(IDS, session="a") == manager.explain(IDS, session="a")
    image = [Media(20, b"\1" * 32)]
    told = client.explain(IDS, session="a", media=image)
    assert told == manager.explain(IDS, session="a", media=image) != manager.explain(IDS)
    client.prefetch(IDS, session="a", media=image)
    for wrong in ([[0]], [[0, "x"]], [0], "ab"):
        with pytest.raises(ConfigError, match="media"):
            unpack_media(wrong)
    assert client.explain(kit.tokens(2, seed=9)) == manager.explain(kit.tokens(2, seed=9))
    mine, theirs = client.stats(), manager.stats()
    steady = dataclasses.replace(
        theirs, tasks_spawned=mine.tasks_spawned, thread_hops=mine.thread_hops
    )
    assert mine == steady
    assert mine.breaker_open == ()
    assert client.knows_session("a")
    client.clear_session("a")
    assert [info.tokens for info in manager.sessions()] == [0]
    assert client.reset() == 4
    assert manager.stats().used == {"host": 0}
    client.destroy_session("a")
    client.destroy_session("a")
    assert client.sessions() == [] == manager.sessions()
    assert not client.knows_session("a")


def test_long_prompts_and_long_answers_travel(manager: CacheManager, client: RemoteManager) -> None:
    ids = list(range(200_000))
    found = client.explain(ids)
    assert len(found) == 200_000 // kit.BLOCK
    assert found == manager.explain(ids)
    for number in range(300):
        client.create_session(str(number))
    assert client.sessions() == manager.sessions()
    with pytest.raises(ConfigError, match="too long"):
        client.create_session("x" * 2_000_000)
    assert len(client.sessions()) == 300


def test_the_current_session_is_of_this_thread_and_client(client: RemoteManager) -> None:
    made = client.create_session()
    client.create_session("b")
    with client.use_session("b"), client.use_session(made):
        assert client.current_session() == made
        seen: list[str | None] = []
        thread = threading.Thread(target=lambda: seen.append(client.current_session()))
        thread.start()
        thread.join(GUARD)
        assert seen == [None]
        client.hint(next_in="20s")
        client.prefetch(IDS)
        client.prefetch()
    assert client.current_session() is None
    with pytest.raises(ConfigError, match="no session is current"):
        client.hint(stop_reason="end_turn")
    with pytest.raises(ConfigError, match="no session 'ghost': create_session"):
        client.use_session("ghost")


def test_a_session_of_another_client_can_be_used(
    manager: CacheManager, client: RemoteManager, server: RemoteServer
) -> None:
    manager.create_session("theirs")
    with client.use_session("theirs"):
        client.hint(stop_reason="end_turn")
    with RemoteManager(server.path) as other, pytest.raises(ConfigError, match="exists; destroy"):
        other.create_session("theirs")


def test_errors_come_back_as_the_same_types(
    manager: CacheManager, client: RemoteManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no session 'ghost': create_session"):
        client.clear_session("ghost")
    with pytest.raises(ConfigError, match="prefetch needs session= or tokens="):
        client.prefetch()
    for arguments in ({"fidelity": "roughly"}, {"ttl": "soon"}, {"salt": "text"}, {"tenant": 5}):
        with pytest.raises(ConfigError):
            client.create_session("a", **arguments)
    with pytest.raises(ConfigError, match="token ids"):
        client.explain([-1])
    other = kit.space(model="other")
    with pytest.raises(ConfigError, match=r"no space .* is bound"):
        client.explain(IDS, space=other)
    manager.bind(other)
    assert client.explain(IDS, space=other)[0].tier is None
    with pytest.raises(ConfigError, match="2 spaces are bound"):
        client.explain(IDS)

    async def refuse() -> FlushResult:
        raise BackendError("nvme", "disk on fire", retryable=True)

    monkeypatch.setattr(manager.engine, "flush", refuse)
    with pytest.raises(BackendError, match=r"^tier .nvme.: disk on fire$") as caught:
        client.flush()
    assert (caught.value.tier, caught.value.retryable) == ("nvme", True)
    assert client.health()["status"] == "open"


def test_a_failure_that_is_no_error_of_ours_is_told_without_its_text(
    manager: CacheManager,
    client: RemoteManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> FlushResult:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(manager.engine, "flush", fail)
    with pytest.raises(TierKVError, match="failed with ZeroDivisionError") as caught:
        client.flush()
    assert "secret" not in str(caught.value)
    assert "a secret" in caplog.text, "the engine's own log has it"


def test_every_error_travels() -> None:
    made: dict[str, tuple[Any, ...]] = {
        "BackendError": ("nvme", "x"),
        "RootLockedError": ("nvme", "x"),
    }
    lost = {"LoadIncomplete", "StoreIncomplete", "TraceError"}  # of calls that do not travel
    for name in errors.__all__:
        if name in lost:
            continue
        error = getattr(errors, name)(*made.get(name, ("what was wrong",)))
        back = error_from(error_to(error))
        assert (type(back), str(back)) == (type(error), str(error))
    setting = error_from(error_to(ConfigError("x", setting="tiers")))
    assert isinstance(setting, ConfigError)
    assert setting.setting == "tiers"
    for nonsense in (None, 7, {}, {"kind": "Mystery", "text": "x"}, {"kind": [], "text": "x"}):
        assert type(error_from(nonsense)) is TierKVError


def test_threads_ask_side_by_side(
    manager: CacheManager, client: RemoteManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Signal()
    plain = manager.engine.flush

    async def slow() -> FlushResult:
        await gate.wait()
        return await plain()

    monkeypatch.setattr(manager.engine, "flush", slow)
    done: list[object] = []
    threads = [threading.Thread(target=lambda: done.append(client.flush())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20):
        client.create_session(str(number))
    assert len(client.sessions()) == 20
    assert done == []
    manager._loop.soon(gate.set)
    for thread in threads:
        thread.join(GUARD)
    assert len(done) == 3


def test_a_session_that_was_destroyed_is_gone_for_whatever_is_called_next(
    client: RemoteManager,
) -> None:
    for _ in range(20):
        client.create_session("a")
        client.destroy_session("a")
        assert client.sessions() == []


def test_closing_the_manager_closes_the_server(tmp_path: Path, no_fd_leaks: None) -> None:
    manager = CacheManager(tiers=TIERS, space=kit.space()).open()
    server = RemoteServer(manager, tmp_path / "s" / "e.sock").start()
    client = RemoteManager(server.path)
    client.create_session("a")
    manager.close()
    assert not (tmp_path / "s" / "e.sock").exists()
    with pytest.raises(ClosedError, match="is gone"):
        client.sessions()
    assert client.health() == {"status": "closed"}
    client.destroy_session("a")
    client.close()
    client.close()
    with pytest.raises(ClosedError, match="was closed"):
        client.stats()
    server.close()
    assert "closed" in repr(server)
    with pytest.raises(ClosedError, match="started once"):
        server.start()


def test_a_closed_server_leaves_the_manager_alone(manager: CacheManager, tmp_path: Path) -> None:
    server = RemoteServer(manager, tmp_path / "s" / "e.sock")
    with pytest.raises(ClosedError, match="never started"):
        _ = server.path
    with server:
        client = RemoteManager(server.path)
        assert client.health()["status"] == "open"
    assert client.health() == {"status": "closed"}
    assert manager.health()["status"] == "open"
    server.close()
    client.close()


def test_a_client_finds_a_server_that_was_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "s" / "e.sock"
    client = RemoteManager(path)
    with pytest.raises(ClosedError, match="is gone"):
        client.stats()
    for life in range(3):
        with CacheManager(tiers=TIERS, space=kit.space()) as manager, RemoteServer(manager, path):
            client.create_session(f"s{life}", tenant="t", salt=b"grain")
            # the ones that were created here in its earlier lives are there again
            known = {info.id: info.tenant for info in manager.sessions()}
            assert known == {f"s{n}": "t" for n in range(life + 1)}
    assert client.health() == {"status": "closed"}
    client.close()


def test_a_session_that_is_another_one_there_is_not_created_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s" / "e.sock"
    client = RemoteManager(path)
    with CacheManager(tiers=TIERS) as manager, RemoteServer(manager, path):
        client.create_session("a", salt=b"grain")
    with CacheManager(tiers=TIERS) as manager:
        manager.create_session("a", tenant="other")
        with RemoteServer(manager, path):
            assert [info.tenant for info in client.sessions()] == ["other"]
    assert "'a' was not created anew" in caplog.text
    assert "grain" not in caplog.text
    assert b"grain".hex() not in caplog.text
    client.close()


def test_holds_last_until_they_are_released(manager: CacheManager, server: RemoteServer) -> None:
    manager.create_session("a")
    _store(manager, "a")
    chain = KeyChain(kit.space().root(), kit.BLOCK)
    chain.follow(IDS)
    client = RemoteManager(server.path)
    first, second = client.hold(chain.keys), client.hold(chain.keys[:1], space=kit.space())
    assert (first.blocks, second.blocks, len(first.parts)) == (4, 1, 4)
    assert manager.stats().leases > 0
    first.release()
    first.release()
    assert "released" in repr(first)
    client.flush()
    assert manager.stats().leases > 0
    client.close()  # the second one is tied to its connection
    _wait(manager, 0)
    second.release()


def test_a_hold_ends_with_the_process_that_asked(
    manager: CacheManager, server: RemoteServer
) -> None:
    manager.create_session("a")
    _store(manager, "a")
    chain = KeyChain(kit.space().root(), kit.BLOCK)
    chain.follow(IDS)
    client = RemoteManager(server.path)
    hold = client.hold(chain.keys)
    _wait(manager, 1)
    assert client._line is not None
    client._line._sock.close()  # as the kernel does for a process that dies
    _wait(manager, 0)
    hold.release()  # of a line that is gone: nothing is left to release
    assert client.hold(chain.keys).blocks == 4, "on a line of its own"
    client.close()
    _wait(manager, 0)


def test_c5_a_forked_child_is_refused(client: RemoteManager) -> None:
    client.create_session("a")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run in here
        try:
            client.sessions()
        except ClosedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert b"was forked" in told.read()
    os.waitpid(child, 0)
    assert [info.id for info in client.sessions()] == ["a"]


_SERVER = """
import sys, time, tierkv
from tierkv.blocking import CacheManager
from tierkv_adapters.remote import RemoteServer
with CacheManager(tiers=[tierkv.Tier("host", "8MiB")], metrics=False) as manager:
    with RemoteServer(manager, sys.argv[1]):
        print("serving", flush=True)
        time.sleep(600)
"""


def test_a_process_that_is_killed_leaves_nothing_that_hangs(tmp_path: Path) -> None:
    path = str(tmp_path / "s" / "e.sock")
    process = subprocess.Popen([sys.executable, "-c", _SERVER, path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        client = RemoteManager(path)
        client.create_session("a")
        with CacheManager(tiers=TIERS) as manager:
            with pytest.raises(ConfigError, match="belongs to a server that runs"):
                RemoteServer(manager, path).start()
            process.send_signal(signal.SIGKILL)
            process.wait(GUARD)
            with pytest.raises(ClosedError, match="is gone"):
                client.sessions()
            with RemoteServer(manager, path):  # in place of the file that the dead one left
                assert [info.id for info in client.sessions()] == ["a"]
        client.close()
    finally:
        process.kill()
        process.wait(GUARD)
        if process.stdout is not None:
            process.stdout.close()


def test_a_line_that_comes_while_the_client_is_closed_is_ended(
    manager: CacheManager, client: RemoteManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, taken = client._connections.take, []

    def late() -> Any:
        taken.append(take())
        client.close()
        return taken[-1]

    monkeypatch.setattr(client._connections, "take", late)
    with pytest.raises(ClosedError):
        client.hold([])
    assert taken[0]._sock.fileno() == -1
