"""What a request of TensorRT-LLM says about itself, in tierkv's terms.

The object that the scheduler hooks get comes from C++, without the attributes of its Python
subclass, and its members differ between versions: everything is looked up by name.
"""

from __future__ import annotations

import struct
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tierkv.blocks import AdapterId, Media
from tierkv_adapters.serving.orders import RequestFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Facts", "request_facts", "request_name"]

# adapters are told by a number alone: which weights stand behind it is known while this process
# runs (the runtime keeps them by that number as well), and not any longer
_THIS_RUN: Final = str(uuid.uuid4())

_EMBEDDINGS: Final = (
    *("prompt_embedding_table", "multimodal_embedding", "mrope_rotary_cos_sin"),
    *("encoder_tokens", "encoder_input_features", "cross_attention_mask"),
)


class Facts(NamedTuple):
    """A request, and whether its KV is named by what is known of it.

    Attributes:
        facts: What its keys depend on.
        why_not: Why nothing of it may be stored or offered; None: it may.
    """

    facts: RequestFacts
    why_not: str | None = None


def request_name(request_id: int) -> str:
    """Name of a request in orders and plans."""
    return str(request_id)


def request_facts(request: Any, tokens: int) -> Facts:
    """Everything that the KV of a request depends on apart from its tokens and the model.

    Args:
        request: The runtime's ``LlmRequest``.
        tokens: How many tokens its prompt has.
    """
    name = request_name(request.request_id)
    media, why = _media(request, tokens)
    task = getattr(request, "lora_task_id", None)
    adapter = None if task is None else AdapterId(f"task-{int(task)}", _THIS_RUN)
    facts = RequestFacts(name, salt=_salt(request), adapter=adapter, media=media)
    for attribute in _EMBEDDINGS:
        if getattr(request, attribute, None) is not None and not media:
            why = why or f"it has {attribute}, which its tokens do not tell"
    if _flag(request, "is_dummy_request"):
        why = "it is a dummy of the runtime"
    elif _flag(request, "is_generation_only_request"):
        why = "its prompt is computed elsewhere"
    return Facts(facts, why)


def _flag(request: Any, name: str) -> bool:
    value = getattr(request, name, False)  # a property in C++, a method in the Python subclass
    return bool(value() if callable(value) else value)


def _salt(request: Any) -> bytes:
    """The salt; versions that keep only a number made of it are told apart from texts."""
    text = getattr(request, "cache_salt", None)
    if text is not None:
        return b"text:" + str(text).encode("utf-8", "surrogatepass")
    number = getattr(request, "cache_salt_id", None)
    return b"" if number is None else b"number:" + str(int(number)).encode()


def _media(request: Any, tokens: int) -> tuple[tuple[Media, ...], str | None]:
    hashes = _listed(request, "multimodal_hashes")
    positions = _listed(request, "multimodal_positions")
    lengths = _listed(request, "multimodal_lengths")
    if not hashes and not positions and not lengths:
        return (), None
    if len(hashes) != len(positions):
        return (), f"{len(positions)} media items, of which {len(hashes)} have a digest"
    found = []
    for item, position in zip(hashes, positions, strict=True):
        digest = b"".join(struct.pack("<q", int(word)) for word in item)
        if not digest or not 0 <= int(position) < tokens:
            return (), f"a media item at {position} of {tokens} tokens has no digest or no place"
        found.append(Media(int(position), digest))
    return tuple(found), None


def _listed(request: Any, name: str) -> Sequence[Any]:
    value = getattr(request, name, None)
    return [] if value is None else list(value)
