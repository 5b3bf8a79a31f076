"""Workload traces: who asked for which blocks, when; no tokens, no text, no decisions.

:func:`open_trace` reads the engine's own recordings and several public formats, and
:func:`write_trace` writes the own one. :mod:`tierkv.replay` runs them through the decisions.
"""

from tierkv.traces.events import BYTES_PER_TOKEN, Trace, TraceHeader, TraceRequest
from tierkv.traces.native import write_trace
from tierkv.traces.opening import FORMATS, open_trace

__all__ = [
    "BYTES_PER_TOKEN",
    "FORMATS",
    "Trace",
    "TraceHeader",
    "TraceRequest",
    "open_trace",
    "write_trace",
]
