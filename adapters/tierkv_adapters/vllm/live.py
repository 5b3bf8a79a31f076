"""What the scheduler's side keeps of a request while vLLM has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_adapters.vllm.accounts import Account

if TYPE_CHECKING:
    from tierkv_adapters.vllm.asking import Asked
    from tierkv_adapters.vllm.hints import Hinted

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
    """

    __slots__ = ("account", "admitted", "asked", "hinted", "preemptions", "request")

    def __init__(self, request: Any, asked: Asked | None, hinted: Hinted | None) -> None:
        self.request = request
        self.asked = asked
        self.hinted = hinted
        self.account = Account()
        self.admitted = False
        self.preemptions = int(getattr(request, "num_preemptions", 0))
