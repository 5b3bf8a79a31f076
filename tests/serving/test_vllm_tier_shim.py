"""The tier and the policies under stand-ins for two generations of vLLM's interface."""

from __future__ import annotations

import importlib
import random
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tierkv
from tests.serving.tier_fakes import (
    GENERATIONS,
    FakeTiering,
    LookupResult,
    Medium,
    ReqContext,
    modules,
)
from tests.serving.tier_rig import GUARD, ROW, key
from tests.serving.tier_specs import NEW, OLD, WEIGHTS, spec_of
from tierkv.blocking import CacheManager
from tierkv.errors import AttachError, ConfigError
from tierkv.registry import names, resolve
from tierkv.testing.faults import Failing, inject
from tierkv_adapters.serving.registry import lend
from tierkv_adapters.vllm.tier.shim import detect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 32
MADE_FOR_ONE = ("tierkv_adapters.vllm.tier.manager", "tierkv_adapters.vllm.tier.policies")
"""Modules whose classes are made for the vLLM that is there when they are imported."""


@pytest.fixture(params=GENERATIONS)
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A generation whose modules are what ``import vllm...`` finds."""
    for name in MADE_FOR_ONE:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules(request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    yield request.param
    for name in MADE_FOR_ONE:
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    """A class of the tier package, made for the vLLM that is there now."""
    package = importlib.import_module("tierkv_adapters.vllm.tier")
    return getattr(package, name)


class World:
    """A tier of one generation under its tiering manager."""

    def __init__(self, generation: str, root: Path, *faults: Any, **settings: Any) -> None:
        disk = tierkv.Tier("nvme", capacity="16MiB", path=str(root))
        backend = inject(resolve("backends", "nvme")(disk), *faults)
        self.manager = CacheManager(tiers=[disk], backends=[backend], metrics=False).open()
        self.rows = np.zeros((ROWS, ROW), np.int8)
        given: dict[str, Any] = {"manager": lend(self.manager), **WEIGHTS, **settings}
        if generation == NEW:
            given["backpressure_detector"] = None
        self.tier = load("TierKVTier")(
            offloading_spec=spec_of(generation),
            primary_kv_view=self.rows.data,
            tier_type="tierkv",
            **given,
        )
        self.tiering = FakeTiering(self.tier, generation, ROWS)

    def close(self) -> None:
        self.tier.shutdown()
        self.manager.close()

    def wait(self) -> None:
        ends = time.monotonic() + GUARD
        while self.tiering.busy():
            self.tiering.end_step()
            assert time.monotonic() < ends
            time.sleep(0.001)

    def put(self, numbers: list[int]) -> None:
        context = ReqContext("put")
        self.tier.on_new_request(context)
        for number in numbers:
            self.rows[self.tiering.allocate(key(number))] = number + 1
        self.tiering.store([key(number) for number in numbers], context)
        self.wait()
        for number in numbers:
            self.tiering.drop(key(number))

    def ask(self, request: str, numbers: list[int]) -> int:
        """Steps of a request that waits, until it knows how many leading chunks it gets."""
        context = ReqContext(request)
        self.tier.on_new_request(context)
        ends = time.monotonic() + GUARD
        while True:
            answers = []
            for number in numbers:
                answers.append(self.tiering.lookup(key(number), context))
                if answers[-1] is LookupResult.MISS:
                    break
            if not {LookupResult.HIT_PENDING, LookupResult.RETRY} & set(answers):
                return answers.count(LookupResult.HIT)
            self.tiering.end_step()
            assert time.monotonic() < ends, "the request never finishes"
            time.sleep(0.001)


def test_both_generations_store_and_promote(generation: str, tmp_path: Path) -> None:
    world = World(generation, tmp_path)
    numbers = list(range(20))
    world.put(numbers)
    world.rows[:] = 0
    assert world.ask("a", [*numbers, 99]) == 20
    for number in numbers:
        assert (world.rows[world.tiering.rows[key(number)]] == number + 1).all()
    assert world.ask("b", numbers) == 20, "now in the CPU tier"
    assert world.tiering.promotions == 1
    world.tiering.reset()
    world.close()


def test_a_failing_tier_ends_every_request(generation: str, tmp_path: Path) -> None:
    worn = Failing("read")
    worn.active = False
    world = World(generation, tmp_path, worn)
    world.put([1, 2, 3])
    world.manager.flush()
    worn.active = True
    assert world.ask("a", [1, 2, 3]) == 0
    assert world.ask("b", [1, 2, 3]) == 0
    assert world.tiering.promotions == 1
    assert len(world.tiering.rows) == 0, "no row is kept for what did not come"
    world.close()


def test_what_came_is_kept_where_vllm_can_be_told(generation: str, tmp_path: Path) -> None:
    world = World(generation, tmp_path)
    world.put([1, 2, 3])
    side = world.tier.side
    core, part = world.manager.engine.core, side._keys.part(key(2))

    async def lose() -> None:
        from tierkv.decisions.types import EvictReason

        core.free(core.decisions.forget([part], EvictReason.REMOVED, core.clock()))

    # looked up, and gone before it is loaded
    context = ReqContext("a")
    assert world.tiering.lookup(key(1), context) is LookupResult.HIT_PENDING
    assert world.tiering.lookup(key(2), context) is LookupResult.HIT_PENDING
    assert world.tiering.lookup(key(3), context) is LookupResult.HIT_PENDING
    world.manager.call(lose)
    world.tiering.end_step()
    assert world.ask("a", [1, 2, 3]) == 1
    assert side.counters.gone_chunks == 1
    # the older interface has no word for a part of a job: what came is promoted once more
    assert world.tiering.promotions == (1 if generation == NEW else 2)
    world.close()


def test_media_counts_and_labels(generation: str, tmp_path: Path) -> None:
    locality = {"locality": "LOCAL"}
    world = World(generation, tmp_path, **locality)
    kind = type(world.tier)
    assert world.tier.get_stats() is None
    world.put([1, 2])
    told = world.tier.get_stats().values
    assert told["vllm:tierkv_tier_stored_chunks", ("tierkv",)] == 2
    assert told["vllm:tierkv_tier_chunks", ("tierkv",)] == 2
    assert world.tier.get_stats() is None, "increments are told once"
    defined = kind.build_metric_definitions({"type": "tierkv"})
    assert {name for name, _ in told} <= set(defined)
    assert all(each.labelnames == ("tier",) and each.documentation for each in defined.values())
    assert kind.medium is (None if generation == OLD else Medium.STORAGE)
    assert (world.tier.locality is None) == (generation == OLD)
    world.close()


def test_unknown_settings_of_the_tier_are_refused(generation: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'load_deadline'"):
        load("TierKVTier")(
            offloading_spec=spec_of(generation),
            primary_kv_view=np.zeros((4, ROW), np.int8).data,
            tier_type="tierkv",
            load_dedline=3,
        )


def test_the_tables_of_vllm_get_names(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, str]] = []

    def table(name: str, module: str, kind: str) -> None:
        if any(name == each[0] for each in told):
            raise ValueError("registered")
        told.append((name, module, kind))

    tiers = ModuleType("vllm.v1.kv_offload.tiering.factory")
    vars(tiers)["SecondaryTierFactory"] = SimpleNamespace(register_tier=table)
    monkeypatch.setitem(sys.modules, tiers.__name__, tiers)
    if generation == NEW:
        policies = ModuleType("vllm.v1.kv_offload.cpu.policies.factory")
        vars(policies)["CachePolicyFactory"] = SimpleNamespace(register_cache_policy=table)
        monkeypatch.setitem(sys.modules, policies.__name__, policies)
    for _ in range(2):
        load("register")()
    assert ("tierkv", "tierkv_adapters.vllm.tier", "TierKVTier") in told
    assert len(told) == 1 + (len(names("policies")) if generation == NEW else 0)
    for _, module, kind in told:
        assert getattr(importlib.import_module(module), kind).__init__


def test_policies_by_name(generation: str) -> None:
    module = importlib.import_module("tierkv_adapters.vllm.tier.policies")
    for name in names("policies"):
        made = getattr(module, name)(cache_capacity=8)
        assert isinstance(made, module.TierKVCachePolicy)
        assert getattr(module, name) is type(made)
        drive(made, generation, random.Random(name))
    with pytest.raises(AttributeError, match="lrfu"):
        _ = module.no_such_policy
    assert isinstance(load("TierKVCachePolicy")(8), module.TierKVCachePolicy)


def drive(policy: Any, generation: str, dice: random.Random) -> None:
    """Requests over a CPU tier of eight chunks, as vLLM's manager calls a policy."""
    present: dict[bytes, Any] = {}
    for turn in range(40):
        keys = [key(dice.randrange(6) * 10 + n) for n in range(dice.randrange(1, 4))]
        context = ReqContext(str(turn), {k: n for n, k in enumerate(keys)})
        there = [k for k in keys if k in present]
        fresh = [k for k in keys if k not in present]
        if generation == OLD:
            policy.touch(keys)
        if len(present) + len(fresh) > 8:
            taken = policy.evict(len(present) + len(fresh) - 8, set(keys))
            assert taken is not None
            for gone, chunk in taken:
                assert present.pop(gone) is chunk
                assert gone not in keys
        for one in fresh:
            present[one] = SimpleNamespace(ref_cnt=-1)
            policy.insert(one, present[one])
        for one in fresh:
            present[one].ref_cnt = 0
            policy.mark_evictable(one)
        if generation == NEW:
            policy.on_request_finished((tuple(keys),), set(fresh), set(there), context)
        assert all(policy.get(k) is chunk for k, chunk in present.items())
        assert policy.get(key(999)) is None
    policy.clear()
    assert all(policy.get(k) is None for k in present)


