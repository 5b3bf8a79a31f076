"""Whose KV it is: the spaces and replicas of tiers under vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.tier_rig import ROW
from tests.serving.tier_specs import NEW, OLD, WEIGHTS, Excerpt, Parallel, spec_of, whole
from tierkv.errors import AttachError
from tierkv_adapters.vllm.tier.facts import replica_of, tier_space
from tierkv_adapters.vllm.tier.settings import TierSettings


def test_spaces_tell_models_apart() -> None:
    spec, settings = spec_of(NEW), TierSettings.parse(WEIGHTS)

    def made(vllm_config: Any) -> bytes:
        return tier_space(spec, ROW, settings).fingerprint  # finds the configuration up the stack

    assert made(whole()) == made(whole())
    assert made(whole()) != made(whole(hf={"rope": 2})), "an override of the model's configuration"
    assert made(whole()) != tier_space(spec, 2 * ROW, settings).fingerprint
    other = SimpleNamespace(config=Excerpt(kv_cache_layout="LBNHC"), tokens_per_block=(128,))
    assert (
        tier_space(spec, ROW, settings).fingerprint != tier_space(other, ROW, settings).fingerprint
    )
    named = TierSettings.parse(WEIGHTS | {"identity": {"kernel": "patched"}})
    assert tier_space(spec, ROW, settings).fingerprint != tier_space(spec, ROW, named).fingerprint


def test_engines_of_one_model_share_their_space() -> None:
    settings = TierSettings.parse(WEIGHTS)
    first = SimpleNamespace(config=Excerpt(engine_id="a", parallel=Parallel(data_parallel_size=2)))
    second = SimpleNamespace(
        config=Excerpt(
            engine_id="b", parallel=Parallel(data_parallel_index=1, data_parallel_size=2)
        )
    )
    assert (
        tier_space(first, ROW, settings).fingerprint
        == tier_space(second, ROW, settings).fingerprint
    )
    assert [(r.number, r.replicas) for r in map(replica_of, (first, second))] == [(0, 2), (1, 2)]
    old = replica_of(spec_of(OLD))
    assert (old.number, old.replicas) == (1, 2)


def test_lora_is_not_shared_between_processes_unless_its_paths_are_stable() -> None:
    spec = spec_of(NEW)

    def made(vllm_config: Any, **more: Any) -> bytes:
        return tier_space(spec, ROW, TierSettings.parse(WEIGHTS | more)).fingerprint

    assert made(whole(lora=object())) != made(whole(lora=object()))
    stable = {"lora_paths_are_stable": True}
    assert made(whole(lora=object()), **stable) == made(whole(lora=object()), **stable)


def test_weights_that_nobody_can_tell_apart_are_refused() -> None:
    with pytest.raises(AttachError, match='"weights"'):
        tier_space(spec_of(NEW), ROW, TierSettings.parse({}))
