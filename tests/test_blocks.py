"""Keys: complete, deterministic, injective. Their golden values are fixed for ever."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tierkv.blocks import (
    AdapterId,
    BlockKey,
    Identity,
    KeyChain,
    Media,
    as_token_ids,
    chain_root,
    encode_fields,
    part_id,
    space_fingerprint,
    split_part,
    tail_key,
)
from tierkv.errors import LayoutError
from tierkv.layout import Layout, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

IDENTITY = Identity(
    model="org/model",
    weights="sha256:0123",
    adapters=(AdapterId("style", "v1", 0.5),),
    shard=(1, 4),
    context_policy="sliding-document:4096",
    extra=(("rope", "linear:2"),),
)
SPACE = Space(IDENTITY, Layout.uniform(2, 4, 64, "bfloat16"), block_tokens=16)
MEDIA = (Media(5, b"image-1"),)

GOLDEN = {
    "space": "d24c12834d660f0aa1643c699061e0fd06d3a82edcd933a0b7636e915d6c2eea",
    "root": "3d333832fff2e2aa2a01a5e6a06412aa6cac59acb9226b09bd67e29682e31556",
    "block 0": "7189894d804577a46f036214580fa5a17e80da5da30b1256c3b0ad10f7204649",
    "block 1": "cf2c426b33417605275ad16a0ca6bf79c56158d6422ecd70db8d8623a5255833",
    "with an image": "454eefbe7e1d64bfd106a3543815b328f2afe3a41bf1e718c99369c234920f5a",
    "tail": "7f6207becdaea64293487f53de3b60981cfe22235868f01e770031828820117a",
}


def golden_values() -> dict[str, str]:
    root = SPACE.root("tenant-1", b"salt")
    chain = keys(range(40))
    tail = tail_key(chain[-1], "session-1", b"\x01\x02")
    return {
        "space": SPACE.fingerprint.hex(),
        "root": root.hex(),
        "block 0": chain[0].hex(),
        "block 1": chain[1].hex(),
        "with an image": keys(range(40), media=MEDIA)[0].hex(),
        "tail": tail.hex(),
    }


def keys(
    tokens: Iterable[int],
    space: Space = SPACE,
    tenant: str = "tenant-1",
    salt: bytes = b"salt",
    media: tuple[Media, ...] = (),
) -> list[BlockKey]:
    chain = KeyChain(space.root(tenant, salt), space.block_tokens)
    chain.follow(list(tokens), media)
    return chain.keys


def test_f012_golden_values() -> None:
    assert golden_values() == GOLDEN


def test_f012_golden_values_in_fresh_processes() -> None:
    # three processes with other hash seeds; they get the module by path and import no torch
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('golden', {__file__!r})\n"
        "golden = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(golden)\n"
        "assert 'torch' not in sys.modules\n"
        "print(golden.golden_values() == golden.GOLDEN)\n"
    )
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == "True"


# ------------------------------------------------------------------------- F005-F010, F013


def _other_identities() -> dict[str, Identity]:
    style = IDENTITY.adapters[0]
    return {
        "model": replace(IDENTITY, model="org/model-2"),
        "f008 weights revision": replace(IDENTITY, weights="sha256:0124"),
        "f005 no adapter": replace(IDENTITY, adapters=()),
        "f005 another adapter": replace(IDENTITY, adapters=(replace(style, name="other"),)),
        "f005 a second adapter": replace(IDENTITY, adapters=(style, AdapterId("b", "v1"))),
        "f006 adapter reloaded": replace(IDENTITY, adapters=(replace(style, version="v2"),)),
        "f006 adapter scale": replace(IDENTITY, adapters=(replace(style, scale=1.0),)),
        "rank": replace(IDENTITY, shard=(2, 4)),
        "world size": replace(IDENTITY, shard=(1, 8)),
        "context policy": replace(IDENTITY, context_policy="full"),
        "extra value": replace(IDENTITY, extra=(("rope", "linear:4"),)),
        "extra name": replace(IDENTITY, extra=(("rope2", "linear:2"),)),
        "no extra": replace(IDENTITY, extra=()),
    }


@pytest.mark.parametrize("name", _other_identities())
def test_f005_f006_f008_every_identity_field_flips_the_key(name: str) -> None:
    other = Space(_other_identities()[name], SPACE.layout, SPACE.block_tokens)
    assert not set(keys(range(64))) & set(keys(range(64), other))


def test_f007_dtype_and_f013_layout_flip_the_key() -> None:
    layouts = [
        Layout.uniform(2, 4, 64, "float8_e4m3fn"),
        Layout.uniform(2, 4, 64, "float16"),
        Layout.uniform(2, 2, 128, "bfloat16"),  # as many bytes in another geometry
        Layout.uniform(2, 8, 32, "bfloat16"),
        Layout.uniform(3, 4, 64, "bfloat16"),
    ]
    found = [keys(range(16), Space(IDENTITY, layout, 16))[0] for layout in layouts]
    assert len({*found, keys(range(16))[0]}) == len(layouts) + 1


def test_block_tokens_flip_the_key() -> None:
    assert not set(keys(range(64))) & set(keys(range(64), replace_block(32)))


def replace_block(block_tokens: int) -> Space:
    return Space(SPACE.identity, SPACE.layout, block_tokens)


def test_f009_f010_tenant_and_salt_reach_every_block() -> None:
    mine = set(keys(range(160)))
    assert len(mine) == 10
    for tenant, salt in (("tenant-2", b"salt"), ("tenant-1", b""), ("", b"tenant-1salt")):
        assert not mine & set(keys(range(160), tenant=tenant, salt=salt))


# ------------------------------------------------------------------------- F011, I3


def test_f011_a_hundred_thousand_images_have_as_many_keys() -> None:
    root = SPACE.root()
    found = set()
    for i in range(100_000):
        chain = KeyChain(root, 2)
        chain.follow((7, 7), (Media(0, i.to_bytes(4, "big")),))
        found.add(chain.keys[0])
    assert len(found) == 100_000


def test_f011_same_placeholders_other_image() -> None:
    plain, one = keys([9] * 48), keys([9] * 48, media=(Media(20, b"a"),))
    two, moved = keys([9] * 48, media=(Media(20, b"b"),)), keys([9] * 48, media=(Media(21, b"a"),))
    assert plain[0] == one[0] == two[0] == moved[0], "the block before the image is shared"
    for index in (1, 2):
        assert len({chain[index] for chain in (plain, one, two, moved)}) == 4


def test_media_order_given_does_not_matter() -> None:
    pair = (Media(3, b"x"), Media(20, b"y"))
    assert keys([9] * 48, media=pair) == keys([9] * 48, media=pair[::-1])


def test_key_is_sha256_over_the_whole_prefix() -> None:
    assert len(keys(range(16))[0]) == hashlib.sha256().digest_size
    first, second = keys([1, *range(31)]), keys([2, *range(31)])
    assert first[1] != second[1], "the second block depends on the first"


_fields = st.recursive(
    st.none()
    | st.binary(max_size=4)
    | st.text(max_size=4)
    | st.integers()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@hypothesis.given(st.lists(_fields, max_size=4), st.lists(_fields, max_size=4))
def test_f011_field_encoding_is_injective(left: list[object], right: list[object]) -> None:
    # repr tells apart what == does not: 1, 1.0 and True; 0.0 and -0.0
    same = repr(left) == repr(right)
    assert (encode_fields(*left) == encode_fields(*right)) == same  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("",), ()),
        (("", None), (None, "")),
        ((b"a",), ("a",)),
        ((1,), ("1",)),
        (((1, 2), 3), ((1,), 2, 3)),
        (((),), ()),
        (("é",), ("e\u0301",)),
    ],
)
def test_i3_no_two_field_lists_collide(left: tuple[object, ...], right: tuple[object, ...]) -> None:
    assert encode_fields(*left) != encode_fields(*right)  # type: ignore[arg-type]


def test_tokens_and_media_cannot_be_exchanged() -> None:
    # the media encoding appended to the tokens is another input than media beside the tokens
    root = SPACE.root()
    chain = KeyChain(root, 1)
    chain.follow([1], (Media(0, b"\0" * 4),))
    seen = {chain.keys[0]}
    for tokens in ([1], [1, 0]):
        other = KeyChain(root, len(tokens))
        other.follow(tokens)
        seen.add(other.keys[0])
    assert len(seen) == 3


def test_tail_keys_are_private() -> None:
    parent = keys(range(16))[0]
    mine = tail_key(parent, "session-1", b"\1\0\0\0")
    assert mine != tail_key(parent, "session-2", b"\1\0\0\0")
    assert mine != tail_key(parent, "session-1", b"\1\0\0\0\2\0\0\0")
    assert mine != tail_key(keys(range(1, 17))[0], "session-1", b"\1\0\0\0")


def test_roots_of_spaces_and_tenants_differ() -> None:
    fingerprint = space_fingerprint(IDENTITY, SPACE.layout.fingerprint, 16)
    assert fingerprint == SPACE.fingerprint
    assert chain_root(fingerprint, "a") != chain_root(fingerprint, "", b"a")


# ------------------------------------------------------------------------- parts and chains


@pytest.mark.parametrize("group", [0, 1, 255, 65535])
def test_parts_split_back(group: int) -> None:
    key = keys(range(16))[0]
    assert split_part(part_id(key, group)) == (key, group)


_tokens = st.lists(st.integers(0, 3), max_size=20)


@hypothesis.given(st.lists(_tokens, min_size=1, max_size=5))
def test_a_followed_chain_equals_a_fresh_one(sequences: list[list[int]]) -> None:
    grown = KeyChain(SPACE.root(), 3)
    before: list[int] = []
    for tokens in sequences:
        shared = grown.follow(tokens)
        pairs = zip(before, tokens, strict=False)
        assert shared == next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(tokens))
        )
        fresh = KeyChain(SPACE.root(), 3)
        fresh.follow(tokens)
        assert grown.keys == fresh.keys
        assert grown.tokens == fresh.tokens
        before = tokens


_media = st.lists(
    st.builds(Media, st.integers(0, 11), st.binary(min_size=1, max_size=1)), max_size=3
).map(tuple)


@hypothesis.given(st.lists(st.tuples(st.integers(6, 12), _media), min_size=1, max_size=4))
def test_a_followed_chain_with_media_equals_a_fresh_one(
    steps: list[tuple[int, tuple[Media, ...]]],
) -> None:
    grown = KeyChain(SPACE.root(), 3)
    for length, media in steps:
        grown.follow([9] * length, media)
        fresh = KeyChain(SPACE.root(), 3)
        fresh.follow([9] * length, media)
        assert grown.keys == fresh.keys


def test_a_fork_is_independent() -> None:
    chain = KeyChain(SPACE.root(), 2)
    chain.follow([1, 2, 3, 4])
    twin = chain.fork()
    twin.follow([1, 2, 9, 9])
    assert chain.keys[0] == twin.keys[0]
    assert chain.keys[1] != twin.keys[1]
    assert list(chain.tokens) == [1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5], [None]])
def test_bad_tokens_are_refused_and_change_nothing(tokens: list[object]) -> None:
    chain = KeyChain(SPACE.root(), 1)
    chain.follow([5])
    kept = list(chain.keys)
    with pytest.raises(LayoutError):
        chain.follow([5, *tokens])  # type: ignore[list-item]
    assert chain.keys == kept
    assert list(chain.tokens) == [5]


@pytest.mark.parametrize("value", [{"rope": "yarn"}, {"a", "b"}, object(), b"x".__iter__()])
def test_i3_what_has_no_order_is_refused(value: object) -> None:
    with pytest.raises(LayoutError, match="cannot encode"):
        encode_fields("a", value)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="extra is a tuple"):
        Identity("m", "w", extra=value)  # type: ignore[arg-type]


def test_media_before_the_first_token_are_refused() -> None:
    with pytest.raises(LayoutError, match="token index"):
        Media(-1, b"digest")


@pytest.mark.parametrize(
    "ids", [b"x" * 64, bytearray(4), memoryview(bytes(4)), "abc", None, 3, {1}, {1: 2}, iter([1])]
)
def test_what_is_no_sequence_of_token_ids_is_refused(ids: object) -> None:
    """64 bytes are not 16 tokens."""
    chain = KeyChain(SPACE.root(), 1)
    calls: list[Callable[[Any], object]] = [chain.follow, chain.common_tokens, as_token_ids]
    for call in calls:
        with pytest.raises(LayoutError, match="token ids"):
            call(ids)
    assert not chain.tokens


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("H", ids), lambda _: range(40)])
def test_every_sequence_of_token_ids_gives_the_same_keys(make: Callable[[range], Any]) -> None:
    chain = KeyChain(SPACE.root(), 16)
    chain.follow(make(range(40)))
    twin = KeyChain(SPACE.root(), 16)
    twin.follow(array("I", range(40)))
    assert chain.keys == twin.keys
    assert len(chain.keys) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"model": ""},
        {"model": None},
        {"weights": ""},
        {"weights": b"rev"},
        {"context_policy": ""},
        {"shard": (3, 2)},
        {"shard": (2, 2)},
        {"shard": (-1, 2)},
        {"shard": (0,)},
        {"shard": [0, 1]},
        {"shard": (False, True)},
        {"shard": None},
        {"adapters": ["style"]},
        {"adapters": ("style",)},
        {"adapters": None},
        {"extra": {"rope": "linear"}},
        {"extra": (("rope", 2),)},
        {"extra": ("rope",)},
        {"extra": None},
    ],
)
def test_an_identity_says_everything_or_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=f"identity: {next(iter(options))}"):
        Identity(**{"model": "m", "weights": "r", **options})


def test_an_adapter_says_everything_or_is_refused() -> None:
    rubbish: list[Any] = [("", "v"), ("a", ""), ("a", 1), ("a", "v", "0.5"), ("a", "v", True)]
    for wrong in rubbish:
        with pytest.raises(LayoutError, match="adapter"):
            AdapterId(*wrong)
    assert AdapterId("style", "v1", 1).scale == 1
