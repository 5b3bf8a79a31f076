"""Conformance suite for TensorRT-LLM connectors.

A connector's test file subclasses it and says how to make the connector::

    class TestMine(ConnectorTests):
        def make(self) -> Connector:
            return Connector(scheduler=MyScheduler, worker=MyWorker)

pytest then runs every check. They use plain asserts and need no fixtures; what they must catch is
shown by :mod:`tierkv.testing.trtllm.mutants`.
"""

from __future__ import annotations

from tierkv.testing.trtllm.suite_copies import LoadTests, SaveTests
from tierkv.testing.trtllm.suite_lives import LifeTests
from tierkv.testing.trtllm.suite_offers import OfferTests

__all__ = ["ConnectorTests"]


class ConnectorTests(OfferTests, LoadTests, SaveTests, LifeTests):
    """What every connector must do, whatever it stores KV in."""
