"""The test kit, for third parties too: suites, stand-ins, faults, clocks, cancellation.

Import from the module that has what you need:

=====================================  ===========================================================
:mod:`tierkv.testing.backends`         ``BackendTests``: what every backend must do;
                                       ``DurableBackendTests``, ``MemoryBackendTests``
:mod:`tierkv.testing.resident`         ``ResidentBackendTests``: tiers in a device's memory
:mod:`tierkv.testing.devices`          ``DeviceTests``: what every device must do, and its users
:mod:`tierkv.testing.codecs`           ``CodecTests``: what every codec must do
:mod:`tierkv.testing.policies`         ``PolicyTests``: what every eviction policy must do
:mod:`tierkv.testing.admissions`       ``AdmissionTests``: what every admission to a tier must do
:mod:`tierkv.testing.predictors`       ``PredictorTests``: what every predictor of prefetch must do
:mod:`tierkv.testing.adapters`         ``AdapterTests``: what an adapter of a serving engine must do
:mod:`tierkv.testing.serving`          ``Replay``, ``ServingTests``: vLLM's order of calls
:mod:`tierkv.testing.trtllm`           ``Replay``, ``suite.ConnectorTests``: TensorRT-LLM's order of
                                       calls
:mod:`tierkv.testing.accelerator`      ``SimDevice`` (``"sim:SEED"``): late copies, spoilt memory
:mod:`tierkv.testing.virtual`          ``run_virtual``: a loop whose clock jumps; media that cost
                                       time on it
:mod:`tierkv.testing.faults`           backends that are slow, gated, hanging, failing, short,
                                       corrupting
:mod:`tierkv.testing.storm`            ``storm``: an engine whose tier fails in every way at random
:mod:`tierkv.testing.crash`            kill a writer, reopen, count
:mod:`tierkv.testing.clock`            ``VirtualClock``
:mod:`tierkv.testing.cancel`           ``cancel_at_each_step``
=====================================  ===========================================================

Suites are plain classes for pytest; each has a module of mutants (``*_mutants``) that must fail it.
Call ``pytest.register_assert_rewrite("tierkv.testing")`` in your ``conftest.py`` before importing
a suite, or its assertions report no values.
"""

from __future__ import annotations

from tierkv.testing.cancel import CancelStep, cancel_at_each_step
from tierkv.testing.clock import VirtualClock

__all__ = ["CancelStep", "VirtualClock", "cancel_at_each_step"]
