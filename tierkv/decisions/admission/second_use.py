"""Only what was asked for twice may enter."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.abc import Admission
from tierkv.decisions.admission.recollection import Recollection
from tierkv.errors import ConfigError

__all__ = ["SecondUse"]

_REACH: Final = 4  # parts remembered for each that the tier holds
_LEAST: Final = 4096
_MOST: Final = 1 << 22  # 32 MiB of filters: a tier without end does not need endless memory
_AT_FIRST: Final = 65536  # remembered until the size of the tier is known
_WHEN_FULL: Final = "when_full"


class SecondUse(Admission):
    """Admits a part that lookups asked for at least twice, as far as is remembered.

    The filter that disk tiers of several servers use (store on the second use): three quarters of
    the blocks of public chat traces are used once, and are then not written at all. It wins where
    the tier is small for its traffic, and loses where the tier could hold everything: there every
    block that is used just twice is missed. ``second_use:when_full`` admits everything while there
    is room.

    What counts are lookups: what is stored and never looked up is never kept. Remembered are, for
    a tier that holds C parts, the last 4 C parts that were asked for, or some more (but 4 million
    at most), in Bloom filters of 32 to 64 bytes a part held; one part in 200 may be admitted at its
    first use.
    """

    name: ClassVar[str] = "second_use"

    def __init__(self, option: str = "") -> None:
        if option not in ("", _WHEN_FULL):
            raise ConfigError(
                f"admission 'second_use' knows the option {_WHEN_FULL!r} only, not {option!r}"
            )
        super().__init__()
        self.option = option
        self.compares = option == _WHEN_FULL  # all that it asks is whether anybody has to leave
        self._size = _AT_FIRST
        self._once, self._twice = Recollection(_AT_FIRST), Recollection(_AT_FIRST)

    def seen(self, ident: int, now: float) -> None:
        """Count a use."""
        del now
        if self._once.add(ident):
            self._twice.add(ident)

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        """Say whether it was asked for twice (or, ``when_full``, pushes nobody out)."""
        del nbytes, now, demand
        return (self.compares and victim is None) or ident in self._twice

    def resize(self, capacity_parts: float) -> None:
        """Remember several times as many parts as the tier holds; a power of two of them."""
        wanted = min(max(_LEAST, _REACH * capacity_parts), _MOST)
        size = 1 << (int(wanted) - 1).bit_length()
        if size != self._size:
            self._size = size
            self._once.resize(size)
            self._twice.resize(size)
