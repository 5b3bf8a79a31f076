"""What tierkv logs, among vLLM's lines: shown by vLLM's handlers, unless others show it."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING

from tierkv_adapters.vllm.logs import LOGGERS, show_logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def as_in_vllm() -> Iterator[io.StringIO]:
    """A process as vLLM sets it up: one handler, at ``vllm``, and none at the root."""
    root, names = logging.getLogger(), (*LOGGERS, "vllm")
    before = (
        root.handlers[:],
        {
            name: (log.handlers[:], log.level, log.propagate)
            for name, log in ((name, logging.getLogger(name)) for name in names)
        },
    )
    root.handlers = []
    for name in names:
        log = logging.getLogger(name)
        log.handlers, log.propagate = [], True
        log.setLevel(logging.NOTSET)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    theirs = logging.getLogger("vllm")
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    try:
        yield text
    finally:
        root.handlers = before[0]
        for name, (handlers, level, propagate) in before[1].items():
            log = logging.getLogger(name)
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)


def test_info_is_shown_once_with_the_level_of_vllm() -> None:
    with as_in_vllm() as shown:
        show_logs()
        show_logs()
        log = logging.getLogger("tierkv_adapters.vllm.worker")
        log.info("serves")
        log.debug("details")
        assert shown.getvalue() == "INFO serves\n"
        assert not logging.getLogger("tierkv").propagate  # as vLLM's own: never twice


def test_a_level_that_was_chosen_stays() -> None:
    with as_in_vllm() as shown:
        logging.getLogger("tierkv").setLevel(logging.ERROR)
        show_logs()
        logging.getLogger("tierkv.engine").warning("slow")
        logging.getLogger("tierkv_backends").info("direct")
        assert shown.getvalue() == "INFO direct\n"


def test_who_logs_elsewhere_is_left_alone() -> None:
    with as_in_vllm() as shown:
        elsewhere = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(elsewhere))
        show_logs()
        logging.getLogger("tierkv").warning("slow")
        assert shown.getvalue() == ""
        assert elsewhere.getvalue() == "slow\n"


def test_a_vllm_without_logging_changes_nothing() -> None:
    with as_in_vllm():
        logging.getLogger("vllm").handlers = []
        show_logs()
        assert not any(logging.getLogger(name).handlers for name in LOGGERS)
