"""A rank that keeps cells in a dictionary, follows orders to the letter, and fails as asked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.blocks import KeyChain, part_id
from tierkv.testing.serving import Mode, TransferResults
from tierkv_adapters.serving.eras import Eras
from tierkv_adapters.vllm.facts import space_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from tierkv.testing.serving import Memory
    from tierkv_adapters.serving.orders import StepOrders
    from tierkv_adapters.serving.replicas import ReplicaIndex


@dataclass
class Faults:
    """What goes wrong in the ranks: shares of loads, steps of delay."""

    lag: int = 0
    load_fails: float = 0.0
    always_fails: bool = False
    evicts: float = 0.0
    seed: int = 0


@dataclass
class Meta:
    """A worker's report, as the connector's worker metadata is."""

    loads: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: Meta) -> Meta:
        loads = dict(self.loads)
        for name, ended in other.loads.items():
            loads[name] = min(loads.get(name, ended), ended, key=lambda one: one[0])
        return Meta(loads, {**self.saves, **other.saves})


@dataclass
class _Held:
    """What a rank knows of a request."""

    chain: KeyChain
    media: Any
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)


class DictRank:
    """Follows orders at once, or ``lag`` steps later; tells the index what it holds."""

    def __init__(
        self, mode: Mode, memory: Memory, number: int, facts: Mapping[str, Any], faults: Faults
    ) -> None:
        self._mode, self._pools, self._number = mode, memory.pools, number
        self._facts = facts
        self._faults = faults
        self._eras = Eras()
        self._dice = random.Random(faults.seed + number)
        self._requests: dict[str, _Held] = {}
        self._parts: dict[bytes, np.ndarray[Any, Any]] = {}
        self._loads: list[tuple[int, str, _Held, int, int]] = []
        self._saves: list[tuple[int, _Held, int, int]] = []
        self._ended: list[tuple[str, int, int, str | None, _Held]] = []
        self._orders: StepOrders | None = None
        self._begun = False
        self.index: ReplicaIndex | None = None
        self.orders: list[StepOrders] = []

    # what the link does

    def reset(self) -> bool:
        self._saves.clear()
        for part in list(self._parts):
            self._forget(part)
        return True

    def close(self) -> None:
        self.index = None

    def _forget(self, part: bytes) -> None:
        self._parts.pop(part, None)
        if self.index is not None:
            self.index.apply(self._number, [(part, 0)])  # type: ignore[list-item]

    # vLLM's worker calls

    def handle_preemptions(self, orders: StepOrders) -> None:
        self.orders.append(orders)
        self._orders = orders
        for name in orders.ended:
            del self._requests[name]
        for name in orders.voided:
            self._requests[name].pages = [[] for _ in self._mode.groups]
        for facts in orders.fresh:
            assert facts.id not in self._requests
            space = space_of(
                self._facts["identity"],
                self._facts["layout"],
                self._facts["block_tokens"],
                facts.adapter,
            )
            space = self._eras.within(space, facts.era)
            chain = KeyChain(space.root(facts.tenant, facts.salt), space.block_tokens)
            pages: list[list[int]] = [[] for _ in self._mode.groups]
            self._requests[facts.id] = _Held(chain, facts.media, [], pages)
        for grown in orders.grown:
            held = self._requests[grown.id]
            held.tokens.extend(grown.tokens)
            for group, more in enumerate(grown.pages):
                held.pages[group] = [*([] if grown.replace else held.pages[group]), *more]
            held.chain.follow(held.tokens, held.media)
        taken = set().union(*orders.taken)
        for save in [one for one in self._saves if self._reads(one, taken)]:
            self._save(*save[1:])
        self._saves = [one for one in self._saves if not self._reads(one, taken)]

    def _reads(self, save: tuple[int, _Held, int, int], taken: set[int]) -> bool:
        _, held, start, stop = save
        return any(
            page in taken
            for group, pages in enumerate(held.pages)
            for page in pages[start // self._size(group) : stop // self._size(group)]
        )

    def _size(self, group: int) -> int:
        return self._mode.groups[group].page_tokens

    def bind_connector_metadata(self, orders: StepOrders) -> None:
        pass

    def start_load_kv(self, context: object) -> None:
        assert self._orders is not None
        for order in self._orders.loads:
            held = self._requests[order.id]
            copy = _Held(held.chain.fork(), held.media, [], [list(p) for p in held.pages])
            self._loads.append((self._faults.lag, order.id, copy, order.start, order.stop))

    def wait_for_save(self) -> None:
        assert self._orders is not None
        for order in self._orders.saves:
            held = self._requests[order.id]
            copy = _Held(held.chain.fork(), held.media, [], [list(p) for p in held.pages])
            self._saves.append((self._faults.lag, copy, order.start, order.stop))

    def _blocks(self, held: _Held, start: int, stop: int) -> Any:
        size = held.chain.block_tokens
        for block in range(start // size, stop // size):
            for group, spec in enumerate(self._mode.groups):
                per = size // spec.page_tokens
                pages = held.pages[group][block * per : (block + 1) * per]
                yield block, group, pages, part_id(held.chain.keys[block], group)

    def _save(self, held: _Held, start: int, stop: int) -> None:
        for _, group, pages, part in self._blocks(held, start, stop):
            if not pages or -1 in pages:
                assert self._mode.groups[group].window is not None
                continue
            self._parts[part] = self._pools[group][pages].copy()
            if self.index is not None:
                self.index.apply(self._number, [(part, 1)])

    def _load(self, name: str, held: _Held, start: int, stop: int) -> None:
        faults, place, reason = self._faults, stop, None
        if faults.always_fails or self._dice.random() < faults.load_fails:
            block = held.chain.block_tokens
            first, last = start // block, stop // block
            kept_blocks = first if faults.always_fails else self._dice.randint(first, last)
            place, reason = max(start, kept_blocks * block), "planted"
        for block, group, pages, part in self._blocks(held, start, place):
            window = self._mode.groups[group].window
            size, span = self._size(group), held.chain.block_tokens
            if window is not None and (block + 1) * span <= stop - window + 1:
                continue
            kept = self._parts.get(part)
            if kept is None:
                place, reason = min(place, block * span), "gone"
                break
            for at, page in enumerate(pages):
                if page >= 0 and block * span + at * size >= start:
                    self._pools[group][page] = kept[at]
        self._ended.append((name, max(start, place), stop, reason, held))

    def get_transfer_results(self, finished: set[str]) -> TransferResults:
        for left, *save in self._saves:
            if left <= 0:
                self._save(*save)  # type: ignore[arg-type]
        self._saves = [(one[0] - 1, *one[1:]) for one in self._saves if one[0] > 0]
        for left, *load in self._loads:
            if left <= 0:
                self._load(*load)  # type: ignore[arg-type]
        self._loads = [(one[0] - 1, *one[1:]) for one in self._loads if one[0] > 0]
        if self._parts and self._dice.random() < self._faults.evicts:
            self._forget(self._dice.choice(sorted(self._parts)))
        results = TransferResults({*()}, {one[0] for one in self._ended})
        if len(self._mode.groups) > 1:
            results.failed_recving = {one[0] for one in self._ended if one[3] is not None}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if len(self._mode.groups) > 1:
            return set()
        size = self._size(0)
        return {
            page
            for _, place, stop, _, held in self._ended
            for page in held.pages[0][place // size : -(-stop // size)]
        }

    def build_connector_worker_meta(self) -> Meta | None:
        meta = Meta({name: (place, reason) for name, place, _, reason, _ in self._ended})
        return meta if meta.loads else None

    def clear_connector_metadata(self) -> None:
        self._ended.clear()
        self._orders = None
