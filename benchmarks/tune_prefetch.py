"""Tune prefetch alone on the first half of a public trace; the mean stall on the second half.

Run ``TIERKV_TRACES=DIR python -m benchmarks.tune_prefetch [--json]``; exit status 1 if tuning does
not lower it. The fast tier holds 3 M tokens, the slow one everything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.report import About, Cell, arguments, emit
from tierkv.traces import open_trace
from tierkv.tuning import Choices, shipped, tune

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES = Path(os.environ.get("TIERKV_TRACES", "../shared/traces"))
TRACE = TRACES / "mooncake_fast25_conversation.jsonl.zst"

ABOUT: Final = About(
    measures="the mean stall of requests with the prefetch settings that tuning finds",
    against="the settings as shipped, on the half of the trace that was not searched",
    floors="less stall than as shipped; exit status 1 otherwise, 2 without the trace",
    takes="several minutes of CPU",
    needs="the extra tune; Mooncake's conversation trace in the folder TIERKV_TRACES",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if tuning lowers nothing, 2 without the trace."""
    args = arguments("tune_prefetch", __doc__, ABOUT).parse_args(argv)
    if not TRACE.is_file():
        print(f"there is no {TRACE}: set TIERKV_TRACES to the folder of it", file=sys.stderr)
        return 2
    trace = open_trace(TRACE)
    base = shipped({"host": 5859 * 512 * trace.header.bytes_per_token, "nvme": None})
    only = Choices(
        policies=(base.each(base.policy)[0],), admissions=("all",), marks=((0.95, 0.85),)
    )
    tuned = tune(trace, base, choices=only, seconds=None, trials=12)
    before, after = (report.stall.mean for report in tuned.held_out)
    row: dict[str, Cell] = {"prefetch": tuned.setup.prefetch, "shipped_stall_s": before}
    row |= {"tuned_stall_s": after, "lower": 1 - after / before, "trials": tuned.trials}
    emit("tune_prefetch", [row], args.json)
    return 0 if after < before else 1


if __name__ == "__main__":
    raise SystemExit(main())
