"""What the report does: chain after chain, on the KV of one model and text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.console import Console

from tierkv.chains import parse_chains
from tierkv.errors import ConfigError
from tierkv_adapters.hf.compat import text_config
from tierkv_adapters.hf.demo.loading import find_model, load_model
from tierkv_adapters.hf.probe import check_supported
from tierkv_adapters.hf.report.allocation import allocate
from tierkv_adapters.hf.report.fidelity import Subject, default_text
from tierkv_adapters.hf.report.rows import Row, measure, recommend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.status import Status

    from tierkv_adapters.hf.report.choices import Wanted

__all__ = ["run", "subject_of"]


def run(
    wanted: Wanted, chains: Sequence[str], bound: float, *, allocation: bool
) -> tuple[list[Row], Row | None]:
    """Measure chains; what is done is told on stderr.

    Args:
        wanted: What they are judged by.
        chains: The chains.
        bound: Most KL of the recommended one.
        allocation: Also look for a chain for each layer and tensor.

    Returns:
        A row a chain, and another one where the first block was kept exact; the recommended one.

    Raises:
        ConfigError: if there is no such chain, or as :func:`subject_of`.
    """
    lossless = {name: parse_chains(name).lossless for name in chains}  # wrong names fail at once
    log = Console(stderr=True)
    subject = subject_of(wanted)
    dtype = getattr(torch, wanted.dtype)
    pairs = [(k.to(dtype), v.to(dtype)) for k, v in subject.kv]
    rows: list[Row] = []
    with log.status("measuring") as status:
        for number, name in enumerate(chains, 1):
            _tell(log, status, f"{number} of {len(chains)}: {name}")
            rows.append(measure(pairs, name, subject=subject))
            if not lossless[name]:
                rows.append(measure(pairs, name, subject=subject, exact_first=1, timed=False))
        if allocation:
            _tell(log, status, "looking for a chain for each layer and tensor")
            found = allocate(pairs, subject, bound)
            rows += [] if found is None else [found]
    return rows, recommend(rows, bound)


def _tell(log: Console, status: Status, what: str) -> None:
    status.update(what)
    if not log.is_terminal:  # where no line can move, each step has one
        log.print(what)


def subject_of(wanted: Wanted) -> Subject:
    """A model and a text to judge chains by.

    Raises:
        ConfigError: if the model cannot be loaded, or the text cannot be read or is too short.
        MissingDependencyError: if the model's weights cannot be fetched.
    """
    source = default_text() if wanted.text is None else _text(wanted.text)
    live, tokenizer = load_model(find_model(wanted.model))
    check_supported(live)
    needed = wanted.prefix + wanted.scored
    limit = getattr(text_config(live), "max_position_embeddings", None)
    if limit is not None and limit < needed:
        raise ConfigError(
            f"--prefix and --scored are {needed} tokens together, the model's context has {limit}: "
            "choose smaller ones"
        )
    # four characters a token and more: no tokenizer has to read all of a long text
    ids = tokenizer(source[: 16 * needed])["input_ids"][:needed]
    if len(ids) < needed:
        raise ConfigError(
            f"the text has {len(ids)} tokens, {needed} are needed: give a longer --text, or "
            "smaller --prefix and --scored"
        )
    return Subject(live, ids, wanted.prefix)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {path} is no text in UTF-8") from error
