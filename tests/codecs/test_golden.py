"""Bytes that were written once are read for ever, by a fresh process.

``tests/data/codecs_v1.json`` holds one encoding a codec and tensor with the bits that it decodes
to. When a codec's format changes on purpose, it needs a new name, not a new file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tierkv import registry

GOLDEN = Path(__file__).parents[1] / "data" / "codecs_v1.json"

DECODE = """
import json, sys
import torch
from tierkv import registry
from tierkv.chains import Chain, stored_chain
from tierkv_codecs.lowrank import LowRank
found = []
for row in json.load(open(sys.argv[1])):
    named = row["chain"] in registry.names("codecs")
    chain = stored_chain(row["chain"]) if named else Chain(packer=LowRank())
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


def test_f034_a_fresh_process_decodes_every_codec() -> None:
    rows = json.loads(GOLDEN.read_text())
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(GOLDEN)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row, found in zip(rows, json.loads(done.stdout), strict=True):
        assert found == row["decoded"], f"{row['chain']}, {row['tensor']}"


def test_every_codec_has_golden_bytes() -> None:
    known = {row["chain"] for row in json.loads(GOLDEN.read_text())}
    assert known == set(registry.names("codecs"))
