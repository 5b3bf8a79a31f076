from __future__ import annotations

import pytest

from tierkv.testing import VirtualClock


def test_it_stands_still_until_advanced() -> None:
    clock = VirtualClock(5)

    assert clock() == clock() == 5.0
    clock.advance(0.25)
    assert clock() == 5.25
    assert repr(clock) == "<VirtualClock 5.25 s>"


def test_it_never_goes_back() -> None:
    clock = VirtualClock(5)

    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
    assert clock() == 5.0
