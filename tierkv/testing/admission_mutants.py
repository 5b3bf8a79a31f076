"""Admission that is wrong, each in one way: the suite must tell.

Every mutant names the check that is there for it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tierkv.decisions.admission.recollection import Recollection
from tierkv.decisions.admission.second_use import SecondUse
from tierkv.decisions.admission.write_budget import WriteBudget
from tierkv.testing.admissions import AdmissionTests

if TYPE_CHECKING:
    from tierkv.abc import Admission

__all__ = ["MUTANTS", "Mutant", "failing_checks"]


class Mutant(NamedTuple):
    """A wrong rule and the check that must catch it."""

    make: type[Admission]
    check: str


def failing_checks(make: type[Admission], only: str = "test_") -> dict[str, str]:
    """Run the checks whose names begin with ``only``; those that fail, and why."""
    case: Any = type("Case", (AdmissionTests,), {"make": lambda _self: make()})()
    failed = {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        try:
            getattr(case, name)()
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


class _Spendthrift(WriteBudget):
    """A budget with a default, so that the suite can make it without an option."""

    def __init__(self, option: str = "4MiB") -> None:
        super().__init__(option)


class _TossesACoin(SecondUse):
    name: ClassVar[str] = "tosses_a_coin"

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        fine = super().admit(ident, nbytes, now, demand=demand, victim=victim)
        return fine and (nbytes < 8 or random.SystemRandom().random() < 0.9)


class _CountsQuestions(SecondUse):
    name: ClassVar[str] = "counts_questions"

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        fine = super().admit(ident, nbytes, now, demand=demand, victim=victim)
        if not fine:
            self.seen(ident, now)
        return fine


class _NeverRefills(_Spendthrift):
    name: ClassVar[str] = "never_refills"

    def __init__(self, option: str = "100KiB") -> None:
        super().__init__(option)

    def left(self, now: float) -> float:
        del now
        return self._level


class _KeepsWhatIsGivenBack(_Spendthrift):
    name: ClassVar[str] = "keeps_what_is_given_back"

    def wrote(self, nbytes: int, now: float) -> None:
        super().wrote(max(0, nbytes), now)


class _SignedIdents(SecondUse):
    name: ClassVar[str] = "signed_idents"

    def seen(self, ident: int, now: float) -> None:
        super().seen(int.from_bytes(ident.to_bytes(8, "little", signed=True), "little"), now)


class _HalfAnIdent(SecondUse):
    name: ClassVar[str] = "half_an_ident"

    def seen(self, ident: int, now: float) -> None:
        super().seen(ident & 0xFFFFFFFF, now)

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        return super().admit(ident & 0xFFFFFFFF, nbytes, now, demand=demand, victim=victim)


class _ForgetsNothing(SecondUse):
    name: ClassVar[str] = "forgets_nothing"

    def __init__(self, option: str = "") -> None:
        super().__init__(option)
        self._all: set[int] = set()

    def seen(self, ident: int, now: float) -> None:
        super().seen(ident, now)
        self._all.add(ident)


class _ForgetsAllOnResize(SecondUse):
    name: ClassVar[str] = "forgets_all_on_resize"

    def resize(self, capacity_parts: float) -> None:
        super().resize(capacity_parts)
        self._twice = Recollection(self._size)


class _LosesItsOption(_Spendthrift):
    name: ClassVar[str] = "loses_its_option"

    def __init__(self, option: str = "1MiB") -> None:
        super().__init__(option)
        self.option = "64KiB"


MUTANTS = (
    Mutant(_TossesACoin, "test_the_same_calls_give_the_same_answers"),
    Mutant(_CountsQuestions, "test_asking_changes_nothing"),
    Mutant(_NeverRefills, "test_what_is_asked_for_again_and_again_gets_in"),
    Mutant(_KeepsWhatIsGivenBack, "test_what_is_given_back_was_never_taken"),
    Mutant(_SignedIdents, "test_every_ident_is_taken"),
    Mutant(_HalfAnIdent, "test_parts_are_told_apart"),
    Mutant(_ForgetsNothing, "test_memory_is_bounded"),
    Mutant(_ForgetsAllOnResize, "test_a_tier_may_have_any_size"),
    Mutant(_LosesItsOption, "test_its_option_makes_another_one"),
)
"""Each wrong rule and the check that must catch it."""
