"""O2: tokens and salts stay out of logs and reprs. And: what is shared needs no engine."""

from __future__ import annotations

import ast
import logging
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tierkv_adapters.remote
import tierkv_adapters.serving
from tests.serving.rank_rig import RankRig, prompt
from tierkv.blocks import Media
from tierkv_adapters.serving.orders import (
    Grown,
    HintOrder,
    LoadOrder,
    RequestFacts,
    SaveOrder,
    StepOrders,
)
from tierkv_adapters.trtllm.feed import Wish
from tierkv_adapters.trtllm.metadata import StepMeta
from tierkv_adapters.trtllm.tracking import Tracked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SALT = b"very-secret-salt"
TOKEN = 2_000_031_337
FACTS = RequestFacts("r1", session="chat", tenant="acme", salt=SALT, media=(Media(0, b"digest"),))


def _orders() -> StepOrders:
    ids = array("I", [TOKEN] * 8)
    return StepOrders(
        fresh=[FACTS],
        grown=[Grown("r1", ids, (array("q", [1, 2]),))],
        loads=[LoadOrder("r1", 0, 4)],
        saves=[SaveOrder("r1", 4, 8)],
        hints=[HintOrder(FACTS, "pin", ids, seconds=3.0), HintOrder(FACTS, "prefetch")],
    )


@pytest.mark.parametrize(
    "told",
    [
        FACTS,
        _orders(),
        StepMeta("/run/x", "here", _orders()),
        Wish(FACTS, [TOKEN] * 8, 8, stored=False),
        Tracked(FACTS, [TOKEN] * 8, [TOKEN]),
    ],
    ids=lambda told: type(told).__name__,
)
def test_o2_what_travels_shows_no_token_and_no_salt(told: object) -> None:
    text = repr(told)
    assert str(TOKEN) not in text
    assert "secret" not in text
    assert SALT.hex() not in text


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


@pytest.mark.usefixtures("no_thread_leaks")
def test_o2_logs_of_a_rank_hold_no_token_and_no_salt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails: the lines that tell of it name requests and reasons."""
    caplog.set_level(logging.DEBUG)
    with RankRig() as rig:
        ids = [TOKEN, *prompt(31)]
        facts = RequestFacts("a", session="chat", salt=SALT)
        rig.save("a", ids, facts)
        hint = HintOrder(facts, "pin", array("I", ids), seconds=60.0)
        monkeypatch.setattr(rig.manager.engine, "hold", _broken)
        rig.rank.begin(rig.step(hints=[hint], saves=[SaveOrder("b", 0, 8)]))
        rig.rank.start_saves()
        rig.load("c", ids, facts=RequestFacts("c", session="chat", salt=b"other-secret"))
        monkeypatch.setattr(rig.rank._side._pools, "view", _broken)
        rig.load("d", ids, facts=RequestFacts("d", session="chat", salt=SALT))
        assert rig.rank.drain(60)
    text = "\n".join(record.getMessage() for record in caplog.records)
    for told in ("a hint was not followed", "a save was refused", "short load", "a load failed"):
        assert told in text
    assert "secret" not in text
    assert str(TOKEN) not in text


def _imports(package: ModuleType) -> Iterator[tuple[str, str]]:
    (folder,) = package.__path__
    for path in sorted(Path(folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path.name, node.module


@pytest.mark.parametrize("package", [tierkv_adapters.serving, tierkv_adapters.remote])
def test_what_adapters_share_imports_no_engine_and_no_adapter(package: ModuleType) -> None:
    found = list(_imports(package))
    assert len(found) > 50
    ours = {"tierkv_adapters.remote", "tierkv_adapters.serving"}
    for file, name in found:
        assert name.partition(".")[0] not in {"vllm", "tensorrt_llm", "transformers"}, file
        if name.startswith("tierkv_adapters"):
            assert any(name == own or name.startswith(f"{own}.") for own in ours), (file, name)
