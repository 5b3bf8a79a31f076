"""An attached model when things go wrong: damage, hanging reads, streams left early, cancels."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import tierkv
from tierkv.blocks import KeyChain, part_id
from tierkv.errors import BackendError, ClosedError, SessionBusyError
from tierkv.registry import resolve
from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

BLOCK = 8
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
HOST = tierkv.Tier("host", "64MiB")


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
    ids = kit.ids(60)
    async with kit.opened() as engine:
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


async def test_a_stream_shows_nothing_of_a_failed_restore(kit: Any, llama: Any) -> None:
    ids = kit.ids(60)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
        spoil(kv, engine, ids, block=3)
        async with kv.stream(ids, session="b", **GREEDY) as tokens:
            got = [token.id async for token in tokens]
        assert kv.status().restores_failed == 1
        assert ids + got == first.output_ids


async def test_when_every_restore_fails_the_prompt_is_computed(kit: Any, llama: Any) -> None:
    ids = kit.ids(60)
    async with kit.opened() as engine:
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

    ids = kit.ids(40)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        monkeypatch.setattr("tierkv.session.handle.Session.store", broken)
        reply = await kv.generate(ids, session="a", **GREEDY)
        assert reply.output_ids == kit.plain(llama, ids)
        status = kv.status()
        assert status.stores_failed == 1
        assert status.reason is not None
        assert "disk on fire" in status.reason
        assert engine.sessions()[0].tokens == 52  # the history is kept all the same


async def test_f005_a_model_that_changes_while_it_runs_stores_nothing(kit: Any) -> None:
    model, ids = kit.make("llama"), kit.ids(40)

    def switch(row: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.add_(1)
        return scores

    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, session="a", logits_processor=[switch], **GREEDY)
        status = kv.status()
        assert status.blocks_stored == 0
        assert "the model changed" in str(status.reason)
        assert engine.stats().tiers["host"].entries == 0
        reply = await kv.generate(ids, session="a", **GREEDY)
        assert reply.reused_tokens == 0
        assert compare_tokens(model, kit.plain(model, ids), reply.output_ids).ok


async def test_each_layer_is_read_only_once_the_model_has_entered_it(
    kit: Any, model: Any, tmp_path: Path
) -> None:
    """Layer-wise restore is real: the read of layer i waits for the model to be in layer i."""
    ids = kit.ids(60)
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
        def hook(*_: Any) -> None:
            loop.call_soon_threadsafe(inside[number].set)

        return hook

    async with kit.opened(tiers=[tier], backends=[backend]) as engine:
        kv = hf.attach(model, engine)
        # hooks are part of the identity: they are there from the beginning
        hooks = [
            layer.register_forward_pre_hook(entered(n))
            for n, layer in enumerate(model.model.layers)
        ]
        first = await kv.generate(ids, session="a", **GREEDY)
        for event in inside:
            event.clear()
        backend.read = gated
        try:
            with anyio.fail_after(60):
                again = await kv.generate(ids, session="b", **GREEDY)
        finally:
            for hook in hooks:
                hook.remove()
        assert order == list(range(len(inside)))  # one read per layer
        assert again.reused_tokens == 56
        assert again.output_ids == first.output_ids


@pytest.mark.every_loop
async def test_a_hanging_read_does_not_hold_a_cancelled_caller(
    kit: Any, llama: Any, tmp_path: Path
) -> None:
    ids = kit.ids(60)
    tier = tierkv.Tier("nvme", "64MiB", path=str(tmp_path))
    backend = resolve("backends", "nvme")(tier)
    plain_read, hanging, gate = backend.read, asyncio.Event(), asyncio.Event()

    async def hangs(*arguments: Any) -> Any:
        hanging.set()
        await gate.wait()
        return await plain_read(*arguments)

    async with kit.opened(tiers=[tier], backends=[backend]) as engine:
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


@pytest.mark.every_loop
async def test_stream_gives_each_token_as_it_comes(kit: Any, llama: Any) -> None:
    ids = kit.ids(20)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream(ids, session="a", **GREEDY) as tokens:
            got = [token.id async for token in tokens]
            assert tokens.result is not None
            assert tokens.result.output_ids == ids + got == kit.plain(llama, ids)
            assert tokens.result.ttft_s > 0
        assert [s.tokens for s in engine.sessions()] == [32]


@pytest.mark.every_loop
async def test_leaving_a_stream_stops_the_model(kit: Any, llama: Any) -> None:
    ids = kit.ids(20)
    async with kit.opened() as engine:
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


@pytest.mark.every_loop
async def test_an_error_of_the_model_reaches_the_stream(kit: Any, llama: Any) -> None:
    def broken(_ids: Any, _scores: Any) -> Any:
        raise ZeroDivisionError("broken processor")

    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream([1, 2], session="a", logits_processor=[broken], **GREEDY) as tokens:
            with pytest.raises(ZeroDivisionError, match="broken"):
                await anext(tokens)
        assert engine.sessions()[0].tokens == 0
        with pytest.raises(ClosedError, match="async with"):
            await anext(kv.stream([1, 2], session="a"))


# ----------------------------------------------------------------- cancellation


@pytest.mark.every_loop
async def test_native_cancel_stops_the_model_at_its_next_layer(kit: Any, llama: Any) -> None:
    ids = kit.ids(40)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, session="a", **GREEDY)
        entered, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        last: list[int] = []

        def gate(_module: Any, _args: Any) -> None:
            loop.call_soon_threadsafe(entered.set)
            release.wait(60)

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


@pytest.mark.every_loop
async def test_repeated_native_cancels_do_not_leave_the_model_running(kit: Any, llama: Any) -> None:
    entered, release, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def gate(_module: Any, _args: Any) -> None:
        loop.call_soon_threadsafe(entered.set)
        release.wait(60)

    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate([1, 2], **GREEDY)
        hook = llama.model.layers[1].register_forward_pre_hook(gate)
        try:
            task = loop.create_task(kv.generate([3, 4], session="a", **GREEDY))
            await entered.wait()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.01)
                assert not task.done()
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            hook.remove()


@pytest.mark.every_loop
async def test_scope_cancel_before_the_first_token(kit: Any, llama: Any) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        with anyio.move_on_after(0) as scope:
            await kv.generate(kit.ids(40), session="a", max_new_tokens=400, do_sample=False)
        assert scope.cancelled_caught
        assert engine.sessions() == [] or engine.sessions()[0].tokens == 0
        assert engine.stats().leases == 0


@pytest.mark.every_loop
async def test_one_session_takes_one_turn_at_a_time(kit: Any, llama: Any) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        replies: list[Any] = []

        async def ask(seed: int) -> None:
            more = kit.ids(4, seed=seed)
            replies.append(await kv.generate(more, append=True, session="a", **GREEDY))

        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(ask, seed)
        replies.sort(key=lambda reply: reply.prompt_tokens)
        for before, after in itertools.pairwise(replies):
            assert after.input_ids[:-4] == before.output_ids


@pytest.mark.every_loop
async def test_a_caller_that_waits_for_its_turn_can_go(kit: Any, llama: Any) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream([1, 2], session="a", max_new_tokens=400, do_sample=False) as tokens:
            await anext(tokens)
            with anyio.move_on_after(0.02) as scope:
                await kv.generate([3], session="a", **GREEDY)
            assert scope.cancelled_caught
            await anext(tokens)  # the turn under way does not notice
        assert engine.stats().leases == 0
        assert (await kv.generate([3], session="a", **GREEDY)).prompt_tokens == 1


async def test_a_busy_session_refuses_where_asked_to(kit: Any, llama: Any) -> None:
    async with kit.opened(busy="refuse") as engine:
        kv = hf.attach(llama, engine)
        async with kv.stream([1, 2], session="a", max_new_tokens=200, do_sample=False) as tokens:
            await anext(tokens)
            with pytest.raises(SessionBusyError):
                await kv.generate([3], session="a")


@pytest.mark.every_loop
async def test_closing_the_engine_ends_a_turn(kit: Any, llama: Any) -> None:
    config = tierkv.EngineConfig(tiers=(HOST,), block_tokens=BLOCK, close_timeout=100)
    engine = tierkv.Engine(config)
    await engine.start()
    kv = hf.attach(llama, engine)
    stream = kv.stream([1, 2], session="a", max_new_tokens=400, do_sample=False)
    async with stream as tokens:
        await anext(tokens)
        with anyio.fail_after(30):
            await engine.aclose()
    with pytest.raises(ClosedError):
        await kv.generate([1, 2], session="a")
