"""Real vLLM on a CPU with each connector, on the same work: restart, cost, damage, faults.

Every connector answers the same prompts of SmolLM2-135M: once with nothing stored, then again in a
fresh process (vLLM's own prefix cache is gone with the old one). ``hit_tokens``, ``cpu_s`` (of the
process and its children, up to the first token; median over interleaved rounds), ``cpu_ratio`` and
``ttft_ratio`` (to a process without a connector, round by round) are of the second process;
``identical`` says whether every answer was the one that a process without a connector gives. The
fault columns, on the shortest prompt, are of a further process each, whose store was damaged or
whose tiers are broken:

* ``corrupt_detected``: one bit flipped every 16 KiB; yes if the answer is still the right one;
* ``slow_tier_s``: time to the first token with a tier that takes 8 s longer;
* ``failing_tier``, ``failed_transfer``: what became of the process when all reads of a tier, or all
  copies to the tiers, fail: alive, or it died, or hung and was killed.

Run ``python -m benchmarks.vllm [--json] [--rounds N] [--quick]``; exit status 1 if tierkv misses a
bound, 2 if there is no vLLM. ``TIERKV_VLLM_PYTHON`` names the interpreter of vLLM's environment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.report import About, arguments, emit
from benchmarks.vllm.connectors import CONNECTORS
from benchmarks.vllm.measure import Bench
from benchmarks.vllm.processes import find_python, why_not
from benchmarks.vllm.rows import FAULT_CELLS, Findings, rows
from tierkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.report import Cell


ABOUT: Final = About(
    measures="tokens hit, CPU and time to the first token of prompts repeated in a fresh process, "
    "and what becomes of damaged stores and broken tiers",
    against="vLLM without a connector, with its example connector, and with its own tiering",
    floors="nine of ten tokens hit, identical answers, no slower than the others, right under "
    "every fault; exit status 1 if tierkv misses one, 2 without vLLM",
    takes="about an hour; ten minutes with --quick",
    needs="vLLM in an environment that TIERKV_VLLM_PYTHON names, and the extra demo",
)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("vllm", __doc__, ABOUT)
    parser.add_argument("--quick", action="store_true", help="one round of 512 tokens, no faults")
    parser.add_argument("--rounds", type=int, default=3, help="cold and repeated, per connector")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048], metavar="N", help="of each prompt"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CONNECTORS[1:],
        default=CONNECTORS[1:],
        metavar="NAME",
        help=f"of {', '.join(CONNECTORS[1:])}; default: all",
    )
    parser.add_argument(
        "--faults", action=argparse.BooleanOptionalAction, default=True, help="damage and faults"
    )
    parser.add_argument("--model", type=Path, help="directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--within", type=float, default=300.0, help="seconds until it hangs")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.tokens, args.faults = 1, [512], False
    return args


def _model(given: Path | None) -> Path:
    if given is not None:
        return given
    from tierkv_adapters.hf.models import ensure_model

    return ensure_model("smollm2")


def _find(bench: Bench, args: argparse.Namespace) -> Findings:
    found = Findings()
    connectors = [*CONNECTORS[:1], *args.only]
    for number in range(args.rounds):
        turn = number % len(connectors)
        for connector in [*connectors[turn:], *connectors[:turn]]:
            folder = bench.folder(f"{connector}-store")
            for again in (False, True):
                print(f"round {number + 1}: {connector}", file=sys.stderr, flush=True)
                found.add(connector, bench.visit(connector, folder), again=again)
    for connector in args.only if args.faults else ():
        stored, length = bench.stored(f"{connector}-store"), min(args.tokens)
        for fault in found.faults_of(connector):
            print(f"{fault}: {connector}", file=sys.stderr, flush=True)
            found.broken[connector, fault] = bench.broken(connector, stored, fault, length)
    return found


def _show(table: list[dict[str, Cell]], json_flag: bool) -> None:
    if json_flag:
        emit("vllm", table, json_flag)
        return
    named = ("connector", "prompt_tokens")
    costs = [{k: v for k, v in row.items() if k not in FAULT_CELLS} for row in table]
    emit("vllm", costs, json_flag)
    faults = [{k: row[k] for k in (*named, *FAULT_CELLS)} for row in table]
    if faults := [row for row in faults if any(row[k] is not None for k in FAULT_CELLS)]:
        emit("vllm, with something broken", faults, json_flag)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if tierkv misses a bound, 2 without vLLM."""
    args = _arguments(argv)
    python = find_python()
    reason = why_not(python)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    try:
        model = _model(args.model)
    except MissingDependencyError as error:
        print(error, file=sys.stderr)
        return 2
    with Bench(python, model, args.tokens, within=args.within, kv_bytes=256 << 20) as bench:
        found = _find(bench, args)
    table: list[dict[str, Cell]] = rows(found, args.tokens)
    for line in found.complaints:
        print(line, file=sys.stderr)
    _show(table, args.json)
    return 0 if all(row["ok"] for row in table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
