"""An attached model on an engine: turns, reuse, isolation, failures, streams, cancellation."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
import torch

import tierkv
from tierkv.blocking import CacheManager
from tierkv.errors import AttachError, ClosedError, ConfigError
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
    """What is tested here does not depend on the event loop; the turns are tested on each."""
    return "asyncio"


# ----------------------------------------------------------------- reuse


async def test_turns_reuse_and_equal_plain_generation(kit: Any, model: Any) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(kit.ids(60), session="a", **GREEDY)
        assert (first.reused_tokens, first.tier, first.by_tier) == (0, None, {})
        assert compare_tokens(model, kit.plain(model, first.input_ids), first.output_ids).ok
        seen = first.output_ids
        for turn in range(3):
            more = kit.ids(5, seed=turn)
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
    ids = kit.ids(tokens)
    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, session="a", **GREEDY)
        again = await kv.generate(ids, session="b", **GREEDY)
        assert again.reused_tokens == (tokens - 1) // BLOCK * BLOCK
        assert compare_tokens(model, kit.plain(model, ids), again.output_ids).ok
        if tokens <= BLOCK:
            reason = kv.status().reason
            assert reason is None or "shorter than a block" in reason


async def test_a_prompt_that_shares_only_its_beginning(kit: Any, model: Any) -> None:
    ids = kit.ids(40)
    other = ids[:21] + kit.ids(15, seed=9)
    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, session="a", **GREEDY)
        reply = await kv.generate(other, session="b", **GREEDY)
        assert reply.reused_tokens == 16
        assert compare_tokens(model, kit.plain(model, other), reply.output_ids).ok


async def test_without_a_session_nothing_is_left_but_blocks(kit: Any, llama: Any) -> None:
    ids = kit.ids(40)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, **GREEDY)
        assert engine.sessions() == []
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 32


async def test_nvme_and_restart(kit: Any, model: Any, tmp_path: Path) -> None:
    ids = kit.ids(60)
    tiers = [HOST, tierkv.Tier("nvme", "64MiB", path=str(tmp_path))]
    async with kit.opened(tiers=tiers) as engine:
        kv = hf.attach(model, engine)
        first = await kv.generate(ids, session="a", **GREEDY)
    async with kit.opened(tiers=tiers) as engine:
        kv = hf.attach(model, engine)
        again = await kv.generate(ids, session="a", **GREEDY)
        assert again.reused_tokens == 56
        assert again.tier == "nvme"
        assert again.output_ids == first.output_ids


async def test_eight_sessions_at_once_share_a_prefix(kit: Any, model: Any) -> None:
    prefix = kit.ids(40)
    prompts = {f"s{i}": prefix + kit.ids(6 + i, seed=20 + i) for i in range(8)}
    async with kit.opened() as engine:
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
    ids = kit.ids(20)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        cold = await kv.generate(ids, max_new_tokens=3, do_sample=False)
        assert len(cold.output_ids) == 23
        stop = cold.output_ids[21]
        ended = await kv.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=stop)
        assert ended.output_ids == cold.output_ids[:22]


# ----------------------------------------------------------------- isolation


async def test_f010_tenant_and_salt_reach_the_keys(kit: Any, llama: Any) -> None:
    ids = kit.ids(40)
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        await kv.generate(ids, session="a", tenant="acme", salt=b"1", **GREEDY)
        for other in ({"tenant": "acme", "salt": b"2"}, {"tenant": "b", "salt": b"1"}, {}):
            reply = await kv.generate(ids, session="b", **other, **GREEDY)
            assert reply.reused_tokens == 0
        same = await kv.generate(ids, session="c", tenant="acme", salt=b"1", **GREEDY)
        assert same.reused_tokens == 32


async def test_f008_new_weights_under_the_same_name_miss(kit: Any) -> None:
    model, ids = kit.make("llama"), kit.ids(40)
    async with kit.opened() as engine:
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
    model, ids = kit.make("llama"), kit.ids(40)
    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(ids, **GREEDY)
        model.to(torch.bfloat16)
        for expected in (0, 32):
            reply = await kv.generate(ids, **GREEDY)
            assert reply.reused_tokens == expected
        model.to(torch.float64)
        assert (await kv.generate(ids, **GREEDY)).reused_tokens == 0


async def test_several_models_on_one_engine(kit: Any, llama: Any, gemma3: Any) -> None:
    ids = kit.ids(40)
    async with kit.opened() as engine:
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
        ({"token_healing": True}, "token_healing"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),  # F011: the KV of an image
        ({"adapter_names": ["a"]}, "adapter_names"),  # F005: PEFT's adapters per row
    ],
)
async def test_refused_arguments(kit: Any, llama: Any, arguments: Any, word: str) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(AttachError, match=word):
            await kv.generate([1, 2, 3], session="a", **arguments)
        with pytest.raises(AttachError, match=word):
            kv.stream([1, 2, 3], session="a", **arguments)
        assert kv.status().requests_seen == 0


async def test_no_default_takes_the_cache_away(kit: Any) -> None:
    model = kit.make("llama")
    prompt = kit.ids(40)
    wanted = kit.plain(model, prompt)
    given = copy.deepcopy(model.generation_config)
    given.update(use_cache=False, **GREEDY)
    async with kit.opened() as engine:
        kv = hf.attach(model, engine)
        await kv.generate(prompt, session="a", **GREEDY)
        reply = await kv.generate(prompt, session="b", generation_config=given)
        assert (reply.output_ids, reply.reused_tokens) == (wanted, 32)
        assert given.use_cache is False
        model.generation_config.use_cache = False
        model.generation_config.cache_implementation = "static"
        for arguments in (GREEDY, {"generation_config": given}):
            reply = await kv.generate(prompt, session="c", **arguments)
            assert (reply.output_ids, reply.reused_tokens) == (wanted, 32)


async def test_refused_through_a_generation_config(kit: Any, llama: Any) -> None:
    config = copy.deepcopy(llama.generation_config)
    config.num_beams = 2
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(AttachError, match="num_beams"):
            await kv.generate([1, 2, 3], generation_config=config)


REFUSED: list[tuple[Any, str]] = [
    ("text", "needs a tokenizer"),
    ([[1, 2], [3, 4]], "a batch of 2"),
    ([], "empty"),
    ([1, 2.0], "must be integers, not 2.0 .at index 1"),
    (["1", "2"], "must be integers, not '1'"),
    ([True, False], "must be integers, not True"),
    (torch.tensor([1.7, 2.2]), "must be integers"),
    (np.array([1.7, 2.2]), "must be integers"),
    (torch.tensor(3), "not Tensor"),
    (None, "not NoneType"),
    (b"text", "not bytes"),
    ({1, 2}, "not set"),
    ({"input_ids": [1, 2]}, "not dict; pass its 'input_ids'"),
    (iter([1, 2]), "not list_iterator"),
    ([1, 97], "token id 97 .at index 1. is none of this model's: it knows 0 to 96"),
    ([1, -1], "token id -1"),
    ([2**70], f"token id {2**70}"),
]


@pytest.mark.parametrize(("prompt", "message"), REFUSED, ids=[message for _, message in REFUSED])
async def test_refused_prompts(kit: Any, llama: Any, prompt: Any, message: str) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(AttachError, match=message):
            await kv.generate(prompt, session="a", **GREEDY)


@pytest.mark.parametrize(
    "where",
    [{"session": 5}, {"session": ""}, {"tenant": None}, {"salt": "x"}, {"fidelity": "roughly"}],
    ids=str,
)
async def test_malformed_sessions_are_refused(kit: Any, llama: Any, where: dict[str, Any]) -> None:
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        with pytest.raises(ConfigError):
            await kv.generate([1, 2, 3], **where, **GREEDY)
        assert engine.stats().leases == 0
        assert engine.sessions() == []


async def test_prompts_of_many_kinds(kit: Any, llama: Any) -> None:
    kinds: list[Any] = [[5, 6], (5, 6), range(5, 7), [[5, 6]], [np.int64(5), np.int32(6)]]
    kinds += [np.array([5, 6]), torch.tensor([5, 6]), torch.tensor([[5, 6]])]
    async with kit.opened() as engine:
        kv = hf.attach(llama, engine)
        for prompt in kinds:
            reply = await kv.generate(prompt, session="a", max_new_tokens=1)
            assert reply.input_ids == [5, 6], prompt


async def test_a_tokenizer_of_another_model_is_found_out(kit: Any, llama: Any) -> None:
    def foreign(_text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 50_000]}

    async with kit.opened() as engine:
        kv = hf.attach(llama, engine, tokenizer=foreign)
        with pytest.raises(AttachError, match="is this the model's own tokenizer"):
            await kv.generate("text", session="a", **GREEDY)


async def test_attach_to_what_is_not_open(kit: Any, llama: Any) -> None:
    async with kit.opened() as engine:
        pass
    manager = CacheManager(tiers=[HOST])
    for target in (engine, manager):
        with pytest.raises(ClosedError):
            hf.attach(llama, target)
    with manager:
        pass
    with pytest.raises(ClosedError):
        hf.attach(llama, manager)


async def test_a_model_in_training_mode_is_refused(kit: Any) -> None:
    model = kit.make("llama")
    async with kit.opened() as engine:
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
    async with kit.opened() as engine:
        with hf.attach(model, engine) as kv:
            await kv.generate(kit.ids(20), session="a", **GREEDY)
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


def test_registered_by_name() -> None:
    assert resolve("adapters", "hf") is hf


def test_its_names_are_all_there_and_no_others() -> None:
    assert dir(hf) == sorted(hf.__all__)
    for name in hf.__all__:
        assert getattr(hf, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'attatch'"):
        hf.attatch  # type: ignore[attr-defined] # noqa: B018


def test_n1_without_transformers_its_names_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tierkv_adapters import hf\n"
        "from tierkv.errors import MissingDependencyError\n"
        "for name in hf.__all__:\n"
        "    try:\n"
        "        getattr(hf, name)\n"
        "    except MissingDependencyError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    extra = "needs transformers, which is not installed; pip install -c constraints.txt -e '.[hf]'"
    told = done.stdout.splitlines()
    assert f"tierkv_adapters.hf.attach {extra}" in told
    assert all(line.endswith(extra) for line in told)
