"""Cancel an operation at each of its suspension points, in turn, in two kinds.

*Scope* cancels an anyio scope around the operation. *Native* calls ``task.cancel()``, which is what
``asyncio.timeout``, ``wait_for`` and most servers do, and which an anyio shield does not stop: it
is the kind that finds the real bugs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator

__all__ = ["KINDS", "CancelKind", "CancelStep", "Stepped", "cancel_at_each_step"]

CancelKind = Literal["native", "scope"]

KINDS: Final[tuple[CancelKind, ...]] = ("scope", "native")


@dataclass(frozen=True, slots=True)
class CancelStep:
    """One run of the operation.

    Attributes:
        kind: How it was cancelled.
        step: Suspension at which it was cancelled, counted from 1.
        outcome: ``"cancelled"``: it ended by the cancellation; ``"swallowed"``: it was cancelled
            and returned nevertheless; ``"completed"``: it ended before that suspension (the last
            run of a kind).
        value: What it returned, if it did.
    """

    kind: CancelKind
    step: int
    outcome: Literal["cancelled", "completed", "swallowed"]
    value: Any = None


class Stepped:
    """Awaitable that drives a coroutine and calls ``on_step(n)`` at its n-th suspension."""

    def __init__(self, work: Coroutine[Any, Any, Any], on_step: Callable[[int], None]) -> None:
        self._work = work
        self._on_step = on_step

    def __await__(self) -> Generator[Any, Any, Any]:
        step = 0
        resume: Callable[[Any], Any] = self._work.send
        argument: Any = None
        while True:
            try:
                waited_for = resume(argument)
            except StopIteration as stop:
                return stop.value
            step += 1
            self._on_step(step)
            try:
                argument = yield waited_for
                resume = self._work.send
            except BaseException as error:  # noqa: BLE001 - goes to the coroutine, as with await
                argument = error
                resume = self._work.throw


async def cancel_at_each_step(
    make: Callable[[], Awaitable[Any]],
    kinds: tuple[CancelKind, ...] = KINDS,
    *,
    limit: int = 1000,
) -> AsyncIterator[CancelStep]:
    """Run ``make()`` again and again, cancelled at its 1st, 2nd, ... suspension.

    Check the invariants in the loop body; state is whatever the cancelled run left::

        async for run in cancel_at_each_step(lambda: store.put(key, value)):
            assert store.reserved_bytes == 0, run

    Only the operation's own suspensions count; tasks that it starts are reached through their
    scope. A run may absorb its cancellation and return: see :attr:`CancelStep.outcome`.

    Args:
        make: Returns a fresh awaitable each time; prepares its own state.
        kinds: Which kinds of cancellation, in order.
        limit: Most steps of one kind.

    Yields:
        One record a run; the last of each kind is ``"completed"``.

    Raises:
        AssertionError: if the operation is still suspended after ``limit`` steps, so that it is
            not known to end.
    """
    for kind in kinds:
        for step in range(1, limit + 1):
            run = await (_scope(make, step) if kind == "scope" else _native(make, step))
            yield run
            if run.outcome == "completed":
                break
        else:
            raise AssertionError(f"{kind}: not completed within {limit} suspensions")


async def _as_coroutine(make: Callable[[], Awaitable[Any]]) -> Any:
    return await make()


async def _scope(make: Callable[[], Awaitable[Any]], step: int) -> CancelStep:
    fired, value, returned = False, None, False
    with anyio.CancelScope() as scope:

        def on_step(at: int) -> None:
            nonlocal fired
            if at == step:
                fired = True
                scope.cancel()

        value = await Stepped(_as_coroutine(make), on_step)
        returned = True
    if not fired:
        return CancelStep("scope", step, "completed", value)
    return CancelStep("scope", step, "swallowed" if returned else "cancelled", value)


async def _native(make: Callable[[], Awaitable[Any]], step: int) -> CancelStep:
    fired = False

    def on_step(at: int) -> None:
        nonlocal fired
        if at == step:
            fired = True
            task.cancel()

    async def drive() -> Any:
        return await Stepped(_as_coroutine(make), on_step)

    # a task of its own, as a server gives each request: only a task can be cancelled natively
    task = asyncio.create_task(drive())  # noqa: TID251
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()  # does nothing unless this wait itself was cancelled
    if task.cancelled():
        return CancelStep("native", step, "cancelled")
    return CancelStep("native", step, "swallowed" if fired else "completed", task.result())
