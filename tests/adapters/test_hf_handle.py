"""An attached model on an engine: turns, reuse, isolation, failures, streams, cancellation."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import tierkv
from tierkv.blocks import KeyChain, part_id
from tierkv.errors import AttachError, BackendError, ClosedError, SessionBusyError
from tierkv.registry import resolve
from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

BLOCK = 8
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
HOST = tierkv.Tier("host", "64MiB")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def opened(**settings: Any) -> Any:
    return tierkv.open(**({"tiers": [HOST], "block_tokens": BLOCK} | settings))


def ids_of(kit: Any, tokens: int, seed: int = 1) -> list[int]:
    ids: list[int] = kit.prompt(tokens, seed)[0].tolist()
    return ids


# ----------------------------------------------------------------- reuse


async def test_turns_reuse_and_equal_plain_generation(kit: Any, model: Any) -> None:
    async with opened() as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(ids_of(kit, 60), session="a", **GREEDY)
        assert (first.reused_tokens, first.tier, first.by_tier) == (0, None, {})
        assert compare_tokens(model, kit.plain(model, first.input_ids), first.output_ids).ok
        seen = first.output_ids
        for turn in range(3):
            more = ids_of(kit, 5, seed=turn)
            reply = await kv.generate(more, append=True, session="a", **GREEDY)
            assert reply.input_ids == seen + more
            assert reply.prompt_tokens == len(seen) + 5
            assert reply.reused_tokens == (len(seen) - 1) // BLOCK * BLOCK
            assert reply.tier == "host"
            assert reply.by_tier["host"] > 0
            assert compare_tokens(model, kit.plain(model, reply.input_ids), reply.output_ids).ok
            seen = reply.output_ids
        assert engine.stats().leases == 0
        status = kv.status()
        assert status.requests_seen == 4
        assert status.blocks_stored == (len(seen) - 1) // BLOCK
        assert status.reason is None


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 31])
async def test_exact_hits_and_short_prompts(kit: Any, model: Any, tokens: int) -> None:
    """The same prompt twice: at most prompt - 1 tokens come back, whatever its length."""
    ids = ids_of(kit, tokens)
    async with opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, session="a", **GREEDY)
        again = await kv.generate(ids, session="b", **GREEDY)
        assert again.reused_tokens == (tokens - 1) // BLOCK * BLOCK
        assert compare_tokens(model, kit.plain(model, ids), again.output_ids).ok
        if tokens <= BLOCK:
            reason = kv.status().reason
            assert reason is None or "shorter than a block" in reason


async def test_a_prompt_that_shares_only_its_beginning(kit: Any, model: Any) -> None:
    ids = ids_of(kit, 40)
    other = ids[:21] + ids_of(kit, 15, seed=9)
    async with opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, session="a", **GREEDY)
        reply = await kv.generate(other, session="b", **GREEDY)
        assert reply.reused_tokens == 16
        assert compare_tokens(model, kit.plain(model, other), reply.output_ids).ok


async def test_without_a_session_nothing_is_left_but_blocks(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, **GREEDY)
        assert engine.sessions() == []
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 32


async def test_nvme_and_restart(kit: Any, model: Any, tmp_path: Path) -> None:
    ids = ids_of(kit, 60)
    tiers = [HOST, tierkv.Tier("nvme", "64MiB", path=str(tmp_path))]
    async with opened(tiers=tiers) as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
    async with opened(tiers=tiers) as engine:
        kv = hf.attach(model, engine)
        again = await kv.generate(ids, session="a", **GREEDY)
        assert again.reused_tokens == 56
        assert again.tier == "nvme"
        assert again.output_ids == first.output_ids


async def test_eight_sessions_at_once_share_a_prefix(kit: Any, model: Any) -> None:
    prefix = ids_of(kit, 40)
    prompts = {f"s{i}": prefix + ids_of(kit, 6 + i, seed=20 + i) for i in range(8)}
    async with opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(prefix, session="first", **GREEDY)
        replies: dict[str, Any] = {}

        async def ask(name: str) -> None:
            replies[name] = await kv.generate(prompts[name], session=name, **GREEDY)

        async with anyio.create_task_group() as group:
            for name in prompts:
                group.start_soon(ask, name)
        for name, reply in replies.items():
            assert reply.reused_tokens == 40
            assert compare_tokens(model, kit.plain(model, prompts[name]), reply.output_ids).ok
        assert engine.stats().leases == 0


async def test_sampling_arguments_reach_the_model(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 20)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        cold = await kv.generate(ids, max_new_tokens=3, do_sample=False)
        assert len(cold.output_ids) == 23
        stop = cold.output_ids[21]
        ended = await kv.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=stop)
        assert ended.output_ids == cold.output_ids[:22]


# ----------------------------------------------------------------- isolation


async def test_f010_tenant_and_salt_reach_the_keys(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, session="a", tenant="acme", salt=b"1", **GREEDY)
        for other in ({"tenant": "acme", "salt": b"2"}, {"tenant": "b", "salt": b"1"}, {}):
            reply = await kv.generate(ids, session="b", **other, **GREEDY)
            assert reply.reused_tokens == 0
        same = await kv.generate(ids, session="c", tenant="acme", salt=b"1", **GREEDY)
        assert same.reused_tokens == 32


async def test_f008_new_weights_under_the_same_name_miss(kit: Any) -> None:
    model, ids = kit.make("llama"), ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, **GREEDY)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        changed = await kv.generate(ids, **GREEDY)
        assert changed.reused_tokens == 0
        assert changed.output_ids == kit.plain(model, ids)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)  # leaves no trace
        kv.refresh()
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 0
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 32


async def test_f007_another_kv_dtype_misses(kit: Any) -> None:
    model, ids = kit.make("llama"), ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, **GREEDY)
        model.to(torch.bfloat16)
        for expected in (0, 32):
            reply = await kv.generate(ids, **GREEDY)
            assert reply.reused_tokens == expected
        model.to(torch.float64)
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 0


async def test_several_models_on_one_engine(kit: Any, llama: Any, gemma3: Any) -> None:
    ids = ids_of(kit, 40)
    async with opened() as engine:
        for model in (llama, gemma3, kit.make("llama", seed=1)):
            kv = hf.attach(model, engine)
            assert (await kv.generate(ids, session="a", **GREEDY)).reused_tokens == 0
            assert (await kv.generate(ids, session="a", **GREEDY)).reused_tokens == 32


# ----------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"prompt_lookup_num_tokens": 3}, "prompt lookup"),
        ({"assistant_model": object()}, "assisted"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask"),
        ({"past_key_values": None}, "past_key_values"),
        ({"use_cache": False}, "use_cache"),
    ],
)
async def test_refused_arguments(kit: Any, llama: Any, arguments: Any, word: str) -> None:
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(AttachError, match=word):
            await kv.generate([1, 2, 3], session="a", **arguments)
        with pytest.raises(AttachError, match=word):
            kv.stream([1, 2, 3], session="a", **arguments)
        assert kv.status().requests_seen == 0


async def test_refused_through_a_generation_config(kit: Any, llama: Any) -> None:
    config = copy.deepcopy(llama.generation_config)
    config.num_beams = 2
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(AttachError, match="num_beams"):
            await kv.generate([1, 2, 3], generation_config=config)


async def test_refused_prompts(kit: Any, llama: Any) -> None:
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        for prompt, word in [("text", "tokenizer"), ([[1, 2], [3, 4]], "batch"), ([], "empty")]:
            with pytest.raises(AttachError, match=word):
                await kv.generate(prompt, session="a", **GREEDY)
        assert (await kv.generate([[1, 2, 3]], session="a", **GREEDY)).prompt_tokens == 3
        assert (await kv.generate(torch.tensor([1, 2]), session="b", **GREEDY)).prompt_tokens == 2


async def test_a_model_in_training_mode_is_refused(kit: Any) -> None:
    model = kit.make("llama")
    async with opened() as engine:
        kv = hf.attach(model, engine)
        model.train()
        with pytest.raises(AttachError, match=r"model\.eval"):
            await kv.generate([1, 2, 3])
        with pytest.raises(AttachError, match=r"model\.eval"):
            hf.attach(model, engine)


async def test_detach_leaves_the_model_as_it_was(kit: Any) -> None:
    model = kit.make("llama")
    forward, state = model.forward, set(vars(model))
    modules = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    async with opened() as engine:
        with hf.attach(model, engine) as kv:
            await kv.generate(ids_of(kit, 20), session="a", **GREEDY)
            assert kv.status().attached
        assert not kv.status().attached
        with pytest.raises(AttachError, match="detached"):
            await kv.generate([1, 2], session="a")
    assert model.forward == forward
    assert set(vars(model)) == state
    assert modules == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


async def test_attach_takes_engines_and_managers_only(llama: Any) -> None:
    with pytest.raises(AttachError, match="not str"):
        hf.attach(llama, "engine")  # type: ignore[call-overload]


# ----------------------------------------------------------------- failures


def spoil(kv: Any, engine: Any, ids: list[int], block: int) -> None:
    """Flip a byte in the last layer of one block of the first group, in the host tier."""
    space = kv._attachment.bind().space
    chain = KeyChain(space.root(), BLOCK)
    chain.follow(ids)
    wanted = part_id(chain.keys[block], 0)
    core = engine.core
    (generation,) = [g for part, g, _ in core.decisions.parts(0) if part == wanted]
    core.levels[0].memory.borrow(wanted, generation).memory[-40] ^= 0xFF


async def test_a_damaged_block_is_counted_and_recomputed(kit: Any, model: Any) -> None:
    ids = ids_of(kit, 60)
    async with opened() as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
        spoil(kv, engine, ids, block=3)
        again = await kv.generate(ids, session="b", **GREEDY)
        assert again.output_ids == first.output_ids
        assert again.reused_tokens == 24  # what lies before the damage is still good
        assert kv.status().restores_failed == 1
        assert engine.stats().leases == 0
        healed = await kv.generate(ids, session="c", **GREEDY)
        assert healed.reused_tokens == 56
        assert healed.output_ids == first.output_ids


async def test_when_every_restore_fails_the_prompt_is_computed(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 60)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
        for block in (2, 5):  # the second try meets the second damage
            spoil(kv, engine, ids, block)
        for _ in range(3):
            reply = await kv.generate(ids, **GREEDY)
            assert reply.output_ids == first.output_ids
        assert kv.status().restores_failed >= 1
        assert engine.stats().leases == 0


async def test_a_store_that_fails_costs_the_next_turn_only(
    kit: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise BackendError("host", "disk on fire")

    ids = ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        monkeypatch.setattr("tierkv.session.handle.Session.store", broken)
        reply = await kv.generate(ids, session="a", **GREEDY)
        assert reply.output_ids == kit.plain(llama, ids)
        status = kv.status()
        assert status.stores_failed == 1
        assert status.reason is not None
        assert "disk on fire" in status.reason
        assert engine.sessions()[0].tokens == 52  # the history is kept all the same


async def test_each_layer_is_read_only_once_the_model_has_entered_it(
    kit: Any, model: Any, tmp_path: Path
) -> None:
    """Layer-wise restore is real: the read of layer i waits for the model to be in layer i."""
    ids = ids_of(kit, 60)
    tier = tierkv.Tier("nvme", "64MiB", path=str(tmp_path))
    backend = resolve("backends", "nvme")(tier)
    plain_read, loop = backend.read, asyncio.get_running_loop()
    inside = [asyncio.Event() for _ in model.model.layers]
    order: list[int] = []

    async def gated(*arguments: Any) -> Any:
        number = len(order)
        order.append(number)
        await inside[number].wait()
        return await plain_read(*arguments)

    def entered(number: int) -> Any:
        return lambda *_: loop.call_soon_threadsafe(inside[number].set)

    async with opened(tiers=[tier], backends=[backend]) as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
        hooks = [
            layer.register_forward_pre_hook(entered(n))
            for n, layer in enumerate(model.model.layers)
        ]
        backend.read = gated
        try:
            with anyio.fail_after(20):
                again = await kv.generate(ids, session="b", **GREEDY)
        finally:
            for hook in hooks:
                hook.remove()
        assert order == list(range(len(inside)))  # one read per layer
        assert again.reused_tokens == 56
        assert again.output_ids == first.output_ids


async def test_a_hanging_read_does_not_hold_a_cancelled_caller(
    kit: Any, llama: Any, tmp_path: Path
) -> None:
    ids = ids_of(kit, 60)
    tier = tierkv.Tier("nvme", "64MiB", path=str(tmp_path))
    backend = resolve("backends", "nvme")(tier)
    plain_read, hanging, gate = backend.read, asyncio.Event(), asyncio.Event()

    async def hangs(*arguments: Any) -> Any:
        hanging.set()
        await gate.wait()
        return await plain_read(*arguments)

    async with opened(tiers=[tier], backends=[backend]) as engine:
        kv = hf.attach(llama, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
        backend.read = hangs
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: kv.generate(ids, session="b", **GREEDY))
            await hanging.wait()
            group.cancel_scope.cancel()  # the group ends although the read still hangs
        gate.set()
        again = await kv.generate(ids, session="b", **GREEDY)
        assert again.output_ids == first.output_ids
        assert again.reused_tokens == 56
        assert engine.stats().leases == 0


# ----------------------------------------------------------------- streams


async def test_stream_gives_each_token_as_it_comes(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 20)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream(ids, session="a", **GREEDY) as tokens:
            got = [token.id async for token in tokens]
            assert tokens.result is not None
            assert tokens.result.output_ids == ids + got == kit.plain(llama, ids)
            assert tokens.result.ttft_s > 0
        assert [s.tokens for s in engine.sessions()] == [32]


async def test_leaving_a_stream_stops_the_model(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 20)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, session="a", **GREEDY)
        steps = 0

        def count(_module: Any, _args: Any) -> None:
            nonlocal steps
            steps += 1

        hook = llama.model.layers[-1].register_forward_pre_hook(count)
        try:
            stream = kv.stream([5], append=True, session="a", max_new_tokens=300, do_sample=False)
            async with stream as tokens:
                async for _ in tokens:
                    break
            after = steps
            assert after < 300
            await asyncio.sleep(0.05)
            assert steps == after  # the model has really stopped
        finally:
            hook.remove()
        assert engine.sessions()[0].tokens == 32  # history as before
        assert engine.stats().leases == 0
        more = await kv.generate([5], append=True, session="a", **GREEDY)
        assert more.prompt_tokens == 33


async def test_an_error_of_the_model_reaches_the_stream(kit: Any, llama: Any) -> None:
    def broken(_ids: Any, _scores: Any) -> Any:
        raise ZeroDivisionError("broken processor")

    async with opened() as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream([1, 2], session="a", logits_processor=[broken], **GREEDY) as tokens:
            with pytest.raises(ZeroDivisionError, match="broken"):
                await anext(tokens)
        assert engine.sessions()[0].tokens == 0
        with pytest.raises(ClosedError, match="async with"):
            await anext(kv.stream([1, 2], session="a"))


# ----------------------------------------------------------------- cancellation


async def test_native_cancel_stops_the_model_at_its_next_layer(kit: Any, llama: Any) -> None:
    ids = ids_of(kit, 40)
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, session="a", **GREEDY)
        entered, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        last: list[int] = []

        def gate(_module: Any, _args: Any) -> None:
            loop.call_soon_threadsafe(entered.set)
            release.wait(5)

        hooks = [
            llama.model.layers[1].register_forward_pre_hook(gate),
            llama.model.layers[2].register_forward_pre_hook(lambda *_: last.append(1)),
        ]
        try:
            task = loop.create_task(kv.generate([3, 4], append=True, session="a", **GREEDY))
            await entered.wait()
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()  # the model is still inside layer 1: the caller waits for it
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            for hook in hooks:
                hook.remove()
        assert last == []  # it never got to layer 2
        assert engine.sessions()[0].tokens == 52
        assert engine.stats().leases == 0
        reply = await kv.generate([3, 4], append=True, session="a", **GREEDY)
        assert reply.output_ids == kit.plain(llama, reply.input_ids)


async def test_scope_cancel_before_the_first_token(kit: Any, llama: Any) -> None:
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        with anyio.move_on_after(0) as scope:
            await kv.generate(ids_of(kit, 40), session="a", max_new_tokens=400, do_sample=False)
        assert scope.cancelled_caught
        assert engine.sessions() == [] or engine.sessions()[0].tokens == 0
        assert engine.stats().leases == 0


async def test_one_session_takes_one_turn_at_a_time(kit: Any, llama: Any) -> None:
    async with opened() as engine:
        kv = hf.attach(llama, engine)
        replies: list[Any] = []

        async def ask(seed: int) -> None:
            more = ids_of(kit, 4, seed=seed)
            replies.append(await kv.generate(more, append=True, session="a", **GREEDY))

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(ask, seed)
        replies.sort(key=lambda reply: reply.prompt_tokens)
        for before, after in itertools.pairwise(replies):
            assert after.input_ids[:-4] == before.output_ids


async def test_a_busy_session_refuses_where_asked_to(kit: Any, llama: Any) -> None:
    async with opened(busy="refuse") as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream([1, 2], session="a", max_new_tokens=200, do_sample=False) as tokens:
            await anext(tokens)
            with pytest.raises(SessionBusyError):
                await kv.generate([3], session="a")


async def test_closing_the_engine_ends_a_turn(kit: Any, llama: Any) -> None:
    engine = tierkv.Engine(tierkv.EngineConfig(tiers=(HOST,), block_tokens=BLOCK))
    await engine.start()
    kv = hf.attach(llama, engine)
    stream = kv.stream([1, 2], session="a", max_new_tokens=400, do_sample=False)
    async with stream as tokens:
        await anext(tokens)
        with anyio.fail_after(5):
            await engine.aclose()
    with pytest.raises(ClosedError):
        await kv.generate([1, 2], session="a")


def test_registered_by_name() -> None:
    assert resolve("adapters", "hf") is hf
