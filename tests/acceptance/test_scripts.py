"""Scripts in the style of existing synchronous serving code run as they are.

The kind of the first tier is a parameter: what runs on ``host`` runs on ``device`` as well.
"""

from __future__ import annotations

import gc
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tierkv.blocking import CacheManager

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("tokenizers", reason="the hf extra is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
B = 16
GREEDY: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
KINDS = ["host", "device"]


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest) -> tierkv.Tier:
    """The first tier, by kind."""
    device = DEVICE if request.param == "device" else None
    return tierkv.Tier(request.param, capacity="64MiB", device=device)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=inner)


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny random Llama whose greedy replies do not repeat one token."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    llama: Any = LlamaForCausalLM(config)
    return llama.to(DEVICE).eval()


@pytest.fixture
def manager(tier: tierkv.Tier, no_thread_leaks: None) -> Iterator[CacheManager]:
    """An open manager over the tier."""
    with CacheManager(tiers=[tier], block_tokens=B, metrics=True) as open_manager:
        yield open_manager


@pytest.fixture
def kv(model: Any, manager: CacheManager, tokenizer: Any) -> Iterator[hf.SyncHandle]:
    """The model attached to the manager."""
    with hf.attach(model, manager, tokenizer=tokenizer) as handle:
        yield handle


def plain(model: Any, ids: list[int]) -> list[int]:
    """Generation with no cache store at all."""
    x = torch.tensor([ids], device=model.device)
    output: list[int] = model.generate(x, attention_mask=torch.ones_like(x), **GREEDY)[0].tolist()
    return output


def same(model: Any, reply: hf.GenerateResult) -> bool:
    """Whether a reply is the plain one; the margin rule excuses rounding, and says so."""
    reference = plain(model, reply.input_ids)
    assert len(set(reference[reply.prompt_tokens :])) > 5  # a constant reply proves nothing
    return compare_tokens(model, reference, reply.output_ids).ok


def test_attach_to_hf(model: Any, tokenizer: Any, tier: tierkv.Tier, no_thread_leaks: None) -> None:
    forward, hooks = model.forward, len(model._forward_hooks)
    with CacheManager(tiers=[tier], policy="lru", block_tokens=B, metrics=True) as m:
        kv = hf.attach(model, m, tokenizer=tokenizer)
        m.create_session("a")
        with m.use_session("a"):
            kv.generate("Write quicksort in Python.", **GREEDY)
        st = kv.status()
        assert st.attached
        assert st.requests_seen == 1
        assert st.blocks_stored > 0
        kv.detach()
    assert model.forward == forward
    assert len(model._forward_hooks) == hooks


class ChatSession:
    """A serving script's session: destroyed with the object."""

    def __init__(self, manager: CacheManager) -> None:
        self.session_id, self.manager = str(uuid.uuid4()), manager
        manager.create_session(self.session_id)

    def chat(self, kv: hf.SyncHandle, text: str, **sampling: Any) -> hf.GenerateResult:
        """One turn."""
        with self.manager.use_session(self.session_id):
            return kv.generate(text, **sampling)

    def clear_history(self) -> None:
        """Begin again."""
        self.manager.clear_session(self.session_id)

    def __del__(self) -> None:
        self.manager.destroy_session(self.session_id)


def test_chat_turns(model: Any, kv: hf.SyncHandle, manager: CacheManager) -> None:
    s, other = ChatSession(manager), ChatSession(manager)
    r1 = s.chat(kv, "Write a quicksort function in Python.", **GREEDY)
    other.chat(kv, "Tell me about the sea.", **GREEDY)  # no crosstalk
    r2 = s.chat(kv, "Good, add detailed comments to it.", **GREEDY)
    seen = r1.output_ids  # prompt + reply
    assert r2.input_ids[: len(seen)] == seen
    assert r2.reused_tokens >= (len(seen) - 1) // B * B
    assert same(model, r2)
    s.clear_history()
    r3 = s.chat(kv, "What is the capital of France?", **GREEDY)
    fresh = ChatSession(manager).chat(kv, "What is the capital of France?", **GREEDY)
    assert r3.input_ids == fresh.input_ids
    assert same(model, r3)
    sid = s.session_id
    del s
    gc.collect()
    assert sid not in {i.id for i in manager.sessions()}
    assert manager.stats().leases == 0
    manager.destroy_session(sid)  # idempotent


@pytest.mark.parametrize("kind", KINDS)
def test_a_manager_that_compresses_after_50_steps(
    kind: str, model: Any, tokenizer: Any, no_thread_leaks: None
) -> None:
    tier = tierkv.Tier(kind, capacity="64MiB", device=DEVICE if kind == "device" else None)
    qa = CacheManager(
        name="qa",
        block_tokens=B,
        policy="lfu",
        tiers=[tier],
        compression=tierkv.CompressionPolicy("int8", after_steps=50),
    )
    with qa:
        kq = hf.attach(model, qa, tokenizer=tokenizer)
        session = ChatSession(qa)
        a = session.chat(kq, "Explain this code.", max_new_tokens=120, do_sample=False)
        qa.flush()
        told = [b for b in qa.explain(a.output_ids) if b.tier]  # a partial tail is not shared
        for b in told:
            old = len(a.output_ids) - 1 - b.end_token > 50
            assert b.chain == ("int8" if old else "raw")
        assert {b.chain for b in told} == {"int8", "raw"}
        again = session.chat(kq, " And now this.", **GREEDY)
        assert again.reused_tokens >= (len(a.output_ids) - 1) // B * B
        del session


def test_two_managers_two_policies(model: Any, tokenizer: Any, no_thread_leaks: None) -> None:
    device = tierkv.Tier("device", capacity="64MiB", device=DEVICE)
    qa = CacheManager(
        name="qa",
        block_tokens=B,
        policy="lfu",
        tiers=[device],
        compression=tierkv.CompressionPolicy("int8", after_steps=50),
    )
    wr = CacheManager(
        name="writing",
        block_tokens=B,
        tiers=[
            tierkv.Tier("device", capacity="1MiB", device=DEVICE),
            tierkv.Tier("host", capacity="64MiB"),
        ],
        policy=tierkv.Hybrid(
            [
                tierkv.Policy("size_aware", tier="device"),
                tierkv.Policy("lru", unit="session", action="demote", to="host"),
            ]
        ),
    )
    text = "".join(f"{number} bottles of beer on the wall. " for number in range(100))
    with qa, wr:
        kq, kw = (hf.attach(model, m, tokenizer=tokenizer) for m in (qa, wr))
        asking = ChatSession(qa)
        a = asking.chat(kq, "Explain this code.", max_new_tokens=120, do_sample=False)
        qa.flush()
        for b in qa.explain(a.output_ids):
            if b.tier:  # a partial tail is not shared
                old = len(a.output_ids) - 1 - b.end_token > 50
                assert b.chain == ("int8" if old else "raw")
        before = qa.stats().counters()
        idle, busy = ChatSession(wr), ChatSession(wr)
        i = idle.chat(kw, text[:500], **GREEDY)
        busy.chat(kw, text[500:2200], **GREEDY)  # overflows the device tier
        wr.flush()
        assert {b.tier for b in wr.explain(i.output_ids) if b.tier} == {"host"}
        i2 = idle.chat(kw, " Go on.", **GREEDY)
        assert i2.tier == "host"
        assert same(model, i2)
        assert qa.stats().counters() == before  # managers are isolated
        del idle, busy, asking
        gc.collect()
