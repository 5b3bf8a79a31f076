"""What a connector did wrong, by rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RULES", "EngineEnded", "Violation"]

RULES: Final = {
    "hook-raised": "no exception leaves a hook once the engine has started",
    "hook-result": "a hook answers with what its signature says",
    "signature": "every hook takes what the engine passes, and none is missing",
    "offer-shape": "an offer is (tokens >= 0, bool); nothing is never loaded asynchronously",
    "offer-partial": "an offer begins and ends at block borders",
    "offer-too-long": "an offer leaves one token to compute, counted behind what is computed",
    "io-in-match": "matching does no I/O and waits for nobody: the engine's block tree is locked",
    "match-cost": "matching costs a small, constant amount of work a block",
    "meta-pickle": "metadata survives pickling: ranks are other processes",
    "load-incomplete": "a load that was reported finished is in place, on the rank that says so",
    "kv-wrong": "when a layer runs, the KV before its tokens is that of the request's own prefix",
    "free-written": "nothing is written into pages that belong to no request",
    "last-page-written": "page -1 means no page, not the pool's last one",
    "id-foreign": "get_finished returns ids that it was given",
    "id-repeated": "get_finished returns an id once",
    "never-finished": "every load and save that was announced is reported in the end",
    "ranks-apart": "ranks that end the engine raise at the same call: the others wait for them",
    "pages-lost": "every page comes back once all requests and their saves are over",
}
"""Every rule that the driver enforces, by the name that a :class:`Violation` carries."""


class EngineEnded(Exception):
    """A connector ended the engine, on all ranks at once, with an error that it has for that.

    Attributes:
        errors: What each rank raised.
    """

    def __init__(self, errors: Sequence[Exception]) -> None:
        super().__init__(str(errors[0]))
        self.errors = tuple(errors)


class Violation(AssertionError):
    """A connector broke one of the rules that TensorRT-LLM has for connectors.

    Attributes:
        rule: Key into :data:`RULES`.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what} ({RULES[rule]})")
        self.rule = rule
