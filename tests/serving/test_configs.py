"""Digests of configurations, which identities are made of."""

from __future__ import annotations

import subprocess
import sys

from tierkv_adapters.configs import config_digest


def test_i2_order_and_process_do_not_matter() -> None:
    value = {"b": [1, (2, None)], "a": {"x", "y", "z"}, 3: True}
    code = f"from tierkv_adapters.configs import config_digest as d; print(d({value!r}))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(3)
    }
    assert told == {config_digest({3: True, "a": {"z", "y", "x"}, "b": (1, [2, None])})}


def test_i1_every_value_counts_but_those_that_are_ignored() -> None:
    value = {"rope": {"factor": 2.0, "label": "a"}, "layers": [1, 2]}
    other = {"rope": {"factor": 2.0, "label": "b"}, "layers": [1, 2]}
    assert config_digest(value) != config_digest(other)
    assert config_digest(value, {"label"}) == config_digest(other, {"label"})
    assert config_digest({"layers": [1, 2]}) != config_digest({"layers": [2, 1]})
    assert config_digest({"a": "1"}) != config_digest({"a": 1})
