"""The ``device`` tier: frames in the memory of an accelerator."""

from tierkv_backends.device.backend import DeviceBackend

__all__ = ["DeviceBackend"]
