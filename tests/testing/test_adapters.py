"""The suite of adapters passes what is right and catches what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest

from tierkv.testing.adapter_mutants import MUTANTS, Mutant, failing_checks
from tierkv.testing.adapter_references import FileEngine
from tierkv.testing.adapters import AdapterTests, Answer, Ask, Served
from tierkv.testing.serving import Feature, Lora, Mode, Place, Prompt, make_reference
from tierkv.testing.serving import Replay as ServingReplay
from tierkv.testing.trtllm import MODES, Replay
from tierkv.testing.trtllm.reference import reference
from tierkv.testing.trtllm.served import ServedReplay

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class TestFileEngine(AdapterTests):
    def make(self, root: Path) -> Served:
        return FileEngine(root)


class _OverTheDriver(AdapterTests):
    durable: ClassVar[bool] = False
    mode: ClassVar[str]

    def make(self, root: Path) -> Served:
        return ServedReplay(Replay(reference(), MODES[self.mode], patience=100, pause=0.0))


class TestConnector(_OverTheDriver):
    mode = "flat-chunked-tp2"


class TestConnectorOfTheFirstApi(_OverTheDriver):
    mode = "first-overlap"


class TestConnectorWithWindows(_OverTheDriver):
    mode = "windows"


class _ServedByVllmsOrder:
    """The adapter suite's requests, through the driver that follows vLLM."""

    def __init__(self, mode: Mode) -> None:
        self.replay = ServingReplay(mode, lambda memories: make_reference(mode, memories))
        self.count = 0

    def _named(self, ask: Ask) -> tuple[str, Prompt]:
        self.count += 1
        lora = Lora(f"lora-{ask.adapter}", ask.adapter) if ask.adapter else None
        media = (Feature(ask.media.decode(), Place(4, 4)),) if ask.media else ()
        return f"r{self.count}", Prompt(ask.tokens, ask.max_tokens, ask.salt, lora, media)

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        named = [self._named(ask) for ask in asks]
        self.replay.run(*named)
        outputs, offered = self.replay.outputs, self.replay.offered
        return [Answer(tuple(outputs[name]), offered.get(name, 0)) for name, _prompt in named]

    def expect(self, ask: Ask) -> None:
        return

    def give_up(self, ask: Ask, steps: int) -> None:
        name, prompt = self._named(ask)
        self.replay.add(name, prompt)
        for _ in range(steps):
            self.replay.step()
        self.replay.abort(name)

    def settle(self) -> None:
        self.replay.drain()

    def close(self) -> None:
        self.replay.drain()


class TestConnectorInVllmsOrder(AdapterTests):
    durable: ClassVar[bool] = False
    serving: ClassVar[Mode] = Mode(prefix_caching=False, ranks=2, chunk=12)

    def make(self, root: Path) -> Served:
        return _ServedByVllmsOrder(self.serving)


class TestConnectorInVllmsOrderThatOverlaps(TestConnectorInVllmsOrder):
    serving = Mode(prefix_caching=False, overlap=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.engine.__name__)
def test_mutants_are_caught(mutant: Mutant) -> None:
    failed = failing_checks(mutant.engine, mutant.check)
    assert mutant.check in failed, f"{mutant.check} let it pass"


def test_every_check_has_its_own_mutant() -> None:
    aimed = Counter(mutant.check for mutant in MUTANTS)
    assert set(aimed.values()) == {1}
    assert set(aimed) == {name for name in dir(AdapterTests) if name.startswith("test_")}
