"""A serving engine in small, to test connectors with: vLLM's order of calls over pages of known KV.

:class:`Replay` drives any pair of connector sides through what vLLM 0.32 does: chunked prefill,
prefix hits in its own pages, asynchronous loads, preemption and resumption, aborts, overlapping
steps, speculative tokens, several page groups and ranks. The KV of a token is a hash of its whole
prefix, salt, adapter and media; pages that change hands are poisoned; every forward pass checks
what it reads. A connector that is wrong anywhere raises :class:`Violation`.

:class:`ServingTests` is the conformance suite for a connector; :data:`MUTANTS` shows what it
catches. Needs no vLLM, no torch.
"""

from tierkv.testing.serving.content import Memory, Truth
from tierkv.testing.serving.mutants import MUTANTS, Mutant
from tierkv.testing.serving.objects import (
    Feature,
    GroupSpec,
    Lora,
    Mode,
    Place,
    Prompt,
    Request,
    TransferResults,
    Violation,
)
from tierkv.testing.serving.reference import make_reference
from tierkv.testing.serving.replay import Replay
from tierkv.testing.serving.storms import Storm
from tierkv.testing.serving.suite import ServingTests, scarce

__all__ = [
    "MUTANTS",
    "Feature",
    "GroupSpec",
    "Lora",
    "Memory",
    "Mode",
    "Mutant",
    "Place",
    "Prompt",
    "Replay",
    "Request",
    "ServingTests",
    "Storm",
    "TransferResults",
    "Truth",
    "Violation",
    "make_reference",
    "scarce",
]
