"""The engine's loop: what happens in one step, and in what order."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm.allocation import Allocation
from tierkv.testing.trtllm.args import FakeStream
from tierkv.testing.trtllm.asking import Asking
from tierkv.testing.trtllm.forward import Model, Scheduled
from tierkv.testing.trtllm.hooks import Hooks
from tierkv.testing.trtllm.layouts import describe, flat_pool
from tierkv.testing.trtllm.memory import Memory
from tierkv.testing.trtllm.outputs import FirstOutput, SecondOutput
from tierkv.testing.trtllm.reporting import output_of
from tierkv.testing.trtllm.requests import Phase
from tierkv.testing.trtllm.transfers import Transfers
from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from tierkv.testing.trtllm.modes import Mode
    from tierkv.testing.trtllm.requests import Request

__all__ = ["Engine"]

_RUNNING = (Phase.CONTEXT, Phase.DECODE)


class Engine:
    """Steps over a connector that was constructed.

    Attributes:
        mode: How the engine is set up.
        hooks: How often each hook was called, and what it took.
        memory: The pages.
        transfers: Loads and saves under way.
        outputs: What ``build_connector_meta`` was given, in order.
        scheduler: The scheduler's side.
        workers: The ranks' sides.
        active: Requests that are not over, in the order in which they came.
    """

    def __init__(
        self,
        mode: Mode,
        scheduler: object,
        workers: list[object],
        ends: tuple[type[Exception], ...] = (),
    ) -> None:
        """Register the pages with the connector.

        Raises:
            Violation: A hook was wrong.
        """
        self.mode = mode
        self.scheduler = scheduler
        self.workers = workers
        self.hooks = Hooks()
        self.memory = Memory(mode)
        self.transfers = Transfers(self.hooks, workers, ends)
        self.outputs: list[Any] = []
        self.active: list[Request] = []
        self._sampled: list[Request] = []
        self._stream = FakeStream()
        self._allocation = Allocation(mode, self.memory)
        self._model = Model(mode, self.memory, self._allocation)
        self._asking = Asking(mode, self.hooks, scheduler, self._allocation)
        self._register()

    def step(self) -> bool:
        """One turn of the engine's loop.

        Returns:
            Whether anything happened.

        Raises:
            Violation: The connector did something wrong.
        """
        parked = self._admit()
        batch = self._schedule()
        if batch or parked:
            self._tell(output_of(self.mode, batch))
        elif self.mode.empty_meta != "no":
            empty = FirstOutput() if self.mode.api == "first" else SecondOutput()
            self._tell(empty if self.mode.empty_meta == "empty" else None)
        ready, self._sampled = self._sampled, []
        if batch:
            self._forward(batch)
        if not self.mode.overlap:
            ready, self._sampled = self._sampled, []
        self._deliver(ready)
        ended = self.poll()
        return bool(parked or batch or ready or ended)

    def poll(self) -> bool:
        """Ask every rank what is over.

        Returns:
            Whether a transfer came to its end.

        Raises:
            Violation: The connector did something wrong.
        """
        saved, loaded = self.transfers.poll(self._loaded)
        for request in saved:
            self._allocation.release(request)
            if request.phase is Phase.PREEMPTED:
                request.restart()
            else:
                request.phase = Phase.DONE
        for request in loaded:
            if request.phase is Phase.LOADING:
                request.phase = Phase.CONTEXT
                if request.aborted:
                    self._end(request)
        self.memory.check()
        return bool(saved or loaded)

    def abort(self, request: Request) -> None:
        """The user gives a request up, between two steps.

        Where its load is under way the second API waits for that to end; the first ends the
        request at once, and ``request_finished`` must keep its pages.

        Raises:
            Violation: The connector did something wrong.
        """
        if request.over or request.phase is Phase.PREEMPTED:
            return
        request.aborted = True
        if request.phase is Phase.ASKED:
            self._asking.cancel(request, request.device)
        if request.phase is not Phase.LOADING or self.mode.api == "first":
            self._end(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages; it begins anew later (layer groups only).

        Raises:
            Violation: The connector did something wrong.
        """
        if request.phase not in _RUNNING or not self.mode.grouped:
            raise ValueError(f"a request in phase {request.phase.name} cannot be preempted here")
        self._sampled = [r for r in self._sampled if r is not request]
        if self._asking.finished(request):
            request.phase = Phase.PREEMPTED
            self.transfers.save(request)
        else:
            self._allocation.release(request)
            request.restart()

    def _register(self) -> None:
        name = "register_forward_pass_callable"
        self._forward_calls = [self.hooks.call(worker, name) for worker in self.workers]
        for worker, pools in zip(self.workers, self.memory.pools, strict=True):
            if not self.mode.grouped:
                self.hooks.call(worker, "register_kv_caches", flat_pool(pools[0]))
            elif hasattr(worker, "register_kv_cache_layout"):
                self.hooks.call(worker, "register_kv_cache_layout", describe(self.mode, pools))
            else:
                pool = describe(self.mode, pools).as_single_pool_tensor()
                self.hooks.call(worker, "register_kv_caches", pool)
        if self.mode.api == "second":
            self.hooks.optional(self.scheduler, "wait_for_initialization")

    def _admit(self) -> bool:
        parked = False
        for request in self.active:
            if request.phase not in (Phase.WAITING, Phase.ASKED):
                continue
            running = [r for r in self.active if r.phase not in (Phase.WAITING, Phase.ASKED)]
            if not self._allocation.fits(request, running):
                break
            if self._asking.admit(request):
                self.transfers.load(request)
                parked = True
        return parked

    def _schedule(self) -> list[Scheduled]:
        batch = []
        for request in self.active:
            if request.phase not in _RUNNING:
                continue
            stop = request.position + 1
            if request.phase is Phase.CONTEXT:
                stop = min(request.context, request.position + (self.mode.chunk or 1 << 30))
            self._allocation.slide(request)
            if self._make_room(request, stop):
                self._allocation.cover(request, stop)
                batch.append(Scheduled(request, request.position, stop))
        return [one for one in batch if one.request.phase in _RUNNING]

    def _make_room(self, request: Request, stop: int) -> bool:
        while not self._allocation.room_for(request, stop):
            running = [r for r in self.active if r.phase in _RUNNING]
            self.preempt(running[-1])
            if running[-1] is request:
                return False
        return request.phase in _RUNNING

    def _tell(self, output: Any) -> None:
        self.outputs.append(copy.deepcopy(output))
        meta = self.hooks.call(self.scheduler, "build_connector_meta", output)
        try:
            message = pickle.dumps(meta)
        except Exception as error:
            raise Violation("meta-pickle", f"{type(meta).__name__}: {error!r}") from error
        for worker in self.workers:
            self.hooks.call(worker, "bind_connector_meta", pickle.loads(message))
        self.memory.spoil_taken()
        for request in self.active:
            if not request.placed and request.pages[0]:
                self._model.place(request, request.device)
                request.placed = True
        for worker in self.workers:
            self.hooks.call(worker, "start_load_kv", self._stream)

    def _forward(self, batch: list[Scheduled]) -> None:
        hooked = not self.mode.cuda_graphs or any(s.stop < s.request.context for s in batch)
        hooked = hooked or any(s.request.phase is Phase.CONTEXT for s in batch)
        for layer in range(self.mode.layers):
            if hooked:
                self._each("wait_for_layer_load", layer, self._stream)
            self._model.run_layer(layer, batch)
            if hooked:
                self._each("save_kv_layer", layer, self._stream)
        for call in self._forward_calls:
            if call is not None:
                self.hooks.run("forward_pass_callable", call)
        self._each("wait_for_save", self._stream)
        for request, _, stop in batch:
            request.position, request.external = stop, 0
            if request.phase is Phase.CONTEXT and stop < request.context:
                continue
            request.sequence.extend([request.sequence.sample()])
            made = len(request.sequence.tokens) - len(request.prompt.tokens)
            last = made == request.prompt.max_tokens
            request.phase = Phase.LAST if last else Phase.DECODE
            self._sampled.append(request)

    def _each(self, name: str, *args: Any) -> None:
        for worker in self.workers:
            self.hooks.call(worker, name, *args)

    def _deliver(self, ready: list[Request]) -> None:
        for request in ready:
            if request.over:
                continue
            request.told += 1
            made = request.told - len(request.prompt.tokens)
            if made in (request.prompt.max_tokens, request.prompt.eos_after):
                self._end(request)

    def _end(self, request: Request) -> None:
        self.active.remove(request)
        if self._asking.finished(request):
            request.phase = Phase.SAVING
            self.transfers.save(request)
        else:
            self._allocation.release(request)
            request.phase = Phase.DONE

    def _loaded(self, rank: int, request: Request) -> None:
        if request.phase is Phase.LOADING:
            self._model.expect_loaded(rank, request)
