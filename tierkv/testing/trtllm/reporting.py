"""What a step's batch looks like in the scheduler's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.testing.trtllm.outputs import (
    FirstOutput,
    FirstRequestData,
    SecondOutput,
    SecondRequestData,
)
from tierkv.testing.trtllm.requests import Phase

if TYPE_CHECKING:
    from tierkv.testing.trtllm.forward import Scheduled
    from tierkv.testing.trtllm.modes import Mode

__all__ = ["output_of"]


def output_of(mode: Mode, batch: list[Scheduled]) -> FirstOutput | SecondOutput:
    """The output of a step: prefill first, each request with what came since it was last in one.

    Tokens that load in this very step are taken off the computed position; those of a load that
    is over are not. While a request decodes, the position is that of the last token that the
    host knows, so under overlap it is one behind.
    """
    output: Any = FirstOutput() if mode.api == "first" else SecondOutput()
    for one in sorted(batch, key=lambda one: one.request.phase is not Phase.CONTEXT):
        data = _data_of(mode, one)
        (output.cached_requests if one.request.reported else output.new_requests).append(data)
        one.request.reported = True
    return output  # type: ignore[no-any-return]


def _data_of(mode: Mode, scheduled: Scheduled) -> FirstRequestData | SecondRequestData:
    request, start, stop = scheduled
    tokens = request.tokens
    fresh = [pages[seen:] for pages, seen in zip(request.pages, request.seen_pages, strict=True)]
    fields = (
        request.id,
        tokens[request.seen_tokens :],
        fresh[0] if len(fresh) == 1 else [],
        start - request.external if request.phase is Phase.CONTEXT else len(tokens) - 1,
        stop - start,
    )
    request.seen_tokens = len(tokens)
    request.seen_pages = [len(pages) for pages in request.pages]
    if mode.api == "first":
        return FirstRequestData(*fields)
    return SecondRequestData(
        *fields,
        cache_salt=request.prompt.salt,
        new_block_ids_by_layer_group=fresh if mode.grouped else [],
    )
