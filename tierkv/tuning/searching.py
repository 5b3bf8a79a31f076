"""The search: trials on the first half of a trace, the verdict on the second."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import ConfigError, MissingDependencyError
from tierkv.replay import Report, Setup, replay
from tierkv.tuning.space import OBJECTIVES, Choices, sizes_of, worth
from tierkv.tuning.sweeping import PRICES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tierkv.traces import Trace

__all__ = ["Tuned", "tune"]

_NAME: Final = "tierkv"
_MARK: Final = "searched"
_FIRST: Final = b'{"op_code"'  # so begins each line of optuna's journal


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of a search.

    Attributes:
        objective: What was made small.
        setup: The best configuration found.
        base: The configuration that it is compared with.
        trials: Trials made, those of earlier runs of the study included.
        train: Reports of the base and of the best on the first half of the trace.
        held_out: The same on the second half, which the search has not seen.
        interrupted: Whether Ctrl-C ended it.
    """

    objective: str
    setup: Setup
    base: Setup
    trials: int
    train: tuple[Report, Report]
    held_out: tuple[Report, Report]
    interrupted: bool = False

    @property
    def gain(self) -> float:
        """Share of the mean time to the first token that is saved on the second half."""
        before, after = (report.ttft.mean for report in self.held_out)
        return 1 - after / before if before else 0.0


def tune(
    trace: Trace,
    base: Setup,
    *,
    objective: str = "ttft",
    choices: Choices | None = None,
    seconds: float | None = 300.0,
    trials: int | None = None,
    study: str | os.PathLike[str] | None = None,
    prices: Mapping[str, float] = PRICES,
    seed: int = 0,
    on_trial: Callable[[int, float], None] | None = None,
    on_end: Callable[[], None] | None = None,
) -> Tuned:
    """Search for a better configuration with optuna's TPE (Bergstra et al., NeurIPS 2011).

    The first trial is ``base`` itself, as far as ``choices`` hold it; the result is never worse
    than ``base`` on the first half. Both halves are replayed from empty tiers.

    Args:
        trace: Is read into memory; cut in two at the middle of its requests.
        base: What is shipped, and all that is not chosen (sizes, cost model).
        objective: One of :data:`~tierkv.tuning.space.OBJECTIVES`.
        choices: What may be chosen.
        seconds: When to stop; a trial that has begun is finished. None: no limit.
        trials: When to stop; None: no limit.
        study: File that remembers the trials, so that a search goes on where it was ended.
        prices: Price of a GiB of each tier, for ``cost``.
        seed: Of the search; with a limit of trials alone, the same seed finds the same.
        on_trial: Told the number of trials made and the best value so far.
        on_end: Called when the search has ended, before its result is judged.

    Raises:
        ConfigError: if an objective, limit or the study does not fit.
        MissingDependencyError: if optuna is not installed.

    Ctrl-C ends the search; what was found till then is evaluated and returned.
    """
    optuna = _optuna()
    if objective not in OBJECTIVES:
        raise ConfigError(f"an objective is one of {', '.join(OBJECTIVES)}, not {objective!r}")
    if seconds is None and trials is None:
        raise ConfigError("a search without end: limit its seconds or its trials")
    choices = choices or Choices()
    first, second = _halves(trace)
    made = _open_study(optuna, study, seed, _print(first, base, objective, choices))
    search = _Search(first, base, objective, choices, prices)
    interrupted = search.run(made, trials, seconds, on_trial)
    if on_end is not None:
        on_end()
    best = search.best_of(optuna, made)
    return Tuned(
        objective,
        best,
        base,
        len(made.trials),
        (search.reference, replay(first, best)),
        (replay(second, base), replay(second, best)),
        interrupted,
    )


