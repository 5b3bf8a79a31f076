"""Every error a user of tierkv can meet.

::

    TierKVError
    ├── ConfigError (ValueError)        a setting is unknown, malformed or cannot be honoured
    ├── LayoutError (ValueError)        tensors or token ids do not fit the space's layout
    ├── ClosedError (RuntimeError)      the engine, session or match was closed
    ├── SessionBusyError                a second turn was started on a session set to refuse it
    ├── AttachError                     an adapter cannot serve this model or call
    ├── MissingDependencyError (ImportError)  an optional library is missing (says what to install)
    ├── LoadIncomplete                  a layer-wise load stopped; the view must be dropped
    ├── StoreIncomplete                 a layer-wise store was left with layers missing
    ├── TraceError (ValueError)         a workload trace is malformed (``.path``, ``.line``)
    ├── CodecError                      bytes cannot be encoded or decoded
    │   └── IntegrityError              stored bytes are damaged or belong to something else
    ├── CapacityError                   an item can never fit
    │   └── QuotaExceededError          a tenant's or session's byte quota forbids it
    └── BackendError                    a tier failed (``.tier``, ``.retryable``)
        └── RootLockedError             another process owns this storage root

A miss is never an exception: loads and stores return what happened, block by block.
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "BackendError",
    "CapacityError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "IntegrityError",
    "LayoutError",
    "LoadIncomplete",
    "MissingDependencyError",
    "QuotaExceededError",
    "RootLockedError",
    "SessionBusyError",
    "StoreIncomplete",
    "TierKVError",
    "TraceError",
]


class TierKVError(Exception):
    """Root of every error raised by tierkv."""


class ConfigError(TierKVError, ValueError):
    """A setting is unknown, malformed or cannot be honoured on this machine.

    Attributes:
        setting: Name of the setting in :class:`tierkv.EngineConfig`, where it is just one.
    """

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class LayoutError(TierKVError, ValueError):
    """Tensors, pages or token ids do not fit the layout of the space."""


class ClosedError(TierKVError, RuntimeError):
    """The object was closed and can no longer be used."""


class SessionBusyError(TierKVError):
    """A turn is already running on this session, which refuses a second one."""


class AttachError(TierKVError):
    """An adapter cannot attach to this target, or cannot serve this kind of call."""


class MissingDependencyError(TierKVError, ImportError):
    """An optional library is missing; the message says how to install it."""


class LoadIncomplete(TierKVError):
    """A layer-wise load stopped before its last layer.

    The view has been written in part: drop it and recompute.

    Attributes:
        layer: First layer (model layer number) that is not in place.
    """

    def __init__(self, layer: int, why: str) -> None:
        super().__init__(f"layer {layer} could not be loaded ({why}); drop the view and recompute")
        self.layer = layer


class StoreIncomplete(TierKVError):
    """A layer-wise store was left before every layer had come; nothing was stored.

    Attributes:
        missing: Model layer numbers that never came.
    """

    def __init__(self, missing: tuple[int, ...]) -> None:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        super().__init__(
            f"nothing was stored: layers {shown} never came; call layer() for each layer of the "
            "space, or leave the block with an exception to give up"
        )
        self.missing = missing


class TraceError(TierKVError, ValueError):
    """A workload trace is malformed, cut off, or of no known format.

    Attributes:
        path: The file.
        line: Number of the line, from 1; 0 if it is about the whole file.
    """

    def __init__(self, path: str, line: int, why: str) -> None:
        super().__init__(f"{path}, line {line}: {why}" if line else f"{path}: {why}")
        self.path = path
        self.line = line


class CodecError(TierKVError):
    """A codec cannot encode this input or decode these bytes."""


class IntegrityError(CodecError):
    """Stored bytes are damaged, truncated, or belong to another identity."""


class CapacityError(TierKVError):
    """An item is larger than the space that could ever be made for it."""


class QuotaExceededError(CapacityError):
    """A byte quota of a tenant or a session forbids the operation."""


class BackendError(TierKVError):
    """A tier failed.

    Attributes:
        tier: Name of the tier.
        retryable: Whether the same call may succeed later without operator action.
    """

    def __init__(self, tier: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(f"tier {tier!r}: {message}")
        self.tier = tier
        self.retryable = retryable


class RootLockedError(BackendError):
    """Another process (or engine) owns this storage root."""