@pytest.mark.parametrize(
    ("module", "gone", "said"),
    [
        ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager", "no SecondaryTierManager"),
        ("vllm.v1.kv_offload.base", "LookupResult", "no LookupResult"),
        ("vllm.v1.kv_offload.cpu.policies.base", "CachePolicy", "no CachePolicy"),
    ],
)
def test_an_interface_that_is_not_known_is_named(module: str, gone: str, said: str) -> None:
    there = modules(NEW)
    delattr(there[module], gone)
    with pytest.raises(AttachError, match=said) as caught:
        detect(there.__getitem__)
    assert "0.25.1" in str(caught.value)
    assert "0.32.0" in str(caught.value)


def test_without_that_part_of_vllm_the_error_says_so() -> None:
    def find(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    with pytest.raises(AttachError, match=r"no module vllm\.v1\.kv_offload\.base"):
        detect(find)


def test_a_lookup_with_other_signatures_is_named() -> None:
    there = modules(NEW)

    class Other:
        lookup = submit_store = submit_load = get_finished_jobs = drain_jobs = None
        on_new_request = has_pending_work = None

        def __init__(self, spec: Any) -> None:
            pass

    vars(there["vllm.v1.kv_offload.tiering.base"])["SecondaryTierManager"] = Other
    with pytest.raises(AttachError, match="takes no offloading_spec"):
        detect(there.__getitem__)
