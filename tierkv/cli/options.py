"""Options of the commands that read workload traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from tierkv.registry import factory
from tierkv.replay import CostModel
from tierkv.traces import BYTES_PER_TOKEN, FORMATS, Trace, open_trace
from tierkv.units import parse_bytes

__all__ = [
    "DEFAULT_BYTES",
    "Bandwidth",
    "BlockTokens",
    "BytesPerToken",
    "File",
    "Format",
    "Json",
    "Prefill",
    "cost_model",
    "opened",
    "policies_of",
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Format = Annotated[
    str | None, typer.Option("--format", help=f"Format ({', '.join(FORMATS)}) if not told by FILE.")
]
BlockTokens = Annotated[
    int | None, typer.Option("--block-tokens", help="Tokens a block, for azure and weka traces.")
]
BytesPerToken = Annotated[
    str, typer.Option("--bytes-per-token", help="Bytes of KV a token, if FILE does not tell.")
]
File = Annotated[Path, typer.Argument(help="Trace file of any known format.", show_default=False)]
Bandwidth = Annotated[str, typer.Option(help="Bytes a second out of slower tiers.")]
Prefill = Annotated[float, typer.Option(help="Tokens a second that are computed.", min=0)]

DEFAULT_BYTES: Final = str(BYTES_PER_TOKEN)


def opened(path: Path, form: str | None, block: int | None, per_token: str) -> Trace:
    """The trace that these options name.

    Raises:
        ConfigError: if ``--bytes-per-token`` is no size.
        TraceError: if the file cannot be read, or not as that.
    """
    size = parse_bytes(per_token, of="--bytes-per-token")
    return open_trace(path, form=form, block_tokens=block, bytes_per_token=size)


def cost_model(bandwidth: str, prefill: float, *, overlap: bool = True) -> CostModel:
    """What takes time, as these options say.

    Raises:
        ConfigError: if one of them is no speed.
    """
    rate = parse_bytes(bandwidth, of="--bandwidth")
    return CostModel(bandwidth=float(rate), prefill=prefill, overlap=overlap)


def policies_of(text: str) -> list[str]:
    """Names of policies, each once; refused here, and not after the first of many replays.

    Raises:
        ConfigError: if there is no such policy.
    """
    found = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        factory("policies", name)
    return found
