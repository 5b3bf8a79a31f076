"""The ``nvme`` tier: frames in preallocated segment files on a local disk."""

from tierkv_backends.nvme.backend import NvmeBackend

__all__ = ["NvmeBackend"]
