"""From what a user names to a live model: a known name, or a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from tierkv.errors import ConfigError
from tierkv_adapters.hf.models import MODELS, ensure_model

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["find_model", "load_model"]


def find_model(model: str, progress: Callable[[str, float], None] | None = None) -> Path:
    """Directory of a model; one that is known by name is fetched on first use.

    Args:
        model: A name of :data:`tierkv_adapters.hf.models.MODELS`, or a directory.
        progress: As for :func:`tierkv_adapters.hf.models.ensure_model`.

    Raises:
        ConfigError: if it is neither.
        MissingDependencyError: if the weights cannot be fetched.
        IntegrityError: if what was fetched is not the pinned release.
    """
    if model in MODELS:
        return ensure_model(model, progress)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {model!r} is neither {' nor '.join(sorted(MODELS))} nor a directory with a "
            "Transformers model (no config.json there)"
        )
    return directory


def load_model(directory: Path) -> tuple[Any, Any]:
    """Load a model in float32 and its tokenizer, from files only.

    Raises:
        ConfigError: if Transformers cannot read them, or lacks a library to do so.
    """
    bars: Any = transformers.utils.logging
    bars.disable_progress_bar()  # it would draw into the caller's
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype="float32", local_files_only=True
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"Transformers cannot load the model in {directory}: {error}") from error
    finally:
        bars.enable_progress_bar()
    return model.eval(), tokenizer
