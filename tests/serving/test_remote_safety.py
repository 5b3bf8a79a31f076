"""The socket is its owner's alone, and nothing that comes through it harms the engine."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import socket
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import ClosedError, ConfigError, TierKVError
from tierkv_adapters.remote import RemoteManager, RemoteServer, connections
from tierkv_adapters.remote import server as serving
from tierkv_adapters.remote.listening import listen
from tierkv_adapters.remote.wire import (
    HEAD,
    MOST_BODY,
    MOST_HEADER,
    FrameReader,
    WireError,
    decode_header,
    encode,
    pack_changes,
    pack_tokens,
    unpack_changes,
    unpack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD = 60.0
TIERS = [tierkv.Tier("host", "8MiB")]
HELLO = encode({"op": "hello", "wire": 1})


class _Marker:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.path,)


def _dial(server: RemoteServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(GUARD)
    sock.connect(server.path)
    return sock


def _rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    out = b""
    try:
        while data := sock.recv(1 << 16):
            out += data
    except ConnectionError:
        pass
    finally:
        sock.close()
    return out


def _works(server: RemoteServer) -> None:
    with RemoteManager(server.path) as client:
        assert client.health()["status"] == "open"


# ---------------------------------------------------------------------- frames


@given(
    frames=st.lists(
        st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary()), max_size=4
    ),
    cuts=st.randoms(use_true_random=False),
)
def test_frames_arrive_however_they_are_cut(
    frames: list[tuple[dict[str, Any], bytes]], cuts: random.Random
) -> None:
    data = b"".join(encode(header, body) for header, body in frames)
    reader, got = FrameReader(), []
    while data:
        size = cuts.randint(1, len(data))
        got += list(reader.feed(data[:size]))
        data = data[size:]
    assert got == frames


@given(data=st.binary(max_size=64))
def test_garbage_is_a_typed_error_or_waits_for_more(data: bytes) -> None:
    reader = FrameReader()
    try:
        for header, _ in reader.feed(data):
            assert isinstance(header, dict)
    except WireError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(0, 0),
        HEAD.pack(MOST_HEADER + 1, 0),
        HEAD.pack(1, MOST_BODY + 1),
        HEAD.pack(2**32 - 1, 2**32 - 1),
        HEAD.pack(2, 0) + b"[]",
        HEAD.pack(4, 0) + b"null",
        HEAD.pack(2, 0) + b"\xff\xff",
        HEAD.pack(100_000, 0) + b"[" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_d7_lengths_and_headers_are_checked_before_they_are_believed(data: bytes) -> None:
    with pytest.raises(WireError):
        list(FrameReader().feed(data))


def test_arrays_travel_and_are_checked() -> None:
    assert list(unpack_tokens(pack_tokens([0, 7, 2**32 - 1]))) == [0, 7, 2**32 - 1]
    for bad in ([-1], [2**32], ["a"]):
        with pytest.raises(ConfigError, match="32 bits"):
            pack_tokens(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no array"):
        unpack_tokens(b"abc")
    changes: Any = [(bytes([n]) * 34, n) for n in range(256)]
    assert unpack_changes(pack_changes(changes)) == changes
    with pytest.raises(WireError, match="no list of parts"):
        unpack_changes(bytes(36))
    with pytest.raises(ConfigError, match="too long"):
        encode({"name": "x" * MOST_HEADER})
    with pytest.raises(WireError, match="JSON"):
        decode_header(b"{")


# ---------------------------------------------------------------------- what comes in


def test_f091_a_pickle_is_not_run(
    manager: CacheManager, server: RemoteServer, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    bomb = pickle.dumps(_Marker(str(marker)))
    frame = HEAD.pack(len(bomb), len(bomb)) + bomb + bomb
    for said in (bomb, frame, HELLO + bomb, HELLO + frame):
        sock = _dial(server)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        _rest(sock)
    with _dial(server) as sock:
        sock.sendall(HELLO + encode({"op": "explain", "tokens": True}, bomb))
        sock.sendall(encode({"op": "hold", "line": "x"}, bomb))
        sock.shutdown(socket.SHUT_WR)
        assert b"ConfigError" in _rest(sock)
    assert not marker.exists()
    _works(server)


def test_s1_mutated_requests_do_the_engine_no_harm(
    manager: CacheManager, server: RemoteServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    dice = random.Random(7)
    said = [
        HELLO,
        encode({"op": "create_session", "name": "a", "salt": "00ff", "ttl": 5}),
        encode({"op": "explain", "tokens": True, "session": "a"}, pack_tokens(kit.tokens(2))),
        encode({"op": "hold", "line": "x", "space": kit.space().fingerprint.hex()}, bytes(64)),
        encode({"op": "subscribe"}),
    ]
    for _ in range(150):
        data = bytearray(b"".join(said[: dice.randint(1, len(said))]))
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(data))
            how = dice.random()
            if how < 0.6:
                data[at] = dice.randrange(256)
            elif how < 0.8:
                del data[at:]
            else:
                data[at:at] = dice.randbytes(dice.randint(1, 40))
            if not data:
                break
        sock = _dial(server)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except ConnectionError:  # it has heard enough
            pass
        _rest(sock)
    _works(server)
    assert manager.stats().leases == 0


def test_fields_of_another_kind_are_typed_errors_and_the_connection_goes_on(
    server: RemoteServer,
) -> None:
    sock = _dial(server)
    bad: list[dict[str, Any]] = [
        {},
        {"op": 7},
        {"op": "eval"},
        {"op": "__init__"},
        {"op": "create_session", "name": 7},
        {"op": "create_session", "name": "a", "salt": 7},
        {"op": "create_session", "name": "a", "salt": "zz"},
        {"op": "create_session", "name": "a", "ttl": [1]},
        {"op": "create_session", "name": "a", "adopt": 1},
        {"op": "clear_session"},
        {"op": "explain", "space": "00"},
        {"op": "explain", "space": {"a": 1}},
        {"op": "hint", "session": "a", "next_in": True},
        {"op": "hold"},
        {"op": "hold", "line": "ghost"},
        {"op": "release", "line": "ghost", "number": True},
    ]
    sock.sendall(HELLO + b"".join(encode(header, b"abc") for header in bad))
    sock.sendall(encode({"op": "knows_session", "name": "a"}))
    sock.shutdown(socket.SHUT_WR)
    answers = [header for header, _ in FrameReader().feed(_rest(sock))]
    assert [answer["ok"] for answer in answers] == [True, *[False] * len(bad), True]
    kinds = {answer["error"]["kind"] for answer in answers[1:-1]}
    assert kinds == {"ConfigError", "ClosedError"}


def test_another_version_is_told_so(server: RemoteServer) -> None:
    for first in ({"op": "hello", "wire": 99}, {"op": "sessions"}):
        sock = _dial(server)
        sock.sendall(encode(first))
        [(answer, _)] = FrameReader().feed(_rest(sock))
        assert "speaks version 1" in answer["error"]["text"]
    _works(server)


def test_a_peer_that_says_nothing_holds_up_nobody(
    manager: CacheManager, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = _dial(server)
    half.sendall(HELLO + encode({"op": "sessions"})[:11])
    deaf = _dial(server)  # never reads what it asks for
    deaf.sendall(HELLO + encode({"op": "stats"}) * 2000)
    _works(server)
    monkeypatch.setattr(serving, "_HELLO_S", 0.02)
    silent = _dial(server)
    assert _rest(silent) == b""
    _works(server)
    manager.close()  # the fixture's guard: no thread is left, although they all stay
    assert manager.health() == {"status": "closed"}
    half.close()
    deaf.close()


def test_there_is_an_end_to_connections(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_MOST_CONNECTIONS", 2)
    some = [RemoteManager(server.path) for _ in range(2)]
    for client in some:
        assert client.health()["status"] == "open"
    third = RemoteManager(server.path)
    with pytest.raises(ConfigError, match="2 connections are open already"):
        third.stats()
    some[0].close()
    end = time.monotonic() + GUARD
    while True:
        try:
            third.stats()
            break
        except ConfigError:
            assert time.monotonic() < end
    third.close()
    some[1].close()


# ---------------------------------------------------------------------- whose it is


def test_s3_the_socket_is_its_owners_alone(manager: CacheManager, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RemoteServer(manager, tmp_path / "new" / "e.sock"):
            folder = (tmp_path / "new").stat()
            assert stat.S_IMODE(folder.st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "new" / "e.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_s3_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    for mode in (0o755, 0o770, 0o701):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match=r"others may enter .* mode 0700"):
            listen(tmp_path / "e.sock")
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="no folder for a socket"):
        listen(tmp_path / "link" / "e.sock")
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        listen(tmp_path / ("x" * 100))


def test_s4_another_user_is_refused_by_both_ends(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RemoteManager(server.path)
    with monkeypatch.context() as patch:
        patch.setattr(serving, "peer_is_me", lambda _: False)
        assert _rest(_dial(server)) == b""
        with pytest.raises(ClosedError):
            client.create_session("a", salt=b"grain")
    with monkeypatch.context() as patch:
        patch.setattr(connections, "peer_is_me", lambda _: False)
        with pytest.raises(ConfigError, match="another user"):
            client.create_session("a", salt=b"grain")
    assert client.sessions() == []
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_s4_a_process_of_another_user_hears_nothing(server: RemoteServer) -> None:
    folder = Path(server.path).parent

    def try_it() -> bytes:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # nothing of pytest may run in here
            try:
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect("e.sock")
                    sock.sendall(HELLO)
                    os.write(write, b"heard " + sock.recv(100))
            except OSError as error:
                os.write(write, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            heard = told.read()
        os.waitpid(child, 0)
        return heard

    here = Path.cwd()
    os.chdir(folder)  # the folders above are pytest's
    try:
        assert try_it() == b"PermissionError"
        folder.chmod(0o755)
        Path(server.path).chmod(0o666)
        assert try_it() in (b"heard ", b"ConnectionResetError", b"BrokenPipeError")
    finally:
        os.chdir(here)
    _works(server)


def test_s4_no_port_is_opened(server: RemoteServer) -> None:
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is(fd)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not mine & {f"socket:[{row.split()[9]}]" for row in rows}


def _is(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # the descriptor of the listing
        return False


@pytest.mark.parametrize(
    "name",
    [
        "../../up",
        "/etc/passwd",
        "a/b/../c",
        "x" * 10_000,
        "\x00\n\x1b[2J",
        "\u00e9\U0001f600\ud800",
        ".",
    ],
)
def test_s2_names_of_sessions_are_no_paths(
    server: RemoteServer, manager: CacheManager, tmp_path: Path, name: str
) -> None:
    def listing() -> list[str]:
        return sorted(str(path) for path in tmp_path.parent.rglob("*"))

    before = listing()
    with RemoteManager(server.path) as client:
        assert client.create_session(name, tenant=name[:40]) == name
        with client.use_session(name):
            client.hint(stop_reason="end_turn")
            assert client.explain(kit.tokens(1))[0].tier is None
        assert [(info.id, info.tenant) for info in client.sessions()] == [(name, name[:40])]
        client.clear_session(name)
        client.destroy_session(name)
        assert client.sessions() == []
    assert listing() == before


def test_salts_are_told_to_nobody(
    manager: CacheManager, server: RemoteServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    salt = b"a very secret salt"
    with RemoteManager(server.path) as client:
        client.create_session("a", salt=salt)
        for text in (
            repr(client),
            repr(manager._names.get("a")),
            repr(client.sessions()),
            repr(client.stats()),
            caplog.text,
        ):
            assert salt.decode() not in text
            assert salt.hex() not in text
        assert client.explain(kit.tokens(1), session="a")


# ---------------------------------------------------------------------- the file


def test_what_a_dead_process_left_is_replaced(manager: CacheManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen(1)
    assert path.exists()
    with RemoteServer(manager, path) as server:
        _works(server)


def test_a_forked_child_does_not_keep_the_socket_of_a_dead_parent_alive(
    manager: CacheManager, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    dying = listen(tmp_path / "e.sock")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:  # nothing of pytest may run in here
        ours.close()
        theirs.send(b"!")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    assert ours.recv(1) == b"!"
    dying.sock.close()  # as the kernel does for a process that dies
    try:
        with RemoteServer(manager, tmp_path / "e.sock") as server:
            _works(server)
    finally:
        ours.close()
        os.waitpid(child, 0)


def test_what_is_no_socket_is_left_alone(manager: CacheManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "e.sock"
    path.write_text("a poem")
    server = RemoteServer(manager, path)
    with pytest.raises(ConfigError, match="is no socket"):
        server.start()
    server.close()
    assert path.read_text() == "a poem"


def test_a_living_server_is_not_pushed_aside(server: RemoteServer) -> None:
    with CacheManager(tiers=TIERS) as other:
        with pytest.raises(ConfigError, match="belongs to a server that runs"):
            RemoteServer(other, server.path).start()
        _works(server)
        Path(server.path).unlink()  # somebody made room by force
        with RemoteServer(other, server.path) as heir:
            server.close()
            _works(heir)  # its file was not taken along
        assert not Path(server.path).exists()


def test_a_folder_that_another_process_has_locked_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    from tierkv_adapters.remote import listening

    monkeypatch.setattr(listening, "_PATIENCE_S", 0.05)
    tmp_path.chmod(0o700)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="has locked this folder"):
            listen(tmp_path / "e.sock")
    finally:
        os.close(folder)
    listen(tmp_path / "e.sock").close()


# ---------------------------------------------------------------------- what comes back


def test_f041_an_answer_goes_to_nobody_but_who_asked(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RemoteManager(server.path)
    client.create_session("a")
    plain = connections.Connection.ask

    def interrupted(self: connections.Connection, header: dict[str, Any], *rest: Any) -> Any:
        if header["op"] != "flush":
            return plain(self, header, *rest)
        self._sock.sendall(encode(header))
        raise KeyboardInterrupt

    monkeypatch.setattr(connections.Connection, "ask", interrupted)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            client.flush()
        assert [info.id for info in client.sessions()] == ["a"]
    client.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"garbage that is no frame",
        HEAD.pack(2**31, 2**31),
        encode({"ok": True}, b"{"),
        encode({"ok": True}, b"[1, 2]"),
        encode({"ok": True}, json.dumps({"surprise": 1}).encode()),
        encode({"ok": False}),
        encode({"ok": False, "error": {"kind": "SystemExit", "text": "boom"}}),
        encode({"nothing": 1}),
    ],
)
def test_a_reply_that_is_none_is_a_typed_error(tmp_path: Path, reply: bytes) -> None:
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as fake:
        fake.bind(str(path))
        fake.listen(8)

        def serve() -> None:
            hello = encode({"ok": True, "wire": 1, "instance": "i", "line": "l"})
            while True:
                try:
                    peer, _ = fake.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(hello)
                    peer.recv(1 << 16)
                    peer.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = RemoteManager(path)
        with pytest.raises(TierKVError):
            client.stats()
        client.close()
        fake.shutdown(socket.SHUT_RDWR)
        thread.join(GUARD)
