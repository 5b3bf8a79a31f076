"""Tune prefetch alone on the first half of a public trace; the mean stall on the second half.

Run ``TIERKV_TRACES=DIR python -m benchmarks.tune_prefetch [--json]``; exit status 1 if tuning does
not lower it. The fast tier holds 3 M tokens, the slow one everything.
"""

import os
import sys
from pathlib import Path

from benchmarks.report import Cell, emit
from tierkv.traces import open_trace
from tierkv.tuning import Choices, shipped, tune

TRACES = Path(os.environ.get("TIERKV_TRACES", "../shared/traces"))


def main() -> int:
    trace = open_trace(TRACES / "mooncake_fast25_conversation.jsonl.zst")
    base = shipped({"host": 5859 * 512 * trace.header.bytes_per_token, "nvme": None})
    only = Choices(
        policies=(base.each(base.policy)[0],), admissions=("all",), marks=((0.95, 0.85),)
    )
    tuned = tune(trace, base, choices=only, seconds=None, trials=12)
    before, after = (report.stall.mean for report in tuned.held_out)
    row: dict[str, Cell] = {"prefetch": tuned.setup.prefetch, "shipped_stall_s": before}
    row |= {"tuned_stall_s": after, "lower": 1 - after / before, "trials": tuned.trials}
    emit("tune_prefetch", [row], "--json" in sys.argv)
    return 0 if after < before else 1


if __name__ == "__main__":
    raise SystemExit(main())
