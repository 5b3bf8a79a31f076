"""Conformance suite for adapters: an engine with tierkv in it, seen from outside.

Whatever engine an adapter is for, it must hold what this suite asks: answers never change, what was
computed before is reused, nobody gets another's KV. A test file subclasses it and says how to
make an engine with the adapter in it::

    class TestMine(AdapterTests):
        def make(self, root: Path) -> MyServer:
            return MyServer(root)

pytest then runs every check (``tmp_path`` is its own). An engine is anything with the methods of
:class:`Served`; a model that is tiny, or none at all, does: the replay drivers
(:mod:`tierkv.testing.serving` for vLLM's order of calls, :mod:`tierkv.testing.trtllm` for that of
TensorRT-LLM) compare KV where a model would only give other words. What the checks must catch is
shown by :mod:`tierkv.testing.adapter_mutants`. How an adapter is built from parts that are there
is told in :mod:`tierkv_adapters.serving`.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["AdapterTests", "Answer", "Ask", "Served"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        tokens: The prompt; ids from 1 to 255.
        max_tokens: Tokens to generate, greedily; the engine stops for nothing else.
        salt: Secret that requests must share to share KV.
        adapter: Number of the LoRA adapter, 1 or 2; 0: none.
        media: Content behind the four placeholder tokens from index 4 on; b"": there are none.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 4
    salt: str | None = None
    adapter: int = 0
    media: bytes = b""


class Answer(NamedTuple):
    """What an engine generated, and how many prompt tokens it did not compute."""

    tokens: tuple[int, ...]
    reused: int


class Served(Protocol):
    """An engine with the adapter in it, and no reuse of its own."""

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Serve requests side by side; their order is that of the answers."""
        ...

    def expect(self, ask: Ask) -> None:
        """Tell that a request will come, and compute nothing; where one cannot: do nothing."""
        ...

    def give_up(self, ask: Ask, steps: int) -> None:
        """Begin a request, and give it up after so many steps of the engine, or tokens."""
        ...

    def settle(self) -> None:
        """Wait until all that was computed, or is stored and was expected, can be reused."""
        ...

    def close(self) -> None:
        """Shut the engine down."""
        ...


_LONG = tuple(range(1, 42))
_OTHER = tuple(range(60, 101))


