"""The only door to threads and tasks: the engine's runner, its jobs, and worker threads.

Two facts of asyncio shape this module. A thread goes on after the task that awaits it was
cancelled, and an anyio shield does not stop ``task.cancel()``. So work that must not be cut in
half belongs to the engine's own runner task (:meth:`Workers.spawn`); callers only wait for it and
may be cancelled at any await. And :meth:`Workers.run`, which lets a thread touch the caller's
memory, returns only when the thread is done: it absorbs cancellation and re-raises it afterwards.
"""

from tierkv.workers.lanes import Lane, current_lane, enter_lane
from tierkv.workers.runner import Job, Workers
from tierkv.workers.signals import Signal

__all__ = ["Job", "Lane", "Signal", "Workers", "current_lane", "enter_lane"]
