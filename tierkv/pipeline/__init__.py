"""The pipeline: views to frames and back, through a chain of codecs. Synchronous, thread-safe.

A chain is ``tensor codec* , tensor-to-bytes codec? , bytes codec?`` (the three kinds of the zarr
format), written with plus signs: ``"raw"``, ``"zstd"``, ``"int8"``, ``"int8+zstd"``. Each section
is encoded on its own, says in its table row which codecs were really used, and is stored raw when
its chain does not pay: no section is ever longer than its tensor. Where a codec refuses (NaN,
infinities, a dtype it does not support, the state of a recurrent layer) the section takes the
lossless rest of the chain.

Frames are self-describing: reading one needs no pipeline, only :func:`open_frame`,
:func:`verify` and :func:`deliver`. The big copies release the GIL (memmove, torch, xxhash, zstd,
lz4).

Host memory goes into a frame in one pass (:meth:`Pipeline.encode`). Where a device copies, it is
three steps: :meth:`Pipeline.moves` says what is copied where in a frame of raw sections, the
device does it, and :meth:`Pipeline.seal` makes it a frame; other chains encode from such a copy.
"""

from tierkv.chains import parse_chain, parse_chains
from tierkv.pipeline.coding import Pipeline
from tierkv.pipeline.likeness import Like, Stamp, likeness
from tierkv.pipeline.planning import Encoded, PartLabel
from tierkv.pipeline.raw import TILE
from tierkv.sections import deliver, layer_range, open_frame, verify

__all__ = [
    "TILE",
    "Encoded",
    "Like",
    "PartLabel",
    "Pipeline",
    "Stamp",
    "deliver",
    "layer_range",
    "likeness",
    "open_frame",
    "parse_chain",
    "parse_chains",
    "verify",
]