class _Search:
    """The trials of one run.

    Attributes:
        reference: What the base came to.
        best: The best value so far, and its configuration.
    """

    def __init__(
        self,
        trace: Trace,
        base: Setup,
        objective: str,
        choices: Choices,
        prices: Mapping[str, float],
    ) -> None:
        self._trace, self._base, self._objective = trace, base, objective
        self._choices, self._prices = choices, prices
        self._seen: dict[str, float] = {}
        sizes_of(base)  # refused before anything is replayed
        self.reference = replay(trace, base)
        self.best = (self._worth(base, self.reference), base)

    def _worth(self, setup: Setup, report: Report) -> float:
        return worth(self._objective, setup, report, self.reference, self._prices)

    def _pick(self, suggest: Any) -> Setup:
        return self._choices.pick(suggest, self._base, resize=self._objective == "cost")

    def run(
        self,
        study: Any,
        trials: int | None,
        seconds: float | None,
        on_trial: Callable[[int, float], None] | None,
    ) -> bool:
        """Make trials until a limit is reached, or Ctrl-C: then True."""

        def after(study: Any, _: Any) -> None:
            if on_trial is not None:
                on_trial(len(study.trials), min(study.best_value, self.best[0]))

        if not study.trials:
            study.enqueue_trial(self._choices.nearest(self._base), skip_if_exists=True)
        try:
            study.optimize(self.attempt, n_trials=trials, timeout=seconds, callbacks=[after])
        except KeyboardInterrupt:
            return True
        return False

    def attempt(self, trial: Any) -> float:
        """One trial; what was tried before is not replayed again."""
        setup = self._pick(trial)
        key = repr(setup)
        if key not in self._seen:
            self._seen[key] = self._worth(setup, replay(self._trace, setup))
        value = self._seen[key]
        if value < self.best[0]:
            self.best = value, setup
        return value

    def best_of(self, optuna: Any, study: Any) -> Setup:
        """The best of this run and of those before it."""
        with suppress(ValueError):  # no trial was finished
            trial = study.best_trial
            if trial.value < self.best[0]:
                return self._pick(optuna.trial.FixedTrial(trial.params))
        return self.best[1]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingDependencyError(
            "a search needs optuna: pip install -c constraints.txt -e '.[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a trial cut by Ctrl-C is no news
    return optuna


def _halves(trace: Trace) -> tuple[Trace, Trace]:
    whole = trace.loaded()
    times = [request.time for request in whole]
    middle = times[len(times) // 2] if times else 0.0
    if not times or times[0] == middle:
        raise ConfigError(
            "the trace cannot be cut in two, to search one half and judge by the other: it has "
            f"{len(times)} requests, of which more than half arrive at the first moment"
        )
    return whole.between(times[0], middle).loaded(), whole.between(middle, float("inf")).loaded()


def _print(trace: Trace, base: Setup, objective: str, choices: Choices) -> str:
    """What a study is about: trials of other traces or choices say nothing here."""
    digest = hashlib.sha256(repr((base, objective, choices)).encode())
    for request in trace:
        digest.update(repr((request.time, len(request.keys), request.keys[-1:])).encode())
    return digest.hexdigest()


def _check_study(path: str | os.PathLike[str]) -> None:
    """Refuse what is no study: optuna would append to any file before it reads it."""
    try:
        with open(path, "rb") as file:
            first = file.read(len(_FIRST))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read the study {os.fspath(path)!r}: {error.strerror}") from error
    if first and first != _FIRST:
        raise ConfigError(f"{os.fspath(path)!r} is no study: name another file, or remove it")


def _open_study(optuna: Any, path: str | os.PathLike[str] | None, seed: int, about: str) -> Any:
    storage = None
    if path is not None:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        _check_study(path)
        try:
            storage = JournalStorage(JournalFileBackend(os.fspath(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot keep the study in {os.fspath(path)!r}: {error}") from error
    made = optuna.create_study(
        study_name=_NAME, storage=storage, direction="minimize", load_if_exists=True
    )
    known = made.user_attrs.get(_MARK)
    if known is not None and known != about:
        raise ConfigError(
            f"the study in {os.fspath(path or '')!r} is of another trace, of other settings or "
            "choices: name another file, or remove it"
        )
    made.set_user_attr(_MARK, about)
    # a search that goes on draws anew, and does not repeat its first trials
    made.sampler = optuna.samplers.TPESampler(seed=seed + len(made.trials))
    return made
