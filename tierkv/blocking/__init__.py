"""The synchronous face, for callers that have threads instead of a loop.

The engine runs on a loop in a thread of its own; every call is carried there by a portal. No lock
is held while bytes move: thirty threads on thirty sessions load at once.
"""

from tierkv.blocking.calls import Pending
from tierkv.blocking.manager import CacheManager

__all__ = ["CacheManager", "Pending"]
