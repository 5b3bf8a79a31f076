"""The scheduler's hooks about one request: what can be loaded, where to, and that it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm.requests import Phase
from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from tierkv.testing.trtllm.allocation import Allocation
    from tierkv.testing.trtllm.hooks import Hooks
    from tierkv.testing.trtllm.modes import Mode
    from tierkv.testing.trtllm.requests import Request

__all__ = ["Asking"]


class Asking:
    """Asks the connector's scheduler side, and checks what it answers."""

    def __init__(self, mode: Mode, hooks: Hooks, scheduler: object, allocation: Allocation) -> None:
        self._mode = mode
        self._hooks = hooks
        self._scheduler = scheduler
        self._allocation = allocation

    def admit(self, request: Request) -> bool:
        """Ask what can be loaded, unless that was asked before, and allocate.

        Returns:
            Whether the request leaves the batch until its load is over.

        Raises:
            Violation: An answer was wrong.
        """
        if request.phase is Phase.WAITING:
            self._ask(request)
        if request.defer and self._mode.api == "second":
            request.defer -= 1
            request.phase = Phase.ASKED
            return False
        self._allocate(request)
        if request.reset and self._mode.api == "second":
            request.reset = False
            self._roll_back(request)
            return False
        if request.asynchronous:
            request.phase = Phase.LOADING
            return True
        request.external = request.honoured
        request.phase = Phase.CONTEXT
        return False

    def cancel(self, request: Request, start: int) -> None:
        """Say that offered tokens from ``start`` on are not wanted (second API)."""
        stop = request.device + request.offered
        if start < stop and self._mode.api == "second":
            self._hooks.optional(self._scheduler, "cancel_load", request.view, start, stop)

    def finished(self, request: Request) -> bool:
        """Say that a request is over; whether its pages are held for its saves.

        Raises:
            Violation: ``hook-result``, or what the hook raises.
        """
        pages = [list(one) for one in request.pages]
        answer = self._by_group("request_finished", request, pages)
        if type(answer) is not bool:
            raise Violation("hook-result", f"request_finished returned {answer!r}, not a bool")
        return answer

    def _ask(self, request: Request) -> None:
        answer = self._hooks.match(self._scheduler, request.view, request.device)
        try:
            count, asynchronous = answer
        except (TypeError, ValueError):
            raise Violation("offer-shape", f"{answer!r} was offered") from None
        if type(count) is not int or type(asynchronous) is not bool or count < 0:
            raise Violation("offer-shape", f"{answer!r} was offered")
        if asynchronous and not count:
            raise Violation("offer-shape", "no tokens are to be loaded asynchronously")
        stop, block = request.device + count, self._mode.tokens_per_block
        where = f"{count} tokens behind {request.device} of {request.told}"
        if count and stop >= request.told:
            raise Violation("offer-too-long", where)
        if count and (stop % block or request.device % block):
            raise Violation("offer-partial", f"{where}, at {block} tokens a block")
        request.offered, request.asynchronous = count, asynchronous
        request.honoured = count
        if request.prompt.honour is not None and self._mode.api == "second":
            request.honoured = min(count, request.prompt.honour // block * block)

    def _allocate(self, request: Request) -> None:
        request.position = request.device + request.honoured
        self.cancel(request, request.position)
        self._allocation.begin(request)
        pages = [list(one) for one in request.pages]
        self._by_group("update_state_after_alloc", request, pages)

    def _roll_back(self, request: Request) -> None:
        # what was clipped before is not offered any more
        request.offered = request.honoured
        self.cancel(request, request.device)
        self._hooks.optional(self._scheduler, "request_reset", request.view)
        self._allocation.release(request, late=True)
        device = request.device
        request.restart()
        request.device = device

    def _by_group(self, name: str, request: Request, pages: list[list[int]]) -> Any:
        # the base class folds a single group back to the flat hook, so that a connector without
        # the other one works where one list says all
        grouped = f"{name}_by_layer_group"
        single = len(pages) == 1 and not hasattr(self._scheduler, grouped)
        if self._mode.grouped and not single:
            return self._hooks.call(self._scheduler, grouped, request.view, pages)
        return self._hooks.call(self._scheduler, name, request.view, pages[0])
