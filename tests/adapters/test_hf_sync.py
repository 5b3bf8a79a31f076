"""An attached model on a CacheManager: scripts of synchronous style."""

from __future__ import annotations

import gc
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tierkv.blocking import CacheManager
from tierkv.errors import AttachError, ClosedError, ConfigError
from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 8
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
HOST = tierkv.Tier("host", capacity="64MiB")


class Letters:
    """A tokenizer of one token a letter; no model of it is needed to count tokens."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [3 + ord(c) % 90 for c in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i + 87) for i in ids if i > 2 or not skip_special_tokens)


@pytest.fixture
def manager() -> Iterator[CacheManager]:
    with CacheManager(tiers=[HOST], policy="lru", block_tokens=BLOCK, metrics=True) as opened:
        yield opened


class ChatSession:
    """As in existing serving code: a session whose life is that of an object."""

    def __init__(self, manager: CacheManager) -> None:
        self.session_id, self.manager = str(uuid.uuid4()), manager
        manager.create_session(self.session_id)

    def chat(self, kv: Any, text: str, **sampling: Any) -> Any:
        with self.manager.use_session(self.session_id):
            return kv.generate(text, **sampling)

    def clear_history(self) -> None:
        self.manager.clear_session(self.session_id)

    def __del__(self) -> None:
        self.manager.destroy_session(self.session_id)


def test_attach_to_hf(kit: Any) -> None:
    model = kit.make("llama")
    forward, hooks = model.forward, len(model._forward_hooks)
    with CacheManager(tiers=[HOST], policy="lru", block_tokens=BLOCK, metrics=True) as m:
        kv = hf.attach(model, m, tokenizer=Letters())
        m.create_session("a")
        with m.use_session("a"):
            kv.generate("Write quicksort in Python.", **GREEDY)
        status = kv.status()
        assert status.attached
        assert status.requests_seen == 1
        assert status.blocks_stored > 0
        kv.detach()
    assert model.forward == forward
    assert len(model._forward_hooks) == hooks


def test_chat_turns(kit: Any, model: Any, manager: CacheManager) -> None:
    kv = hf.attach(model, manager, tokenizer=Letters())
    s, other = ChatSession(manager), ChatSession(manager)
    r1 = s.chat(kv, "Write a quicksort function in Python.", **GREEDY)
    other.chat(kv, "Tell me about the sea.", **GREEDY)  # no crosstalk
    r2 = s.chat(kv, "Good, add detailed comments to it.", **GREEDY)
    seen = r1.output_ids
    assert r2.input_ids[: len(seen)] == seen
    assert r2.reused_tokens >= (len(seen) - 1) // BLOCK * BLOCK
    assert compare_tokens(model, kit.plain(model, r2.input_ids), r2.output_ids).ok
    s.clear_history()
    r3 = s.chat(kv, "What is the capital of France?", **GREEDY)
    fresh = ChatSession(manager).chat(kv, "What is the capital of France?", **GREEDY)
    assert r3.input_ids == fresh.input_ids
    assert compare_tokens(model, kit.plain(model, r3.input_ids), r3.output_ids).ok
    sid = s.session_id
    del s
    gc.collect()
    assert sid not in {info.id for info in manager.sessions()}
    assert manager.stats().leases == 0
    manager.destroy_session(sid)  # idempotent


def test_two_managers_are_isolated(llama: Any, manager: CacheManager) -> None:
    with CacheManager(name="other", tiers=[HOST], block_tokens=BLOCK) as second:
        one = hf.attach(llama, manager, tokenizer=Letters())
        two = hf.attach(llama, second, tokenizer=Letters())
        text = "the same words in both"
        for kv, m in ((one, manager), (two, second)):
            assert ChatSession(m).chat(kv, text, **GREEDY).reused_tokens == 0
        before = manager.stats().counters()
        assert ChatSession(second).chat(two, text, **GREEDY).reused_tokens > 0
        assert manager.stats().counters() == before


def test_threads_on_one_model(kit: Any, llama: Any, manager: CacheManager) -> None:
    kv = hf.attach(llama, manager)
    prefix: list[int] = kit.prompt(40)[0].tolist()
    manager.create_session("first")
    kv.generate(prefix, session="first", **GREEDY)

    def ask(number: int) -> Any:
        name = manager.create_session(f"s{number}")
        with manager.use_session(name):
            return kv.generate([*prefix, 3 + number, 9], **GREEDY)

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(16)))
    for reply in replies:
        assert reply.reused_tokens == 40
        assert compare_tokens(llama, kit.plain(llama, reply.input_ids), reply.output_ids).ok


def test_stream(kit: Any, llama: Any, manager: CacheManager) -> None:
    kv = hf.attach(llama, manager, tokenizer=Letters())
    manager.create_session("a")
    with manager.use_session("a"), kv.stream("hello there", **GREEDY) as tokens:
        got = list(tokens)
        assert tokens.result is not None
        assert [token.id for token in got] == tokens.result.output_ids[-12:]
        assert "".join(token.text for token in got) == tokens.result.text
    with kv.stream("more", session="a", max_new_tokens=300, do_sample=False) as tokens:
        next(tokens)
    assert tokens.result is None  # left early: stopped, and as if never said
    reply = kv.generate("more", session="a", **GREEDY)
    assert reply.prompt_tokens == 12 + 12 + 4
    with pytest.raises(ClosedError, match="inside its 'with'"):
        next(kv.stream("x", session="a"))


def test_a_session_is_needed(llama: Any, manager: CacheManager) -> None:
    kv = hf.attach(llama, manager)
    with pytest.raises(ConfigError, match="use_session"):
        kv.generate([1, 2, 3])
    with pytest.raises(ConfigError, match="unheard"):
        kv.generate([1, 2, 3], session="unheard", **GREEDY)
    assert kv.status().requests_seen == 1


def test_f010_tenant_and_salt_of_the_session(kit: Any, llama: Any, manager: CacheManager) -> None:
    kv = hf.attach(llama, manager)
    ids: list[int] = kit.prompt(40)[0].tolist()
    options: list[dict[str, Any]] = [{}, {"tenant": "acme"}, {"salt": b"s"}, {"tenant": "acme"}]
    reused = []
    for number, option in enumerate(options):
        name = manager.create_session(f"s{number}", **option)
        reused.append(kv.generate(ids, session=name, **GREEDY).reused_tokens)
    assert reused == [0, 0, 0, 32]


def test_errors_of_the_model_reach_the_caller(llama: Any, manager: CacheManager) -> None:
    def broken(_ids: Any, _scores: Any) -> Any:
        raise ZeroDivisionError("broken processor")

    kv = hf.attach(llama, manager)
    manager.create_session("a")
    with pytest.raises(ZeroDivisionError, match="broken"):
        kv.generate([1, 2], session="a", logits_processor=[broken], **GREEDY)
    with pytest.raises(AttachError, match="num_beams"):
        kv.generate([1, 2], session="a", num_beams=2)
    assert kv.generate([1, 2], session="a", **GREEDY).prompt_tokens == 2


def test_after_close(llama: Any) -> None:
    with CacheManager(tiers=[HOST], block_tokens=BLOCK) as m:
        kv = hf.attach(llama, m)
        m.create_session("a")
        kv.generate([1, 2, 3], session="a", **GREEDY)
    with pytest.raises(ClosedError):
        kv.generate([1, 2, 3], session="a", **GREEDY)
