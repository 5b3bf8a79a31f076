"""What each predictor of prefetch is right about, and what it saves: in virtual time.

Workloads are replayed (:mod:`tierkv.replay`: the engine's own decision objects under a virtual
clock; a slow tier of 5 GB/s without limit below a fast one) without prefetch and with each
predictor. ``stall`` is the time for which requests wait for KV beyond queue and own compute;
``stall_ratio`` is that against the same replay without prefetch, and for ``chat`` also against
loading when a request is taken from the queue, without overlap (``dequeue_ratio``).

``chat`` is the conversation trace of Mooncake (left out where it is not at hand), with a fast tier
that is always full, and, as ``roomy chat``, with one that has room for guesses; ``agents``,
``books``, ``questions`` and ``shuffled`` are made (:mod:`benchmarks.prefetch_workloads`).

Run with ``python -m benchmarks.prefetch [--json]``; exit status 1 if a bound is missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.prefetch_workloads import agents, books, conversation, questions, shuffled
from benchmarks.report import About, arguments, emit
from tierkv.replay import CostModel, Setup, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.report import Cell
    from tierkv.replay import Report
    from tierkv.traces import Trace

__all__ = ["Workload", "rows", "workloads"]

_CHAT_BLOCKS = 5_867
_ALL = "arrival,sequential,chain,return_time"
_BLIND = "return_time:chance=0"


class Workload(NamedTuple):
    """One trace, the fast tier that it is replayed with, and what is shown on it.

    Attributes:
        name: Its name.
        trace: The requests.
        blocks: Blocks of the fast tier.
        water: Share above which the fast tier is emptied in the background, down to a tenth less;
            1: room is made when it is needed, so that there is none for guesses.
        predictors: What is replayed.
        bounds: By predictors, what must hold of the row.
    """

    name: str
    trace: Trace
    blocks: int
    water: float
    predictors: Sequence[str]
    bounds: Mapping[str, Callable[[Mapping[str, Any]], bool]]


def _precise(row: Mapping[str, Any]) -> bool:
    return bool(row["issued"]) and (row["precision"] or 0.0) >= 0.25


def _right(row: Mapping[str, Any]) -> bool:
    return _precise(row) and row["stall_ratio"] < 1


def _harmless(row: Mapping[str, Any]) -> bool:
    return _precise(row) and row["stall_ratio"] <= 1.02


def _timely(row: Mapping[str, Any]) -> bool:
    return _right(row) and row["timely"] >= 0.8


def _off(row: Mapping[str, Any]) -> bool:
    return bool(row["issued"]) and row["times_off"] > 0 and row["precision"] < 0.25


def workloads(scale: float = 1.0) -> Iterator[Workload]:
    """Every workload; ``scale`` makes them shorter, and the fast tier smaller with them."""

    def some(count: int) -> int:
        return max(1, round(count * scale))

    chat = conversation()
    if chat is not None:
        chat = chat if scale >= 1 else chat.between(0.0, 3600.0 * scale).loaded()
        yield Workload(
            "chat",
            chat,
            _CHAT_BLOCKS,
            1.0,
            ("arrival", "arrival,oracle"),
            {
                "arrival": lambda row: row["issued"] > 0 and row["dequeue_ratio"] <= 0.3,
                "arrival,oracle": lambda row: row["dequeue_ratio"] <= 0.1,
            },
        )
        yield Workload(
            "roomy chat",
            chat,
            _CHAT_BLOCKS,
            0.95,
            ("return_time", _BLIND),
            {_BLIND: _off},
        )
    yield Workload(
        "agents",
        agents(max(60, some(120)), 40),
        1_500,
        0.9,
        ("return_time", _BLIND, "oracle"),
        {"return_time": _harmless, "oracle": _right},
    )
    yield Workload(
        "books",
        books(some(40), 256, some(60)),
        some(2_000),
        0.9,
        ("sequential", "chain"),
        {"sequential": _timely, "chain": _right},
    )
    yield Workload(
        "questions",
        questions(some(60), 128, some(200)),
        some(1_500),
        0.9,
        ("chain", "sequential"),
        {"chain": _right},
    )
    yield Workload(
        "shuffled",
        shuffled(some(200), 64, some(2000)),
        some(2_000),
        0.9,
        (_ALL,),
        {_ALL: lambda row: row["stall_ratio"] <= 1.02},
    )


def _replayed(work: Workload, prefetch: str, *, overlap: bool = True) -> Report:
    setup = Setup(
        capacity_blocks=(work.blocks, None),
        policy="lru",
        prefetch=prefetch,
        high=work.water,
        low=work.water if work.water == 1 else work.water - 0.1,
        model=CostModel(overlap=overlap),
    )
    return replay(work.trace, setup)


def _row(work: Workload, name: str, report: Report, base: Report, plain: Report) -> dict[str, Cell]:
    counted = [report.prefetch[n.partition(":")[0]] for n in name.split(",")] if name else []
    total = {
        key: sum(figures[key] for figures in counted)
        for key in ("issued", "used", "late", "wasted", "refused", "times_off")
    }
    known = total["used"] + total["late"] + total["wasted"]
    right = total["used"] + total["late"]
    return {
        "workload": work.name,
        "predictor": name or "none",
        **total,
        "precision": right / known if known else None,
        "timely": total["used"] / right if right else None,
        "enabled": all(figures["enabled"] for figures in counted),
        "demand_loads": report.demand_loads,
        "stall_s": report.stall.total,
        "stall_ratio": report.stall.total / base.stall.total if base.stall.total else 1.0,
        "dequeue_ratio": report.stall.total / plain.stall.total if plain.stall.total else 1.0,
        "ttft_mean_s": report.ttft.mean,
        "ok": True,
    }


def rows(work: Workload) -> Iterator[dict[str, Cell]]:
    """Replay one workload without prefetch and with each predictor."""
    plain = _replayed(work, "", overlap=False)
    base = _replayed(work, "")
    yield _row(work, "", base, base, plain)
    for name in work.predictors:
        row = _row(work, name, _replayed(work, name), base, plain)
        bound = work.bounds.get(name)
        yield {**row, "ok": bound is None or bool(bound(row))}


ABOUT: Final = About(
    measures="what each predictor of prefetch is right about, and the time that requests stall",
    against="the same replay without prefetch, and loading when a request is taken from the queue",
    floors="per workload and predictor, such as 0.3 of the stall of loading at dequeue for "
    "arrival; column ok; exit status 1 if one is missed",
    takes="some minutes of CPU; less with --scale 0.1 or --only",
    needs="for chat: Mooncake's conversation trace in TIERKV_TRACES; without it those rows are "
    "left out",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a bound is missed."""
    parser = arguments("prefetch", __doc__, ABOUT)
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the workloads")
    parser.add_argument("--only", nargs="*", help="names of workloads")
    args = parser.parse_args(argv)
    found = [
        row
        for work in workloads(args.scale)
        if not args.only or work.name in args.only
        for row in rows(work)
    ]
    emit("prefetch", found, json_flag=args.json)
    return 0 if all(row["ok"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
