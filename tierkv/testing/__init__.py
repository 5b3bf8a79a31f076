"""The test kit, for third parties too: suites, fault wrappers, a clock, cancellation.

Import from the module that has what you need:

=====================================  ===========================================================
:mod:`tierkv.testing.backends`         ``BackendTests``: what every backend must do
:mod:`tierkv.testing.codecs`           ``CodecTests``: what every codec must do
:mod:`tierkv.testing.policies`         ``PolicyTests``: what every eviction policy must do
:mod:`tierkv.testing.faults`           backends that are slow, gated, failing, short, corrupting
:mod:`tierkv.testing.crash`            kill a writer, reopen, count
:mod:`tierkv.testing.clock`            ``VirtualClock``
:mod:`tierkv.testing.cancel`           ``cancel_at_each_step``
=====================================  ===========================================================

Call ``pytest.register_assert_rewrite("tierkv.testing")`` in your ``conftest.py`` before importing
a suite, or its assertions report no values.
"""

from __future__ import annotations

from tierkv.testing.cancel import CancelStep, cancel_at_each_step
from tierkv.testing.clock import VirtualClock

__all__ = ["CancelStep", "VirtualClock", "cancel_at_each_step"]
