"""What an engine holds, told to an index: whole, in order, and never with a gap."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.blocks import KeyChain
from tierkv.decisions.types import GroupRule
from tierkv.errors import ClosedError
from tierkv_adapters.remote import LocalFeed, RemoteManager, RemoteServer, SocketFeed, streams
from tierkv_adapters.remote import server as serving
from tierkv_adapters.remote.wire import FrameReader, encode, pack_changes
from tierkv_adapters.serving.replicas import ReplicaIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Space

GUARD = 60.0
TIERS = [tierkv.Tier("host", "8MiB")]


def _until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def _keys(space: Space, ids: Sequence[int]) -> list[BlockKey]:
    chain = KeyChain(space.root(), space.block_tokens)
    chain.follow(ids)
    return chain.keys


def _rules(space: Space) -> list[GroupRule]:
    return [GroupRule(group.kind, group.window) for group in space.layout.groups]


def _store(manager: CacheManager, ids: Sequence[int], space: Space | None = None) -> None:
    layout = (space or kit.space()).layout
    kv = kit.Memory(layout, len(ids), seed=1)
    name = manager.create_session()
    manager.store(ids, kv.view, session=name, space=space)


class Book:
    """An index that writes down what it is told."""

    def __init__(self) -> None:
        self.parts: dict[PartId, int] = {}
        self.said: list[str] = []
        self.threads: set[str] = set()
        self.fails = False

    def apply(self, rank: int, changes: Sequence[tuple[PartId, int]]) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("planted")
        for part, tiers in changes:
            self.parts[part] = tiers
        self.parts = {part: tiers for part, tiers in self.parts.items() if tiers}

    def complete(self, rank: int) -> None:
        self.said.append(f"complete {rank}")

    def lost(self, rank: int) -> None:
        self.said.append(f"lost {rank}")
        self.parts = {}


def test_both_kinds_tell_the_same(manager: CacheManager, server: RemoteServer) -> None:
    _store(manager, kit.tokens(4))
    index = ReplicaIndex(2)
    near, far = LocalFeed(manager, index, 0), SocketFeed(server.path, index, 1)
    assert near.start(GUARD)
    assert far.start(GUARD)
    assert index.is_complete()
    ids = kit.tokens(4)
    keys = [_keys(kit.space(), ids)] * 2
    assert index.match(keys, _rules(kit.space()), kit.BLOCK) == 4
    longer = [*ids, *kit.tokens(3, seed=5)]
    _store(manager, longer)
    keys = [_keys(kit.space(), longer)] * 2
    _until(lambda: index.match(keys, _rules(kit.space()), kit.BLOCK) == 7, "what is new is told")
    manager.reset()
    _until(lambda: index.parts(0) == index.parts(1) == 0, "what goes is told")
    for feed in (near, far):
        with pytest.raises(ClosedError, match="started once"):
            feed.start(0)
        feed.close()
        feed.close()
    assert not index.is_complete()


@pytest.mark.parametrize("layout", ["full", "sliding", "latent", "state"])
def test_the_index_comes_to_what_the_engine_would_match(
    layout: str, tmp_path: Path, no_thread_leaks: None
) -> None:
    dice = random.Random(layout)
    space = kit.space(layout)
    tiers = [tierkv.Tier("host", "48KiB"), *kit.tiers("nvme", tmp_path)]
    with CacheManager(tiers=tiers, space=space, metrics=False) as manager:
        index = ReplicaIndex(1)
        with RemoteServer(manager, tmp_path / "s" / "e.sock") as server:
            feed = SocketFeed(server.path, index, 0)
            prompts: list[list[int]] = []
            for number in range(14):
                base = dice.choice(prompts)[: 16 * dice.randint(0, 4)] if prompts else []
                prompts.append([*base, *kit.tokens(dice.randint(1, 5), seed=number)])
                _store(manager, prompts[-1], space)
                if number == 4:  # in the middle of it all
                    assert feed.start(GUARD)
            manager.flush()

            def found(ids: Sequence[int]) -> int:
                async def ask() -> int:
                    async with (
                        manager.handle(name, space) as session,
                        session.match(ids) as match,
                    ):
                        return match.tokens // kit.BLOCK

                name = manager.create_session()
                return manager.call(ask)

            def known(ids: Sequence[int]) -> int:
                return index.match([_keys(space, ids)], _rules(space), kit.BLOCK)

            def agreed() -> bool:
                return [known(ids) for ids in prompts] == [found(ids) for ids in prompts]

            _until(agreed, "index and engine agree at rest")
            assert any(known(ids) for ids in prompts)
            feed.close()


def test_a_broken_feed_loses_its_rank_and_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_thread_leaks: None, no_fd_leaks: None
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "s" / "e.sock"
    index = ReplicaIndex(1)
    feed = SocketFeed(path, index, 0)
    assert not feed.start(0.01), "nobody is there yet"
    for life in (2, 3):
        with CacheManager(tiers=TIERS, space=kit.space(), metrics=False) as manager:
            _store(manager, kit.tokens(life, seed=life))
            with RemoteServer(manager, path):
                _until(index.is_complete, "it connects by itself")
                assert index.parts(0) == life, "nothing of the life before is left"
        _until(lambda: not index.is_complete(), "it breaks")
        assert index.parts(0) == 0
    feed.close()
    broken = [r for r in caplog.records if "is broken, and tried again" in r.getMessage()]
    assert len(broken) == 3, "each outage is told once"
    assert {record.levelno for record in broken} == {logging.INFO}, "an end is no reason to worry"


def test_one_thread_serves_all_feeds_and_ends_with_the_last(
    manager: CacheManager, server: RemoteServer
) -> None:
    _store(manager, kit.tokens(2))
    books = [Book() for _ in range(5)]
    feeds = [SocketFeed(server.path, book, rank) for rank, book in enumerate(books)]
    assert all(feed.start(GUARD) for feed in feeds)
    assert set().union(*(book.threads for book in books)) == {"tierkv-feeds"}
    assert sum(thread.name == "tierkv-feeds" for thread in threading.enumerate()) == 1
    assert [book.said for book in books] == [[f"complete {rank}"] for rank in range(5)]
    for rank, feed in enumerate(feeds):
        feed.close()
        assert books[rank].said == [f"complete {rank}", f"lost {rank}"]
    _until(
        lambda: all(thread.name != "tierkv-feeds" for thread in threading.enumerate()),
        "the thread ends",
    )
    again = SocketFeed(server.path, books[0], 0)
    assert again.start(GUARD)
    again.close()


def test_nothing_is_told_after_a_feed_was_closed(
    manager: CacheManager, server: RemoteServer
) -> None:
    book, other = Book(), Book()
    near, far = LocalFeed(manager, book, 0), SocketFeed(server.path, book, 1)
    stays = SocketFeed(server.path, other, 0)
    for feed in (near, far, stays):
        assert feed.start(GUARD)
    near.close()
    far.close()
    before = list(book.said)
    _store(manager, kit.tokens(3))
    _until(lambda: len(other.parts) == 3, "it is told to who still listens")
    assert (book.said, book.parts) == (before, {})
    stays.close()


def test_an_index_that_fails_harms_no_other_feed(
    manager: CacheManager, server: RemoteServer, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Book(), Book()
    bad.fails = True
    _store(manager, kit.tokens(2))
    feeds = [SocketFeed(server.path, bad, 0), SocketFeed(server.path, good, 1)]
    assert not feeds[0].start(0.05)
    assert feeds[1].start(GUARD)
    _store(manager, kit.tokens(5))
    _until(lambda: len(good.parts) == 5, "the other one is told everything")
    assert "planted" in caplog.text
    bad.fails = False
    _until(lambda: len(bad.parts) == 5, "and the one that failed begins anew")
    for feed in feeds:
        feed.close()


def test_a_feed_may_be_closed_by_what_it_tells(manager: CacheManager, server: RemoteServer) -> None:
    class Closing(Book):
        def complete(self, rank: int) -> None:
            super().complete(rank)
            feed.close()

    book = Closing()
    feed = SocketFeed(server.path, book, 0)
    feed.start(GUARD)
    _until(lambda: book.said == ["complete 0", "lost 0"], "it is closed")


def test_closing_the_manager_loses_its_rank(tmp_path: Path, no_thread_leaks: None) -> None:
    book = Book()
    with CacheManager(tiers=TIERS, space=kit.space(), metrics=False) as manager:
        _store(manager, kit.tokens(2))
        feed = LocalFeed(manager, book, 3)
        assert feed.start(GUARD)
        assert len(book.parts) == 2
    assert book.said == ["complete 3", "lost 3"]
    feed.close()
    assert book.said == ["complete 3", "lost 3"]
    with pytest.raises(ClosedError):
        LocalFeed(manager, book, 0).start(0)


def test_a_reader_that_falls_behind_loses_its_connection_not_a_change(
    manager: CacheManager, server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[streams.Stream] = []

    class Kept(streams.Stream):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(streams, "MOST_BEHIND", 64)
    monkeypatch.setattr(serving, "Stream", Kept)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(GUARD)
        sock.connect(server.path)
        sock.sendall(encode({"op": "hello", "wire": 1}) + encode({"op": "subscribe"}))
        reader, events = FrameReader(), 0
        while events < 3:  # hello, subscribed, complete
            events += len(list(reader.feed(sock.recv(1 << 16))))

        [stream] = made
        told: Any = stream._told

        async def behind() -> None:
            some: Any = [(number.to_bytes(34, "little"), 1) for number in range(65)]
            told(some)
            assert not stream._waiting, "what waited is dropped with the connection"

        manager.call(behind)
        try:
            rest = sock.recv(1 << 16)
        except ConnectionError:
            rest = b""
        assert rest == b"", "not one change came without the others"
    with RemoteManager(server.path) as client:
        assert client.health()["status"] == "open"


def test_a_part_that_changes_while_it_waits_is_told_as_it_is(manager: CacheManager) -> None:
    sent: list[tuple[dict[str, Any], bytes]] = []

    class Writer:
        def write(self, data: bytes) -> None:
            sent.extend(FrameReader().feed(data))

    stream: Any = streams.Stream(manager.engine, Writer())  # type: ignore[arg-type]
    parts: list[Any] = [bytes([n]) * 34 for n in range(3)]
    stream._told([(parts[0], 1), (parts[1], 1)])
    stream._told([(parts[0], 0)])
    stream._told(())
    stream._told([(parts[2], 3), (parts[1], 2)])
    stream._send()
    assert [header["on"] for header, _ in sent] == ["changes", "complete"]
    assert pack_changes([(parts[0], 0), (parts[1], 2), (parts[2], 3)]) == sent[0][1]


def test_a_long_snapshot_ends_although_changes_go_on(
    manager: CacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_FRAME", 4)
    said: list[str] = []

    class Writer:
        def write(self, data: bytes) -> None:
            said.extend(header["on"] for header, _ in FrameReader().feed(data))

    stream: Any = streams.Stream(manager.engine, Writer())  # type: ignore[arg-type]
    stream._told([(number.to_bytes(34, "little"), 1) for number in range(10)])
    stream._told(())
    for round_ in range(4):  # as many new changes as are sent, each time
        stream._send()
        stream._told([((100 + 4 * round_ + n).to_bytes(34, "little"), 1) for n in range(4)])
    assert said == ["changes", "changes", "changes", "complete", "changes"]


@pytest.mark.parametrize(
    "reply",
    [
        b"garbage that is no frame",
        encode({"ok": False, "error": {"kind": "ConfigError", "text": "another version"}}),
        encode({"ok": True}) + encode({"ok": True}) + encode({"on": "mystery"}),
        encode({"ok": True}) + encode({"ok": True}) + encode({"on": "changes"}, b"short"),
    ],
    ids=["garbage", "refused", "mystery", "short"],
)
def test_what_is_no_news_breaks_the_feed_and_nothing_else(
    tmp_path: Path, reply: bytes, caplog: pytest.LogCaptureFixture, no_thread_leaks: None
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "e.sock"
    calls = threading.Semaphore(0)
    with socket.socket(socket.AF_UNIX) as fake:
        fake.bind(str(path))
        fake.listen(8)

        def serve() -> None:
            while True:
                try:
                    peer, _ = fake.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(reply)
                calls.release()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        book = Book()
        feed = SocketFeed(path, book, 0)
        assert not feed.start(0.01)
        for _ in range(3):
            assert calls.acquire(timeout=GUARD), "it goes on trying"
        feed.close()
        assert set(book.said) == {"lost 0"}
        assert caplog.text.count("is broken, and tried again") == 1
        fake.shutdown(socket.SHUT_RDWR)
        thread.join(GUARD)


def test_feeds_that_were_closed_leave_no_task(manager: CacheManager) -> None:
    """Adapters come and go over a manager that an application lends."""

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    before = manager.call(tasks)
    for _ in range(5):
        feed = LocalFeed(manager, ReplicaIndex(1), 0)
        assert feed.start(GUARD)
        feed.close()
    _until(lambda: manager.call(tasks) <= before, "tasks of closed feeds stay")
