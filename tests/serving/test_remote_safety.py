"""Nothing that comes through the socket, in either direction, harms the engine or a client."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.serving.remote_rig import GUARD, HELLO, dial, rest, works
from tierkv.errors import ConfigError, TierKVError
from tierkv_adapters.remote import RemoteManager, RemoteServer, connections
from tierkv_adapters.remote import server as serving
from tierkv_adapters.remote.wire import HEAD, FrameReader, encode, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkv.blocking import CacheManager


class _Marker:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.path,)


# ---------------------------------------------------------------------- what comes in


def test_f091_a_pickle_is_not_run(
    manager: CacheManager, server: RemoteServer, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    bomb = pickle.dumps(_Marker(str(marker)))
    bomb += b"." * (1 - len(bomb) % 2)  # no whole number of token ids, however long the path
    frame = HEAD.pack(len(bomb), len(bomb)) + bomb + bomb
    for said in (bomb, frame, HELLO + bomb, HELLO + frame):
        sock = dial(server)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        rest(sock)
    with dial(server) as sock:
        sock.sendall(HELLO + encode({"op": "explain", "tokens": True}, bomb))
        sock.sendall(encode({"op": "hold", "line": "x"}, bomb))
        sock.shutdown(socket.SHUT_WR)
        assert b"ConfigError" in rest(sock)
    assert not marker.exists()
    works(server)


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
        sock = dial(server)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except ConnectionError:  # it has heard enough
            pass
        rest(sock)
    works(server)
    assert manager.stats().leases == 0


def test_fields_of_another_kind_are_typed_errors_and_the_connection_goes_on(
    server: RemoteServer,
) -> None:
    sock = dial(server)
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
    answers = [header for header, _ in FrameReader().feed(rest(sock))]
    assert [answer["ok"] for answer in answers] == [True, *[False] * len(bad), True]
    kinds = {answer["error"]["kind"] for answer in answers[1:-1]}
    assert kinds == {"ConfigError", "ClosedError"}


def test_another_version_is_told_so(server: RemoteServer) -> None:
    for first in ({"op": "hello", "wire": 99}, {"op": "sessions"}):
        sock = dial(server)
        sock.sendall(encode(first))
        [(answer, _)] = FrameReader().feed(rest(sock))
        assert "speaks version 1" in answer["error"]["text"]
    works(server)


def test_a_peer_that_says_nothing_holds_up_nobody(
    manager: CacheManager, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = dial(server)
    half.sendall(HELLO + encode({"op": "sessions"})[:11])
    deaf = dial(server)  # never reads what it asks for
    deaf.sendall(HELLO + encode({"op": "stats"}) * 2000)
    works(server)
    monkeypatch.setattr(serving, "_HELLO_S", 0.02)
    silent = dial(server)
    assert rest(silent) == b""
    works(server)
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