class AdapterTests:
    """What every adapter must do."""

    block_tokens: ClassVar[int] = 4
    """Tokens of a block, at most 8."""
    lag: ClassVar[int] = 8
    """Most tokens less than all of a prompt's that are reused, beside what is no whole block."""
    salts: ClassVar[bool] = True
    """Whether the engine's requests can carry a salt."""
    adapters: ClassVar[bool] = True
    """Whether they can use LoRA adapters."""
    media: ClassVar[bool] = True
    """Whether they can carry media."""
    durable: ClassVar[bool] = True
    """Whether what was stored outlives :meth:`Served.close`, in files below ``root``."""
    kv_files: ClassVar[tuple[str, ...]] = ("*",)
    """Names of the files below ``root`` that hold KV, or tell where it is; of an ``nvme`` tier
    ``("segment-*", "journal-*")``."""

    def make(self, root: Path) -> Served:
        """An engine whose adapter may keep files below ``root``."""
        raise NotImplementedError

    def test_new_prompts_are_computed(self, tmp_path: Path) -> None:
        """Nothing is reused where nothing was stored; prompts shorter than a block, too."""
        with closing(self.make(tmp_path)) as engine:
            for tokens in (_LONG, _OTHER, (250,)):
                (answer,) = engine.answer([Ask(tokens)])
                assert (answer.reused, len(answer.tokens)) == (0, 4)

    def test_repeats_reuse_and_answer_alike(self, tmp_path: Path) -> None:
        """The second time a prompt's whole blocks are reused, and the answer is the same."""
        with closing(self.make(tmp_path)) as engine:
            first = self._stored(engine, Ask(_LONG))
            again = self._again(engine, Ask(_LONG), len(_LONG))
            assert again.tokens == first.tokens

    def test_prompts_of_whole_blocks(self, tmp_path: Path) -> None:
        """The engine needs a token to compute: reuse leaves it one, or knows how to do without."""
        with closing(self.make(tmp_path)) as engine:
            ask = Ask(_LONG[:40])
            first = self._stored(engine, ask)
            again = self._again(engine, ask, 40)
            assert again.tokens == first.tokens

    def test_the_next_turn_reuses_the_reply(self, tmp_path: Path) -> None:
        """KV of generated tokens is kept as that of prompts is."""
        with closing(self.make(tmp_path)) as engine:
            first = self._stored(engine, Ask(_LONG, max_tokens=24))
            turn = (*_LONG, *first.tokens, 7, 8, 9)
            self._again(engine, Ask(turn), len(_LONG) + 24)

    def test_prompts_that_part(self, tmp_path: Path) -> None:
        """Reuse ends where the prompts part, and the answer is that of the new one."""
        with (
            closing(self.make(tmp_path / "a")) as engine,
            closing(self.make(tmp_path / "b")) as other,
        ):
            self._stored(engine, Ask(_LONG))
            ask = Ask((*_LONG[:22], *_OTHER[:20]))
            (expected,) = other.answer([ask])
            (answer,) = engine.answer([ask])
            assert answer.tokens == expected.tokens
            assert answer.reused <= 22

    def test_salts_are_kept_apart(self, tmp_path: Path) -> None:
        """Neither another salt nor none reuses anything."""
        if self.salts:
            asks = [Ask(_LONG, salt=salt) for salt in ("b", None)]
            self._kept_apart(tmp_path, Ask(_LONG, salt="a"), asks, 0)

    def test_adapters_are_kept_apart(self, tmp_path: Path) -> None:
        """Neither another LoRA adapter nor none reuses anything."""
        if self.adapters:
            asks = [Ask(_LONG, adapter=number) for number in (2, 0)]
            self._kept_apart(tmp_path, Ask(_LONG, adapter=1), asks, 0)

    def test_media_are_kept_apart(self, tmp_path: Path) -> None:
        """The same placeholder tokens of another picture reuse nothing from there on."""
        if self.media:
            asks = [Ask(_LONG, media=b"dog"), Ask(_LONG)]
            self._kept_apart(tmp_path, Ask(_LONG, media=b"cat"), asks, 4)

    def test_side_by_side(self, tmp_path: Path) -> None:
        """Requests that share a batch, and prefixes, are answered as each one alone is."""
        with (
            closing(self.make(tmp_path / "a")) as engine,
            closing(self.make(tmp_path / "b")) as other,
        ):
            asks = [Ask((*_LONG[:at], *_OTHER[at:])) for at in (0, 9, 16, 30, 41)]
            alone = [other.answer([ask])[0].tokens for ask in asks]
            for _ in range(3):
                assert [answer.tokens for answer in engine.answer(asks)] == alone
                engine.settle()

    def test_requests_are_given_up(self, tmp_path: Path) -> None:
        """Wherever a request was given up, the engine goes on, and answers alike."""
        with closing(self.make(tmp_path)) as engine:
            first = self._stored(engine, Ask(_LONG))
            for steps in range(6):
                engine.give_up(Ask((*_LONG, *_OTHER), max_tokens=9), steps)
                (answer,) = engine.answer([Ask(_LONG)])
                assert answer.tokens == first.tokens
            engine.settle()

    def test_restarts(self, tmp_path: Path) -> None:
        """Another engine over the same files reuses what the first one stored."""
        if not self.durable:
            return
        with closing(self.make(tmp_path)) as engine:
            first = self._stored(engine, Ask(_LONG))
        with closing(self.make(tmp_path)) as engine:
            again = self._again(engine, Ask(_LONG), len(_LONG))
            assert again.tokens == first.tokens

    def test_damaged_files(self, tmp_path: Path) -> None:
        """Where stored bytes changed, the answer does not."""
        if not self.durable:
            return
        with closing(self.make(tmp_path)) as engine:
            first = self._stored(engine, Ask(_LONG))
        found = {path for name in self.kv_files for path in tmp_path.rglob(name)}
        paths = sorted(path for path in found if path.is_file() and not path.is_symlink())
        assert paths, "nothing was stored"
        for path in paths:
            _damage(path)
        with closing(self.make(tmp_path)) as engine:
            for _ in range(2):
                engine.expect(Ask(_LONG))
                engine.settle()
                (answer,) = engine.answer([Ask(_LONG)])
                assert answer.tokens == first.tokens

    def _kept_apart(self, root: Path, stored: Ask, asks: list[Ask], shared: int) -> None:
        with closing(self.make(root)) as engine:
            self._stored(engine, stored)
            self._again(engine, stored, len(stored.tokens))
            for ask in asks:
                (answer,) = engine.answer([ask])
                assert answer.reused <= shared, f"{answer.reused} tokens of {stored} for {ask}"

    def _stored(self, engine: Served, ask: Ask) -> Answer:
        (answer,) = engine.answer([ask])
        engine.settle()
        return answer

    def _again(self, engine: Served, ask: Ask, most: int) -> Answer:
        """Ask for what was stored: nearly all that can be reused must be."""
        engine.expect(ask)
        engine.settle()
        least = most // self.block_tokens * self.block_tokens - self.lag
        (answer,) = engine.answer([ask])
        seen = answer.reused
        assert least <= seen <= most, f"{seen} tokens reused of the {most} that are there"
        return answer


def _damage(path: Path) -> None:
    """Flip a bit in every 64 bytes of a file, and keep its size."""
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 64):
        data[at] ^= 0x10
    path.write_bytes(data)
