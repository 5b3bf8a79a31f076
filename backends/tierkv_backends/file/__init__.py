"""The ``file`` tier: one file a frame, for directories that several processes and hosts share."""

from tierkv_backends.file.backend import FileBackend

__all__ = ["FileBackend"]
