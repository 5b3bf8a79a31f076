"""What the scheduler's side keeps of a request while vLLM has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_adapters.vllm.scheduling.accounts import Account

if TYPE_CHECKING:
    from tierkv_adapters.vllm.scheduling.asking import Asked
    from tierkv_adapters.vllm.scheduling.hints import Hinted

__all__ = ["Live"]


class Live:
    """A request that vLLM has not finished.

    Attributes:
        request: vLLM's object; read only.
        admitted: Whether the planner knows it.
        preemptions: Of how many preemptions the planner knows.
        asked: What it wishes; None: it could not be read.
        hinted: What it hints at, or None.
        account: What came of its prompt.
        era: Since which reset its KV is computed; with the weights of then, as far as is known.
    """

    __slots__ = ("account", "admitted", "asked", "era", "hinted", "preemptions", "request")

    def __init__(
        self, request: Any, asked: Asked | None, hinted: Hinted | None, era: bytes = b""
    ) -> None:
        self.request = request
        self.era = era
        self.asked = asked
        self.hinted = hinted
        self.account = Account()
        self.admitted = False
        self.preemptions = int(getattr(request, "num_preemptions", 0))
