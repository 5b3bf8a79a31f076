"""What may enter a tier at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from tierkv.errors import ConfigError

__all__ = ["Admission"]


class Admission(ABC):
    """Decides which parts are worth a place in one tier. Sans-IO, deterministic, bounded.

    A part that is refused is not stored in this tier (``SkipReason.REFUSED``); a slower one may
    take it. Parts go by ``ident``, 64 bits that name a part for good. Times are seconds on the
    monotonic clock of the decision object. Every call is O(1), amortised.

    Args:
        option: What a configuration says behind the name: ``"write_budget:200GiB"``.

    Attributes:
        option: That option; subclasses that take one set it.

    Raises:
        ConfigError: if the option means nothing to it.
    """

    name: ClassVar[str]
    listens: ClassVar[bool] = True
    """Whether :meth:`seen` does anything; one that does not listen costs lookups nothing."""
    compares: bool = False
    """Whether :meth:`admit` wants to know whom the part would push out; asking may put a policy's
    queues in order."""

    def __init__(self, option: str = "") -> None:
        if option:
            raise ConfigError(f"admission {self.name!r} takes no option, not {option!r}")
        self.option: str = option

    def seen(self, ident: int, now: float) -> None:  # noqa: B027 - optional
        """Note that a lookup asked for a part, whether it was there or not."""

    @abstractmethod
    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        """Say whether a part may enter. May be asked again for the same part; promises nothing.

        Args:
            ident: The part.
            nbytes: Bytes that it would take.
            now: Time.
            demand: Whether somebody waits for it (a store), or not (a promotion, a prefetch).
            victim: The part that would leave for it; None if there is room, if nobody knows, or
                if this class does not :attr:`compare <compares>`.
        """

    def wrote(self, nbytes: int, now: float) -> None:  # noqa: B027 - optional
        """Note bytes that are set aside for a write into the tier; negative: given back."""

    def resize(self, capacity_parts: float) -> None:  # noqa: B027 - optional
        """Learn how many mean-sized parts the tier holds (sizes of sketches and ghosts)."""
