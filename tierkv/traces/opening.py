"""Opening a trace file of whatever format."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import TraceError
from tierkv.traces import azure, chatlog, magagent, mooncake, weka
from tierkv.traces.events import BYTES_PER_TOKEN, Trace, TraceHeader
from tierkv.traces.lines import first_line, wrong_as
from tierkv.traces.native import MARK, read_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierkv.traces.events import TraceRequest

__all__ = ["FORMATS", "open_trace"]

FORMATS: Final = ("azure", "chat", "magagent", "mooncake", "tierkv", "weka")
"""Names of the formats that :func:`open_trace` reads."""

_ORIGINS: Final = {
    "azure": "Azure LLM inference trace (lengths only)",
    "chat": "chat log, blocks of 256 bytes of text",
    "magagent": "LMCache agent trace",
    "mooncake": "Mooncake FAST'25 trace",
    "weka": "WEKA agent sessions",
}


def open_trace(
    path: str | os.PathLike[str],
    *,
    form: str | None = None,
    block_tokens: int | None = None,
    bytes_per_token: int = BYTES_PER_TOKEN,
    hours: float = 24.0,
    seed: int = 0,
) -> Trace:
    """Open a trace file; plain, or compressed with zstd or gzip.

    Args:
        path: The file.
        form: One of :data:`FORMATS`; None finds out from the first line.
        block_tokens: Tokens of a block, where the format leaves it open: ``azure`` (any, 64 by
            default) and ``weka`` (a multiple of 64).
        bytes_per_token: Bytes of KV of one token, where the format does not tell.
        hours: ``weka``: hours over which the sessions begin.
        seed: ``weka``: of the drawing of those times.

    Returns:
        The trace; each iteration reads the file again, and raises TraceError where it is damaged.

    Raises:
        TraceError: if the file cannot be read, is of no known format, or cannot have such blocks.
    """
    name = os.fspath(path)
    form = _detect(name) if form is None else form
    if form not in FORMATS:
        raise TraceError(name, 0, f"no such format: {form!r} (one of {', '.join(FORMATS)})")
    if bytes_per_token < 1:
        raise TraceError(name, 0, f"a token cannot have {bytes_per_token} bytes")
    if form == "tierkv":
        trace = read_native(name)
        _fits(name, form, block_tokens, trace.header.block_tokens)
        if not trace.header.bytes_per_token:
            with wrong_as(name, 0, "a trace of such blocks"):
                trace.header = replace(trace.header, bytes_per_token=bytes_per_token)
        return trace
    read: Callable[[], Iterator[TraceRequest]]
    if form == "azure":
        size = azure_size = 64 if block_tokens is None else block_tokens
        if azure_size < 1:
            raise TraceError(name, 0, f"a block cannot hold {azure_size} tokens")
        read = partial(azure.read_azure, name, size)
    elif form == "weka":
        size = weka.BLOCK_TOKENS if block_tokens is None else block_tokens
        read = partial(weka.read_weka, name, size, hours, seed)
    else:
        fixed: dict[str, tuple[int, Any]] = {
            "chat": (chatlog.BLOCK_TOKENS, chatlog.read_chat_log),
            "magagent": (magagent.BLOCK_TOKENS, magagent.read_magagent),
            "mooncake": (mooncake.BLOCK_TOKENS, mooncake.read_mooncake),
        }
        size, reader = fixed[form]
        _fits(name, form, block_tokens, size)
        read = partial(reader, name)
    with wrong_as(name, 0, "a trace of such blocks"):
        header = TraceHeader(size, bytes_per_token, f"{_ORIGINS[form]}: {name}")
    return Trace(header, read)


def _fits(path: str, form: str, wanted: int | None, size: int) -> None:
    if wanted is not None and wanted != size:
        raise TraceError(path, 0, f"{form}: its blocks hold {size} tokens, not {wanted}")


def _detect(path: str) -> str:
    line = first_line(path)
    if line.startswith(azure.HEADER):
        return "azure"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    found = _form_of(row) if isinstance(row, dict) else None
    if found is None:
        known = ", ".join(FORMATS)
        raise TraceError(path, 1, f"of no known format ({known}): {line[:60]!r}")
    return found


def _form_of(row: dict[str, Any]) -> str | None:
    if MARK in row:
        return "tierkv"
    if "hash_ids" in row and "timestamp" in row:
        return "mooncake"
    if "hash_ids" in row and "in_chars" in row:
        return "magagent"
    if "requests" in row and "hash_id_scope" in row:
        return "weka"
    inner = [row[key] for key in ("body", "request") if isinstance(row.get(key), dict)]
    return "chat" if any("messages" in part for part in [row, *inner]) else None
