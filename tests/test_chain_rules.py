"""Chains of their own for layers and tensors, from the text to stored frames."""

from __future__ import annotations

from tierkv.chains import parse_chain
from tierkv.layout import Layout, Space
from tierkv.pipeline import Pipeline, deliver
from tierkv.testing.parts import memory_for, new_frame, one_layer, opened, read


def stored(text: str) -> dict[tuple[int, str], str]:
    """Chain of each section of a frame of three layers, after a round trip."""
    space = Space(one_layer("float32").identity, Layout.uniform(3, 2, 32, "bfloat16"), 16)
    source, target = memory_for(space.layout, 16, 1), memory_for(space.layout, 16, None)
    frame, _, label = new_frame(Pipeline(space, text), source)
    header = opened(frame, space, label)
    deliver(header, frame, target, 0)
    for key, value in read(target, space.layout, 0, 0, 16).items():
        wanted = read(source, space.layout, 0, 0, 16)[key]
        assert float((value - wanted).abs().max()) < 1.0
        parse_chain({(s.layer, s.tensor): s.chain for s in header.sections}[key])
    return {(s.layer, s.tensor): s.chain for s in header.sections}


def test_keys_and_values_are_stored_by_chains_of_their_own() -> None:
    found = stored("K:int8/token,V:int4/channel")
    assert {chain for (_, tensor), chain in found.items() if tensor == "k"} == {"int8/token"}
    assert {chain for (_, tensor), chain in found.items() if tensor == "v"} == {"int4/channel"}


def test_layers_are_stored_by_chains_of_their_own() -> None:
    found = stored("0-1:K:raw,0:int4,*:int8")
    assert found == {
        (0, "k"): "raw",
        (0, "v"): "int4",
        (1, "k"): "raw",
        (1, "v"): "int8",
        (2, "k"): "int8",
        (2, "v"): "int8",
    }


def test_what_no_rule_is_for_is_raw() -> None:
    assert stored("K:int8") == {
        (layer, tensor): "int8" if tensor == "k" else "raw" for layer in range(3) for tensor in "kv"
    }
