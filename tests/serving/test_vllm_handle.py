"""Handles without vLLM: turns of sessions, joined by ids, alone and in batches."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.vllm_fakes import MODE, Engine, EngineArgs
from tierkv.errors import AttachError, ConfigError
from tierkv_adapters import vllm as tk
from tierkv_adapters.vllm.attached.sampling import translated

if TYPE_CHECKING:
    from tierkv.blocking import CacheManager


@pytest.fixture
def handle(manager: CacheManager, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Engine]:
    """A handle over the engine above."""
    monkeypatch.setenv(MODE, "0")
    fake = SimpleNamespace(SamplingParams=lambda **fields: fields)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", None)  # an older one
    engine = Engine(tk.attach(EngineArgs(), manager))
    return tk.attach(engine, manager), engine


def test_turns_are_joined_by_ids(manager: CacheManager, handle: tuple[Any, Engine]) -> None:
    kv, engine = handle
    manager.create_session("a", ttl=60)
    with manager.use_session("a"):
        one = kv.generate("hello", max_new_tokens=9, do_sample=False, stop=["x"])
        two = kv.generate("you")
    assert one.text == "lo"
    assert one.output_ids == list(map(ord, "hellolo"))
    assert two.input_ids == list(map(ord, "helloloyou"))
    assert (one.reused_tokens, one.tier, one.by_tier) == (3, "host", {"vllm": 1, "host": 2})
    assert one.prompt_tokens == 5
    params = engine.asked[0]["params"]
    assert (params["max_tokens"], params["temperature"], params["stop"]) == (9, 0.0, ["x"])
    asked = params["extra_args"]["kv_transfer_params"]["tierkv"]
    assert asked == {"session": "a", "tenant": "", "salt": "", "report": True, "ttl": 60.0}
    # token ids are the whole prompt, unless they are to follow
    assert kv.generate([5, 6], session="a").input_ids == [5, 6]
    assert kv.generate([7], session="a", append=True).input_ids == [5, 6, 5, 6, 7]


def test_a_history_ends_with_clear_reset_and_destroy(
    manager: CacheManager, handle: tuple[Any, Engine]
) -> None:
    kv, engine = handle

    def seen() -> int:
        return len(kv.generate("x", session="a").input_ids)

    def again() -> None:
        manager.destroy_session("a")
        manager.create_session("a")

    manager.create_session("a")
    assert (seen(), seen()) == (1, 3)
    for forget in (lambda: manager.clear_session("a"), manager.reset, again):
        forget()
        assert (seen(), seen()) == (1, 3)
    engine.on_step = lambda: manager.clear_session("a")
    assert seen() == 6
    engine.on_step = lambda: None
    assert seen() == 1, "a turn that was under way while it was cleared leaves nothing"
    engine.on_step = lambda: manager.destroy_session("a")
    seen()
    with pytest.raises(ConfigError, match="no session 'a'"):
        seen()


def test_sessions_of_one_batch_keep_their_own(
    manager: CacheManager, handle: tuple[Any, Engine]
) -> None:
    kv, engine = handle
    for name, tenant in (("a", ""), ("b", "acme"), ("c", "other")):
        manager.create_session(name, tenant=tenant)
    names = ["a", "b", "c"]
    kv.generate(["aa", "bb", "cc"], sessions=names)
    replies = kv.generate(["1", "2", "3"], sessions=names)
    assert [reply.text for reply in replies] == ["a1", "b2", "c3"]
    assert ["".join(map(chr, reply.input_ids)) for reply in replies] == ["aaaa1", "bbbb2", "cccc3"]
    salts = [asked.get("cache_salt") for asked in engine.asked[:3]]
    assert salts[0] is None
    assert len({*salts}) == 3, "vLLM's own cache has to keep tenants apart"
    with pytest.raises(ConfigError, match="named twice"):
        kv.generate(["a", "b"], sessions=["a", "a"])
    with pytest.raises(ConfigError, match="2 prompts for 3 sessions"):
        kv.generate(["a", "b"], sessions=names)
    with pytest.raises(ConfigError, match="no session is current"):
        kv.generate("a")


def test_a_turn_that_fails_leaves_the_session_as_it_was(
    manager: CacheManager, handle: tuple[Any, Engine]
) -> None:
    kv, engine = handle
    manager.create_session("a")
    kv.generate("hello", session="a")

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        kv.generate("more", session="a")
    assert len(engine.aborted) == 1
    engine.on_step = lambda: None
    assert kv.generate("!", session="a").input_ids == list(map(ord, "hellolo!"))
    engine.add_request("foreign", {"prompt_token_ids": [1, 2]}, None)
    with pytest.raises(AttachError, match="not this handle's"):
        kv.generate("!", session="a")
    engine.step()
    engine.step()
    kv.detach()
    with pytest.raises(AttachError, match="detached"):
        kv.generate("!", session="a")


def test_sampling_by_either_name() -> None:
    assert translated({"max_new_tokens": 3, "do_sample": True}) == {"max_tokens": 3}
    with pytest.raises(AttachError, match="are the same"):
        translated({"max_new_tokens": 3, "max_tokens": 4})
    with pytest.raises(AttachError, match="greedy"):
        translated({"do_sample": False, "temperature": 0.5})
