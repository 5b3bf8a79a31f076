"""The figures of a run, as JSON and as a table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tierkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["SCHEMA_VERSION", "Report", "Restart", "Turn"]

SCHEMA_VERSION: Final = 1
LONG_PROMPT: Final = 1024
"""Prompts shorter than this say little about restoring: they are left out of the median."""
MOSTLY_OLD: Final = 0.10
"""Largest share of new text in a prompt that counts as returning."""

_NEXT: Final = """What to try next
  tierkv demo --model DIR     your own model, in a Transformers directory
  tierkv demo --model gemma3  a model with sliding-window layers
  tierkv demo --keep DIR      keep the store and use it again the next time
  tierkv demo --json          these figures for a program
  tierkv config show          every setting of an engine"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, through the store and without it.

    Attributes:
        label: What it is.
        new_tokens: Prompt tokens that no earlier request of its conversation had.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Of these, loaded instead of computed.
        tier: Slowest tier used, or None.
        ttft_cold_s: Seconds to the first token, everything computed.
        ttft_restored_s: Seconds to the first token, through the store.
        cpu_cold_s: Processor seconds to the first token, everything computed.
        cpu_restored_s: Processor seconds to the first token, through the store.
        identical: Whether the reply is that of the in-memory cache resumed at the same split.
        identical_to_cold: Whether it is the cold reply (margin rule of
            :func:`tierkv_adapters.hf.compare.compare_tokens`).
    """

    label: str
    new_tokens: int
    prompt_tokens: int
    reused_tokens: int
    tier: str | None
    ttft_cold_s: float
    ttft_restored_s: float
    cpu_cold_s: float
    cpu_restored_s: float
    identical: bool
    identical_to_cold: bool

    @property
    def ratio(self) -> float:
        """TTFT through the store, as a share of the cold one."""
        return self.ttft_restored_s / self.ttft_cold_s

    @property
    def returning(self) -> bool:
        """Whether it is a long prompt of which at most a tenth is new text."""
        new_share = self.new_tokens / self.prompt_tokens
        return self.prompt_tokens >= LONG_PROMPT and new_share <= MOSTLY_OLD


@dataclass(frozen=True, slots=True)
class Restart:
    """The request after the restart; fields as in :class:`Turn`."""

    prompt_tokens: int
    reused_tokens: int
    tier: str | None
    ttft_restored_s: float
    identical: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run has shown.

    Attributes:
        model: Name or directory of the model.
        turns: Requests before the restart.
        restart: The one after it.
        bytes_by_tier: Bytes of KV that each tier held before the restart.
        capacity: Capacity of each tier in bytes.
    """

    model: str
    turns: Sequence[Turn]
    restart: Restart
    bytes_by_tier: Mapping[str, int]
    capacity: Mapping[str, int]

    @property
    def identical(self) -> bool:
        """Whether every restored reply was that of the in-memory cache."""
        return self.restart.identical and all(turn.identical for turn in self.turns)

    @property
    def ttft_ratio_median(self) -> float | None:
        """Median of restored TTFT / cold TTFT over returning prompts; None if there are none."""
        ratios = [turn.ratio for turn in self.turns if turn.returning]
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, in the stable form of ``--json``."""
        fields = (
            "prompt_tokens",
            "reused_tokens",
            "tier",
            "ttft_cold_s",
            "ttft_restored_s",
            "cpu_cold_s",
            "cpu_restored_s",
            "identical",
            "identical_to_cold",
        )
        restart = ("reused_tokens", "prompt_tokens", "ttft_restored_s", "identical")
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "turns": [{name: getattr(turn, name) for name in fields} for turn in self.turns],
            "restart": {name: getattr(self.restart, name) for name in restart},
            "totals": {
                "ttft_ratio_median": self.ttft_ratio_median,
                "bytes_by_tier": dict(self.bytes_by_tier),
                "identical": self.identical,
            },
        }

    def show(self, console: Console) -> None:
        """Print the table and what it means."""
        table = Table(
            title=f"{self.model}: time to first token, cold and returning",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        for name in ("turn", "prompt", "reused", "tier", "cold", "restored", "speed-up"):
            text = name in ("turn", "tier")
            table.add_column(name, justify="left" if text else "right", no_wrap=True)
        table.add_column("identical", no_wrap=True)
        for turn in self.turns:
            speed = f"{1 / turn.ratio:.1f}x" if turn.reused_tokens else "-"
            table.add_row(
                turn.label,
                str(turn.prompt_tokens),
                str(turn.reused_tokens),
                turn.tier or "-",
                f"{turn.ttft_cold_s:.2f} s",
                f"{turn.ttft_restored_s:.2f} s",
                speed,
                _yes(turn.identical),
            )
        back = self.restart
        table.add_section()
        table.add_row(
            "after restart",
            str(back.prompt_tokens),
            str(back.reused_tokens),
            back.tier or "-",
            "",
            f"{back.ttft_restored_s:.2f} s",
            "",
            _yes(back.identical),
        )
        console.print(table)
        held = ", ".join(
            f"{tier} {format_bytes(used)} of {format_bytes(self.capacity[tier])}"
            for tier, used in self.bytes_by_tier.items()
        )
        console.print(f"KV held before the restart: {held}")
        if self.ttft_ratio_median is not None:
            console.print(
                f"Long returning prompts: the first token came after "
                f"{self.ttft_ratio_median:.0%} of the cold time (median)"
            )
        console.print(
            "identical: the reply of the model that resumes its own in-memory cache there"
        )
        console.print(f"\n{_NEXT}", highlight=False, soft_wrap=True)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
