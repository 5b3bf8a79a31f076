"""The device seam: streams, events, pinned memory and batched copies of accelerators.

``tierkv.device.Devices`` finds the device of a tier or of a caller's tensors; the plug-ins
themselves (``cuda``, ``cpu``) stand behind the registry, kind ``devices``. :func:`fold` is the
checksum that a device can compute itself; :func:`outlast` waits for a device's work to its end.
"""

from tierkv.device.devices import Devices
from tierkv.device.fold import fold, fold_digests, fold_tensors
from tierkv.device.waiting import is_over, outlast

__all__ = ["Devices", "fold", "fold_digests", "fold_tensors", "is_over", "outlast"]
