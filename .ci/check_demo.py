"""Checks the JSON of ``tierkv demo``: its shape, and that nothing but the time differs."""

import json
import sys
from pathlib import Path

result = json.loads(Path(sys.argv[1]).read_text())
assert result["schema_version"] == 1
assert result["turns"], "no turns"
for turn in result["turns"]:
    assert turn["identical"] is True, turn
restart = result["restart"]
assert restart["identical"] is True, restart
assert restart["reused_tokens"] / restart["prompt_tokens"] >= 0.9, restart
totals = result["totals"]
assert totals["identical"] is True, totals
assert {"host", "nvme"} <= totals["bytes_by_tier"].keys(), totals
print(f"demo: {len(result['turns'])} turns, ratio of TTFT {totals['ttft_ratio_median']:.3f}")
