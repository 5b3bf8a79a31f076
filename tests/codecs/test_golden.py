"""Bytes that were written once are read for ever, by a fresh process.

``tests/data/codecs_v1.json`` holds one encoding a codec and tensor with the bits that it decodes
to. When a codec's format changes on purpose, it needs a new name, not a new file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv import registry

GOLDEN = Path(__file__).parents[1] / "data" / "codecs_v1.json"

DECODE = """
import json, sys
import torch
from tierkv.chains import stored_chain
found = []
for row in json.load(open(sys.argv[1])):
    chain = stored_chain(row["chain"])
    data = memoryview(bytes.fromhex(row["encoded"]))
    into = torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]))
    bits = memoryview(into.view(torch.uint8).numpy()).cast("B")
    if chain.squeezer is not None:
        chain.squeezer.decode(data, bits)
    elif chain.packer is not None:
        chain.packer.decode(data, row["tensor"], into)
    else:
        bits[:] = data
    found.append(bytes(bits).hex())
print(json.dumps(found))
"""


@pytest.mark.parametrize("fast", ["0", "1"], ids=["torch", "whatever is installed"])
def test_f034_a_fresh_process_decodes_every_codec(fast: str) -> None:
    rows = json.loads(GOLDEN.read_text())
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(GOLDEN)],
        env=os.environ | {"PYTHONPATH": path, "TIERKV_FAST": fast},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row, found in zip(rows, json.loads(done.stdout), strict=True):
        assert found == row["decoded"], f"{row['chain']}, {row['tensor']}"


def test_every_codec_has_golden_bytes() -> None:
    known = {row["chain"] for row in json.loads(GOLDEN.read_text())}
    names = registry.names("codecs")
    grouped = {name for name in names if has_groupings(name)}
    assert {"int4", "int8", "rot3"} <= grouped
    assert known == {*names, *(f"{name}/{way}" for name in grouped for way in ("channel", "token"))}


def has_groupings(name: str) -> bool:
    kind = registry.resolve("codecs", name)
    return "grouping" in {field.name for field in dataclasses.fields(kind)}


def test_planes_have_golden_bytes_of_both_kinds() -> None:
    rows = [row for row in json.loads(GOLDEN.read_text()) if row["chain"] == "planes"]
    assert {int(row["encoded"][:2], 16) for row in rows} == {2, 2 | 0x40}
