"""Engines that are known by their sockets before they are there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv.errors import ClosedError, ConfigError
from tierkv_adapters.remote import RemoteServer
from tierkv_adapters.remote.awaited import AwaitedEngines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_thread_leaks")


class Place:
    """Two ranks' sockets, and what comes to listen there."""

    def __init__(self, folder: Path) -> None:
        self.sockets = [str(folder / f"rank{number}.sock") for number in range(2)]
        self.engines = AwaitedEngines(self.sockets, "the toy engine")
        self.managers: list[CacheManager] = []

    def come(self) -> None:
        for socket in self.sockets:
            manager = CacheManager(tiers=[tierkv.Tier("host", "8MiB")], space=kit.space())
            self.managers.append(manager.open())
            RemoteServer(manager, socket).start()

    def known(self, name: str) -> list[bool]:
        return [manager.knows_session(name) for manager in self.managers]

    def close(self) -> None:
        self.engines.close()
        for manager in self.managers:
            manager.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "s")
    yield place
    place.close()


def test_sessions_wait_for_the_engines(place: Place) -> None:
    engines = place.engines
    assert engines.create_session("a", tenant="acme") == "a"
    assert not engines.reached()
    assert engines.knows_session("a")
    assert [info.id for info in engines.sessions()] == ["a"]
    place.come()
    assert engines.knows_session("a")
    assert place.known("a") == [True, True]
    engines.create_session("b")
    assert place.known("b") == [True, True]
    assert {info.id for info in engines.sessions()} == {"a", "b"}


def test_what_needs_the_engines_says_that_they_are_not_there(place: Place) -> None:
    with pytest.raises(ClosedError, match=r"the toy engine is not there.*rank0\.sock"):
        place.engines.stats()
    with pytest.raises(ClosedError):
        place.engines.clear_session("a")
    with pytest.raises(ConfigError, match="needs its name"):
        place.engines.create_session()


def test_a_name_is_taken_once(place: Place) -> None:
    place.engines.create_session("a", tenant="acme")
    with pytest.raises(ConfigError, match="exists"):
        place.engines.create_session("a")
    assert place.engines.create_session("a", tenant="acme", adopt=True) == "a"


def test_what_changes_something_is_asked_of_every_rank(place: Place) -> None:
    place.come()
    engines = place.engines
    engines.create_session("a")
    engines.flush()
    assert engines.reset() == 0
    engines.destroy_session("a")
    assert engines.knows_session("a") is False
    assert engines.stats().sessions == 0


def test_one_rank_that_is_gone_does_not_keep_the_others_from_being_asked(place: Place) -> None:
    place.come()
    assert place.engines.reached()
    asked: list[str] = []
    first, second = place.engines.clients

    def gone() -> int:
        asked.append("first")
        raise ClosedError("planted")

    def there() -> int:
        asked.append("second")
        return 3

    first.reset, second.reset = gone, there  # type: ignore[method-assign]
    with pytest.raises(ClosedError, match="planted"):
        place.engines.reset()
    assert asked == ["first", "second"]


def test_sessions_are_destroyed_while_the_engines_come(place: Place) -> None:
    """``destroy_session`` never blocks, so nothing keeps it out while the others are created."""
    engines = place.engines
    for name in ("a", "b", "c"):
        engines.create_session(name)
    place.come()
    first = engines.clients[0]
    create = first.create_session

    def meanwhile(name: str, **fields: Any) -> str:
        if name == "a":
            for gone in ("a", "b"):
                other = threading.Thread(target=engines.destroy_session, args=[gone])
                other.start()
                other.join()
        return create(name, **fields)

    first.create_session = meanwhile  # type: ignore[method-assign, assignment]
    assert engines.reached()
    engines.stats()
    assert engines.clients[1].sessions()
    assert [place.known(name) for name in ("a", "b", "c")] == [
        [False, False],
        [False, False],
        [True, True],
    ]
