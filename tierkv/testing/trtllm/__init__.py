"""A driver for TensorRT-LLM connectors, with neither TensorRT-LLM nor a GPU.

=============================================  ===================================================
:class:`~tierkv.testing.trtllm.replay.Replay`  an engine in TensorRT-LLM's order of calls, whose KV
                                               is a hash of the tokens before
:mod:`tierkv.testing.trtllm.suite`             ``ConnectorTests``: what every connector must do
:mod:`tierkv.testing.trtllm.signatures`        what both API generations call, recorded; compared
                                               with classes, or with an installed copy that is not
                                               imported
:mod:`tierkv.testing.trtllm.reference`         a small connector that is right
:mod:`tierkv.testing.trtllm.mutants`           connectors that are wrong, each in one way
=============================================  ===================================================
"""

from __future__ import annotations

from tierkv.testing.trtllm.args import FakeLlmArgs
from tierkv.testing.trtllm.connector import Connector
from tierkv.testing.trtllm.modes import MODES, Mode
from tierkv.testing.trtllm.replay import Replay
from tierkv.testing.trtllm.requests import Item, Prompt, Request
from tierkv.testing.trtllm.violations import RULES, EngineEnded, Violation

__all__ = [
    "MODES",
    "RULES",
    "Connector",
    "EngineEnded",
    "FakeLlmArgs",
    "Item",
    "Mode",
    "Prompt",
    "Replay",
    "Request",
    "Violation",
]
