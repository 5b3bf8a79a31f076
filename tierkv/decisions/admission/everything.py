"""Everything may enter: the default."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Admission

__all__ = ["Everything"]


class Everything(Admission):
    """Admits every part. Eviction alone decides who stays."""

    name: ClassVar[str] = "all"
    listens: ClassVar[bool] = False

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        """Say yes."""
        del ident, nbytes, now, demand, victim
        return True
