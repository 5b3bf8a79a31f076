"""Recurrent states, kept by vLLM's rules: what is saved, offered and brought back, without vLLM."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tierkv
from tests.serving.planner_world import FULL, TOKENS, World
from tierkv.blocking import CacheManager
from tierkv.blocks import Identity, KeyChain, part_id
from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind, Space
from tierkv.testing.serving.objects import Blocks, BlockState, CachedRequests, NewRequest, Request
from tierkv.testing.serving.objects import Prompt as Asked
from tierkv_adapters.remote.feeds import LocalFeed
from tierkv_adapters.serving.pages import PagedLayer, PageGroup, PagePools
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.settings import ServingSettings
from tierkv_adapters.vllm.scheduling.links import RankLink
from tierkv_adapters.vllm.scheduling.scheduler import SchedulerSide
from tierkv_adapters.vllm.scheduling.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tierkv_adapters.serving.replicas import ReplicaIndex

STATE = GroupRule(GroupKind.STATE)
PAGE = 4
GUARD = 60.0


# ---------------------------------------------------------------------- the planner


def _saves(world: World) -> list[tuple[int, int]]:
    return [(save.start, save.stop) for save in world.planner.step().saves]


def test_a_save_ends_where_there_is_a_state_and_nowhere_else() -> None:
    world = World(groups=(FULL, STATE))
    world.admit()
    full = list(range(10))

    def advance(computed: int, states: dict[int, int]) -> list[tuple[int, int]]:
        table = [states.get(at, -1) for at in range(10)]
        world.planner.advance("a", tokens=(), pages=[full, table], computed=computed, replace=True)
        return _saves(world)

    # blocks of 8 tokens, pages of 4: a state in the middle of a block is of no use
    assert advance(24, {4: 50}) == []
    assert advance(24, {3: 51, 5: 52}) == [(0, 16), (16, 24)]
    assert advance(32, {}) == []
    assert advance(40, {9: 53}) == [(24, 40)]
    assert world.planner.counters.saved_blocks == 5


def test_offers_end_at_stored_states() -> None:
    world = World(groups=(FULL, STATE))
    world.store()
    chain = KeyChain(world.spaces(None)[0].root("", b""), 8)
    chain.follow(TOKENS, ())
    world.index.apply(0, [(part_id(chain.keys[at], 1), 0) for at in (0, 2, 3, 4)])
    world.admit()
    assert world.planner.offer("a", 0, 0.0) == 16
    assert world.planner.offer("a", 16, 0.0) == 0


def test_a_load_that_failed_condemns_the_state_and_not_the_first_block() -> None:
    world = World(groups=(FULL, STATE))
    world.store()
    world.admit()
    world.load()
    world.planner.failed("a", 0, 1.0, anew=True)
    world.admit("b")
    assert world.planner.offer("b", 0, 2.0) == 32
    assert world.planner.offer("b", 0, 60.0) == 40


# ---------------------------------------------------------------------- vLLM's tables


def _output(name: str, count: int, table: Sequence[Sequence[int]], **more: Any) -> Any:
    state = BlockState({name: tuple(list(each) for each in table)})
    state.boundary_state_offloads = more.pop("offers", {})  # type: ignore[attr-defined]
    return SimpleNamespace(
        num_scheduled_tokens={name: count}, kv_connector_block_state=state, **more
    )


def _tables() -> Tables:
    tables = Tables([SimpleNamespace(), SimpleNamespace(enable_kv_transfer=False), None])
    tables.learn([("full", None, PAGE), ("state", None, PAGE)])
    return tables


def test_a_page_counts_only_if_a_step_began_or_ended_at_its_border() -> None:
    tables = _tables()
    assert tables.moved == [0, 2]
    table = [[1, 2, 3, 4], [], [0, 0, 7, 8]]
    output = _output("a", 14, table)
    tables.note(output, "a", 0)  # ends inside page 3; page 2 may hold anything
    now = tables.table(output, "a")
    assert now is not None
    assert tables.sure("a", now) == [[1, 2, 3, 4], [-1] * 4]
    tables.note(_output("a", 2, table), "a", 14)
    assert tables.sure("a", now)[1] == [-1, -1, -1, 8]
    # given back by now: it does not come back under the same number
    assert tables.sure("a", [[1, 2, 3, 4], [-1] * 4])[1] == [-1] * 4
    assert tables.sure("a", now)[1] == [-1] * 4
    tables.note(_output("a", 1, table), "a", 12)  # it began there: found in vLLM's own cache
    assert tables.sure("a", now)[1] == [-1, -1, 7, -1]
    tables.forget("a")
    assert tables.sure("a", now)[1] == [-1] * 4


def test_what_vllm_says_of_a_page_counts_if_it_is_that_page() -> None:
    tables = _tables()
    table = [[1, 2, 3, 4], [], [0, 0, 7, 8]]
    now = [[1, 2, 3, 4], [-1, -1, 7, 8]]
    for offer in [(2, 9, 12), (2, 7, 11), (2, 7, 40), (1, 7, 12), (5, 7, 12), (2, 7, 0)]:
        tables.note(_output("a", 14, table, offers={"a": [offer]}), "a", 0)
        assert tables.sure("a", now)[1] == [-1] * 4, offer
    tables.note(_output("a", 14, table, offers={"a": [(2, 7, 12)]}), "a", 0)
    assert tables.sure("a", now)[1] == [-1, -1, 7, -1]


def test_pages_that_are_copied_into_are_nobody_s_source() -> None:
    tables = _tables()
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=9)]
    assert tables.copied(SimpleNamespace(kv_cache_block_copies=copies)) == [[9], []]
    assert tables.copied(SimpleNamespace()) == [[], []]
    assert tables.leave(SimpleNamespace(num_tokens=100)) == 1


# ---------------------------------------------------------------------- end to end


class Align:
    """vLLM's way with states, for one request at a time: cache mode ``align``.

    The KV of a token is a hash of the prompt up to it; so is a state.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.cells = torch.zeros(96, 1, PAGE, 8, dtype=torch.uint8)
        self.states = torch.zeros(96, 8, dtype=torch.uint8)
        full = PagedLayer(0, {"page": self.cells}, "test")
        state = PagedLayer(1, {"state0": self.states}, "test")
        self.pools = PagePools(
            [
                PageGroup(GroupKind.STATE, None, PAGE, (state,)),
                PageGroup(GroupKind.FULL, None, PAGE, (full,)),
            ]
        )
        layout = self.pools.layout(PAGE)
        identity = Identity("model", "weights")
        self.manager = manager
        self.rank = Rank(manager, self.pools, lambda _: Space(identity, layout, PAGE))
        self.side = SchedulerSide(
            SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False)),
            SimpleNamespace(kv_cache_groups=[SimpleNamespace(), SimpleNamespace()]),
            ServingSettings(),
            link=self._link,
        )
        facts = {"identity": identity, "layout": layout, "block_tokens": PAGE, "socket": ""}
        groups = tuple((g.kind.value, None, PAGE) for g in self.pools.groups)
        self.side.started({0: facts | {"rank": 0, "world": 1, "pid": 0, "groups": groups}})
        self.free = list(range(1, 96))
        self.loaded = 0

    def _link(self, number: int, facts: Mapping[str, Any], index: ReplicaIndex) -> RankLink:
        feed = LocalFeed(self.manager, index, number)
        assert feed.start(GUARD)
        return RankLink(number, feed, self.manager, owned=False)

    def close(self) -> None:
        self.side.close()
        self.rank.close()

    def _value(self, tokens: Sequence[int]) -> torch.Tensor:
        digest = hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
        return torch.from_numpy(np.frombuffer(digest, np.uint8).copy())

    def _take(self) -> int:
        return self.free.pop(0)

    def serve(self, name: str, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """Compute a prompt in steps that end at given tokens; checks all that a step reads."""
        request = Request(name, Asked(tuple(tokens)))
        self.side.on_new_request(request)
        offered, later = self.side.get_num_new_matched_tokens(request, 0)
        assert offered is not None
        assert offered < len(tokens), "a state cannot take its last token in again"
        table: tuple[list[int], list[int]] = ([], [])
        had, self.loaded = 0, offered
        if offered:
            assert later
            pages = offered // PAGE
            table = [0] * (pages - 1) + [self._take()], [self._take() for _ in range(pages)]
            self.side.update_state_after_alloc(request, Blocks(table), offered)
            self._step(SimpleNamespace(news=[], cached=CachedRequests(), counts={}, tables={}))
            assert self.rank.drain(GUARD)
            assert [one.tokens for one in self.rank.poll() if one.kind == "load"] == [offered]
            told = SimpleNamespace(finished_recving={name}, failed_recving=set())
            self.side.update_connector_output(told)
            had = offered
        for end in [*sorted({e for e in ends if had < e < len(tokens)}), len(tokens)]:
            self._compute(name, request, tokens, table, had, end)
            had = end
        self.side.request_finished(request, table)
        self._step(
            SimpleNamespace(news=[], cached=CachedRequests(), counts={}, tables={}, finished={name})
        )
        assert self.rank.drain(GUARD)
        self.free += [page for each in table for page in each if page]

    def _compute(
        self,
        name: str,
        request: Request,
        tokens: Sequence[int],
        table: tuple[list[int], list[int]],
        had: int,
        end: int,
    ) -> None:
        state, full = table
        first, last = not request.num_computed_tokens, (end - 1) // PAGE
        before = (had - 1) // PAGE
        if had:
            assert torch.equal(self.states[state[before]], self._value(tokens[:had])), had
        for at in range(had):
            assert torch.equal(
                self.cells[full[at // PAGE], 0, at % PAGE], self._value(tokens[: at + 1])
            )
        was = [len(state), len(full)]
        full += [self._take() for _ in range(last + 1 - len(full))]
        state += [0] * (last - len(state))
        if len(state) == last:
            state.append(self._take())
        for at in range(before):  # the step before the last one's
            if state[at]:
                self.free.append(state[at])
                state[at] = 0
        counts, tables = {name: end - had}, {name: table}
        cached = CachedRequests()
        if not first:
            cached = CachedRequests([name], set(), [(state[was[0] :], full[was[1] :])], [had], [0])
        news = [NewRequest(name, list(tokens), table, had)] if first else []
        request.num_computed_tokens = end

        def forward() -> None:
            for at in range(had, end):
                self.cells[full[at // PAGE], 0, at % PAGE] = self._value(tokens[: at + 1])
            self.states[state[last]] = self._value(tokens[:end])

        self._step(SimpleNamespace(news=news, cached=cached, counts=counts, tables=tables), forward)

    def _step(self, step: Any, forward: Any = None) -> None:
        output = SimpleNamespace(
            scheduled_new_reqs=step.news,
            scheduled_cached_reqs=step.cached,
            num_scheduled_tokens=step.counts,
            finished_req_ids=getattr(step, "finished", set()),
            preempted_req_ids=set(),
            kv_connector_block_state=BlockState(step.tables),
        )
        self.rank.begin(self.side.build_connector_meta(output))
        if forward is not None:
            forward()
        self.rank.start_loads()
        self.rank.start_saves()

    def settle(self) -> None:
        assert self.rank.drain(GUARD)
        self.rank.poll()
        self.manager.flush()
        for _ in range(3):  # the feed tells once a turn of the loop
            self.manager.call(_turn)


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)


@pytest.fixture
def align() -> Iterator[Align]:
    with CacheManager(tiers=[tierkv.Tier("host", capacity="16MiB")]) as manager:
        engine = Align(manager)
        yield engine
        engine.close()


def test_a_prompt_goes_on_from_the_last_state_that_a_step_left(align: Align) -> None:
    tokens = list(range(100, 130))
    align.serve("a", tokens, [12, 24])  # then 30, inside a page
    align.settle()
    align.serve("b", tokens, [])
    assert align.loaded == 24
    align.settle()
    align.serve("c", tokens[:20] + [7] * 9, [])
    assert align.loaded == 12
    align.settle()
    align.serve("d", tokens[:24], [])  # one token is left to compute: not all of it is offered
    assert align.loaded == 12
    align.settle()
    align.serve("e", tokens[:11], [])
    assert align.loaded == 0


def test_whatever_the_steps_no_request_reads_another_state(align: Align) -> None:
    dice = random.Random(3)
    stem = [dice.randrange(1000) for _ in range(60)]
    found = 0
    for number in range(60):
        cut = dice.randrange(1, 60)
        tokens = stem[:cut] + [dice.randrange(1000) for _ in range(dice.randrange(1, 20))]
        # vLLM ends steps of a prompt at borders of pages, and decodes a token at a time behind it;
        # where it does not, pages are left that hold the state of a token before their last
        step = PAGE if number % 3 else 1
        ends = sorted({dice.randrange(1, 80 // step) * step for _ in range(3)})
        align.serve(f"r{number}", tokens, [*ends, *range(len(tokens) - 5, len(tokens))])
        found += align.loaded > 0
        align.settle()
    assert found > 20
    assert align.rank.counters.loads_short == align.rank.counters.errors == 0
