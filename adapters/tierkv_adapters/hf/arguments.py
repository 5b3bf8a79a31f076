"""Which arguments of ``generate`` an attached model takes, and which it must refuse.

The adapter owns ids, mask and cache: several combinations of these make Transformers answer
wrongly without an error. Whatever could break that ownership is refused by name.
"""

from __future__ import annotations

from typing import Any

from tierkv.errors import AttachError
from tierkv_adapters.hf.compat import base_model

__all__ = ["check_arguments", "expected_new_tokens"]

_OWNED = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_config",
        "cache_implementation",
        "input_ids",
        "inputs",
        "inputs_embeds",
        "past_key_values",
        "position_ids",
        "streamer",
        "use_cache",
    }
)
_UNSUPPORTED = {
    "assistant_early_exit": "assisted decoding",
    "assistant_model": "assisted decoding",
    "custom_generate": "a custom generation loop",
    "dola_layers": "DoLa decoding",
    "penalty_alpha": "contrastive search",
    "prompt_lookup_num_tokens": "assisted decoding (prompt lookup)",
    "return_dict_in_generate": "a dict of scores and states",
}
_NEW_TOKENS_CAP = 1024  # a limit of 100k tokens must not reserve memory for 100k tokens


def check_arguments(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse what this adapter cannot serve rightly.

    Raises:
        AttachError: naming the argument and what to do.
    """
    owned = sorted(_OWNED & arguments.keys())
    if owned:
        raise AttachError(
            f"{', '.join(owned)}: the adapter builds ids, mask, cache and streamer itself; "
            "pass the prompt as text or token ids, and use stream() for tokens as they come"
        )
    for name in ("num_beams", "num_return_sequences"):
        if int(_effective(model, arguments, name) or 1) > 1:
            raise AttachError(
                f"{name} > 1 is not supported yet: one sequence per call; call generate several "
                "times (their common prefix is shared)"
            )
    for name, what in _UNSUPPORTED.items():
        if _effective(model, arguments, name):
            raise AttachError(f"{name}: {what} is not supported yet with an attached store")


def expected_new_tokens(model: Any, arguments: dict[str, Any], prompt: int) -> int:
    """Tokens for which memory is worth reserving beside the prompt."""
    wanted = _effective(model, arguments, "max_new_tokens")
    if wanted is None:
        wanted = (_effective(model, arguments, "max_length") or 0) - prompt
    return max(0, min(int(wanted), _NEW_TOKENS_CAP))


def _effective(model: Any, arguments: dict[str, Any], name: str) -> Any:
    if name in arguments:
        return arguments[name]
    config = arguments.get("generation_config") or base_model(model).generation_config
    return getattr(config, name, None)
