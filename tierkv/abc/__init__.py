"""The seams: what a backend, a codec, a policy, an observer and a view must do.

Third parties implement these and prove it with the suites of :mod:`tierkv.testing`.
"""

from tierkv.abc.admission import Admission
from tierkv.abc.backends import (
    OK,
    Backend,
    BackendStats,
    Buffer,
    DeviceBuffer,
    IoResult,
    IoStatus,
    MemoryBackend,
    ReadRequest,
    Resident,
    ResidentBackend,
    StoredPart,
    Threads,
    WriteItem,
)
from tierkv.abc.codecs import BytesCodec, TensorBytesCodec, TensorCodec
from tierkv.abc.devices import Device, Event, Move, Stream
from tierkv.abc.direct import DirectBackend, DirectIo
from tierkv.abc.observers import Observer
from tierkv.abc.policies import Policy
from tierkv.abc.predictors import Arrival, Departure, Predictor, Wish
from tierkv.abc.views import MemoryMap, View

__all__ = [
    "OK",
    "Admission",
    "Arrival",
    "Backend",
    "BackendStats",
    "Buffer",
    "BytesCodec",
    "Departure",
    "Device",
    "DeviceBuffer",
    "DirectBackend",
    "DirectIo",
    "Event",
    "IoResult",
    "IoStatus",
    "MemoryBackend",
    "MemoryMap",
    "Move",
    "Observer",
    "Policy",
    "Predictor",
    "ReadRequest",
    "Resident",
    "ResidentBackend",
    "StoredPart",
    "Stream",
    "TensorBytesCodec",
    "TensorCodec",
    "Threads",
    "View",
    "Wish",
    "WriteItem",
]
