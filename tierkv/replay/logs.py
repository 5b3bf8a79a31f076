"""Recorded decision logs: replayed byte for byte, and where they differ."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.decisions.coding_rules import Rule
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import replay, runs
from tierkv.decisions.types import TenantLimits, TierLimits
from tierkv.errors import ConfigError
from tierkv.registry import factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LogReport", "described", "replay_log"]


@dataclass(frozen=True, slots=True)
class LogReport:
    """What came of a decision log.

    Attributes:
        runs: Runs of an engine that were looked at.
        lines: Lines that came out as they are in the log.
        line: Number of the first one that did not, from 1; 0 if all did.
        expected: That line, as it is in the log; empty where the log has no such line.
        got: The same, as it came out; empty where nothing did.
    """

    runs: int
    lines: int
    line: int = 0
    expected: bytes = b""
    got: bytes = b""

    @property
    def same(self) -> bool:
        """Whether the whole log came out byte for byte."""
        return self.line == 0


def described(header: bytes) -> Decisions:
    """An unused decision object of the configuration that a log's first line describes.

    Policies and admissions are found by the names that the line tells; where they had options, or
    were composed, the object has to be made from the configuration itself.

    Raises:
        ConfigError: if the line is no header, or names what there is not.
    """
    try:
        plain: dict[str, Any] = json.loads(header)["args"][0]
        limits = plain["default_limits"]
        decisions = Decisions(
            [TierLimits(**tier) for tier in plain["tiers"]],
            policy=[factory("policies", name) for name in plain["policies"]],
            tenants={name: TenantLimits(**each) for name, each in plain["tenants"].items()},
            default_limits=None if limits is None else TenantLimits(**limits),
            admission=[_admission(name) for name in plain["admission"]],
            touch_order=plain["touch_order"],
            history=plain["history"],
        )
        later = plain.get("compression")
        if later is not None:
            rules = [[Rule(**rule) for rule in each] for each in later["rules"]]
            decisions.compress(rules, later["places"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        if isinstance(error, ConfigError):
            why = "make the object from the configuration that wrote the log (--config FILE)"
            raise ConfigError(f"{error}; {why}") from error
        raise ConfigError(
            "this is no decision log, or of another version: its first line is no header of this "
            f"version ({type(error).__name__})"
        ) from error
    return decisions


def _admission(name: str | None) -> Callable[[], Any] | None:
    return None if name is None else factory("admissions", name.removesuffix(":"))


def replay_log(lines: Iterable[bytes], make: Callable[[bytes], Decisions] = described) -> LogReport:
    """Feed every run of a log to a decision object of its own, and compare what it writes.

    Args:
        lines: The log, each line with its end.
        make: Makes an unused object of the configuration that wrote a run, given its first line.

    Raises:
        ConfigError: if the object is configured differently, or a line is not one of a log.
    """
    count = right = start = 0
    for run in runs(lines):
        count += 1
        produced = replay(run, make(run[0]))
        for number, line in enumerate(run):
            try:
                got = next(produced, b"")
            except (ConfigError, LookupError, TypeError, ValueError) as error:  # a damaged line
                raise ConfigError(
                    f"run {count} of the log, at line {number + 1}: {error}"
                ) from error
            if got != line:
                return LogReport(count, right, start + number + 1, line, got)
            right += 1
        more = next(produced, None)
        if more is not None:
            return LogReport(count, right, start + len(run) + 1, b"", more)
        start += len(run)
    if not count:
        raise ConfigError("the decision log is empty")
    return LogReport(count, right)
