"""Which arguments of ``generate`` an attached model takes, and which it must refuse.

The adapter owns ids, mask and cache: several combinations of these make Transformers answer
wrongly without an error. Whatever could break that ownership is refused by name. What is neither
a setting of ``GenerationConfig`` nor an argument of ``generate`` itself would go to the model's
forward pass (images, embeddings, adapters per row): the KV would depend on it, its key would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from tierkv.errors import AttachError
from tierkv_adapters.hf.compat import base_model

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_arguments", "expected_new_tokens", "with_our_cache"]

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
_OF_GENERATE = frozenset(
    {
        "generation_config",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "synced_gpus",
        "tokenizer",
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
    "token_healing": "changing the prompt's last token",
    "use_mtp": "multi-token prediction",
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
    settings = vars(GenerationConfig()).keys()  # type: ignore[no-untyped-call]
    foreign = sorted(arguments.keys() - settings - _OF_GENERATE - _UNSUPPORTED.keys())
    if foreign:
        raise AttachError(
            f"{', '.join(foreign)}: not a setting of generation; an input of the model beside its "
            "tokens is not supported with an attached store"
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


def with_our_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a call that is handed a cache of ours; those given are not changed.

    A default of the model or of a ``GenerationConfig`` could replace that cache, or feed it the
    whole prompt again at each step.
    """
    settings = dict(arguments)
    config = settings.pop("generation_config", None)
    if config is not None:
        # one by one: beside a whole configuration Transformers wants no settings of ours, and what
        # is None in it would come from the model's defaults
        given = {n: v for n, v in vars(config).items() if v is not None and n[0] != "_"}
        given.pop("transformers_version", None)
        settings = given | settings
    return settings | {"use_cache": True, "cache_implementation": None}


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
