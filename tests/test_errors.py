from __future__ import annotations

import inspect
import re

import pytest

from tierkv import errors
from tierkv.errors import (
    BackendError,
    ConfigError,
    LoadIncomplete,
    StoreIncomplete,
    TierKVError,
)


def _classes() -> dict[str, type[TierKVError]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in found if issubclass(cls, TierKVError)}


def test_every_error_has_one_root_and_is_public() -> None:
    assert sorted(_classes()) == sorted(errors.__all__)


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    assert errors.__doc__ is not None
    rows = re.findall(r"^    ([│ ]*)[├└]── (\w+)(?: \((\w+)\))?  ", errors.__doc__, re.M)
    path = ["TierKVError"]
    drawn = {}
    for indent, name, builtin in rows:
        path = [*path[: len(indent) // 4 + 1], name]
        drawn[name] = (path[-2], *([builtin] if builtin else []))

    coded = {
        name: tuple(base.__name__ for base in cls.__bases__)
        for name, cls in _classes().items()
        if cls is not TierKVError
    }
    assert drawn == coded


def test_backend_errors_name_their_tier() -> None:
    error = BackendError("nvme", "disk on fire", retryable=True)

    assert (str(error), error.tier, error.retryable) == ("tier 'nvme': disk on fire", "nvme", True)


def test_an_incomplete_load_says_what_to_do() -> None:
    error = LoadIncomplete(7, "damaged")

    assert error.layer == 7
    assert "recompute" in str(error)


def test_an_incomplete_store_names_a_few_of_the_missing_layers() -> None:
    error = StoreIncomplete(tuple(range(3, 20)))

    assert error.missing == tuple(range(3, 20))
    assert "3, 4, 5, 6, 7, 8, 9, 10, ..." in str(error)


def test_config_errors_are_value_errors_and_name_the_setting() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        raise ConfigError("no", setting="threads")
    assert isinstance(caught.value, ConfigError)
    assert caught.value.setting == "threads"
