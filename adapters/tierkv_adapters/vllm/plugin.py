"""Makes the connector known to vLLM by name, in each of its processes."""

from __future__ import annotations

import importlib
import logging

__all__ = ["CONNECTOR", "MODULE", "register"]

CONNECTOR = "TierKVConnector"
MODULE = "tierkv_adapters.vllm.connector"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the connector; vLLM calls it through the entry point ``vllm.general_plugins``.

    Idempotent: vLLM may run its plug-ins several times in one process. A vLLM that has no
    connectors of this kind is told in the log, and is otherwise left alone: the plug-in runs in
    every vLLM on the machine, also in those that do not use it.
    """
    try:
        module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        factory = module.KVConnectorFactory
    except (ImportError, AttributeError) as error:
        _log.warning("%s is not registered: this vLLM has no connectors (%s)", CONNECTOR, error)
        return
    try:
        factory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:  # it is registered: this is the second run
        _log.debug("%s is registered already", CONNECTOR)
