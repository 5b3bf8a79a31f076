"""Codec chains on the KV of real models and on synthetic KV: size, speed, fidelity.

Run ``python -m benchmarks.codecs [--json] [--models smollm2,gemma3] [--chains ...]``. Chains are
separated by commas, or by semicolons where rules have commas in them. One row for each model and
chain; ``exact_first`` tells rows whose first block was kept exact. Speed is GB of
raw bytes per second of processor time of one thread, on tensors as long as the prefix, and against
a plain copy of the same memory measured in turns with it; ``fast`` says whether compiled kernels
ran.
The floors of the project are checked at the end: exit status 1 if one is missed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.report import About, arguments, emit
from benchmarks.synthetic import Pairs, synthetic
from tierkv_adapters.hf.report.choices import CHAINS, Wanted, listed
from tierkv_adapters.hf.report.coding import Speed
from tierkv_adapters.hf.report.rows import Row, measure
from tierkv_codecs.kernels import available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.report import Cell
    from tierkv_adapters.hf.report.fidelity import Subject

PREFIX: Final = {"smollm2": (1024, 512), "gemma3": (768, 256)}
SYNTHETIC: Final = "synthetic"
MODELS: Final = (*PREFIX, SYNTHETIC)


class Floor(NamedTuple):
    """One promise: ``field`` of the rows that it speaks of is at most, or at least, ``limit``."""

    what: str
    field: str
    limit: float
    at_most: bool
    chains: tuple[str, ...]
    exact_first: int = 0
    fast: bool | None = None


FLOORS: Final = (
    Floor("planes is lossless at 1.45x", "ratio", 1.45, False, ("planes",)),
    Floor("int8 takes 8.5 bits", "bits_per_element", 8.5, True, ("int8",)),
    Floor("int8 changes nothing", "kl", 1e-4, True, ("int8",)),
    Floor("4.5 bits", "kl", 7e-3, True, ("int4", "rot4")),
    Floor("4.5 bits, first block exact", "kl", 4e-3, True, ("int4", "rot4"), exact_first=1),
    Floor("3.3 bits", "kl", 2.8e-2, True, ("rot3",)),
    Floor("ecq4 takes 4.5 bits", "bits_per_element", 4.5, True, ("ecq4+rans",)),
    Floor("4.5 bits, entropy-coded", "kl", 3e-3, True, ("ecq4+rans",)),
    Floor("ecq3 takes 3.3 bits", "bits_per_element", 3.3, True, ("ecq3+rans",)),
    Floor("3.3 bits, entropy-coded", "kl", 1e-2, True, ("ecq3+rans",)),
    Floor("int8 decodes near memcpy", "decode_vs_memcpy", 0.5, False, ("int8",), fast=False),
    Floor("int8 decodes near memcpy", "decode_vs_memcpy", 0.85, False, ("int8",), fast=True),
    Floor("int4 decodes near memcpy", "decode_vs_memcpy", 0.7, False, ("int4",), fast=True),
    Floor("fp8 decodes near memcpy", "decode_vs_memcpy", 0.7, False, ("fp8",), fast=True),
    Floor("ecq4 decodes", "decode_vs_memcpy", 0.2, False, ("ecq4+rans",), fast=True),
    Floor("rot4 decodes", "decode_vs_memcpy", 0.3, False, ("rot4",), fast=True),
    Floor("planes decodes", "decode_vs_memcpy", 0.25, False, ("planes",), fast=True),
)


def _subject(model: str) -> tuple[Subject | None, Pairs]:
    if model == SYNTHETIC:
        return None, synthetic()
    from tierkv_adapters.hf.report.running import subject_of  # needs the extra

    subject = subject_of(Wanted(model, None, *PREFIX[model]))
    return subject, [(k.bfloat16(), v.bfloat16()) for k, v in subject.kv]


def _missed(model: str, rows: Sequence[Row]) -> list[str]:
    found = []
    for floor in FLOORS:
        if floor.fast is not None and floor.fast != available():
            continue
        if (floor.field in Speed._fields) != (model == SYNTHETIC):
            continue  # speed is promised for memory, fidelity for models
        mine = [r for r in rows if r.chain in floor.chains and r.exact_first == floor.exact_first]
        values = [v for v in (getattr(row, floor.field) for row in mine) if v is not None]
        if not values:
            continue
        best = min(values) if floor.at_most else max(values)
        if best > floor.limit if floor.at_most else best < floor.limit:
            sign = ">" if floor.at_most else "<"
            found.append(f"{model}: {floor.what}: {floor.field} {best:.3g} {sign} {floor.limit:g}")
    return found


ABOUT: Final = About(
    measures="bits a number, KL of the model's next token, and GB/s of each chain, one thread",
    against="the raw KV (fidelity), a plain copy of the same memory in turns (speed)",
    floors=f"{len(FLOORS)} of them, e.g. {FLOORS[0].what}; those that were missed are named at the "
    "end, with exit status 1",
    takes="some twenty minutes; two with --models synthetic",
    needs="for the models the extra demo, which fetches 90 and 240 MB once",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a floor is missed."""
    parser = arguments("codecs", __doc__, ABOUT)
    parser.add_argument("--models", default=",".join(MODELS), help="default: all three")
    parser.add_argument("--chains", default=",".join(CHAINS), help="default: all known ones")
    args = parser.parse_args(argv)
    document: list[dict[str, Cell]] = []
    missed: list[str] = []
    for model in args.models.split(","):
        subject, kv = _subject(model)
        rows = []
        for chain in listed(args.chains):
            rows.append(measure(kv, chain, subject=subject))
            if subject is not None and not rows[-1].lossless:
                rows.append(measure(kv, chain, subject=subject, exact_first=1, timed=False))
        document += [{"model": model, **row._asdict(), "fast": available()} for row in rows]
        missed += _missed(model, rows)
    emit("codecs", document, args.json)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
