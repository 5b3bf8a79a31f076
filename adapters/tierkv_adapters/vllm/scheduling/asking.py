"""What a request asks of tierkv: ``kv_transfer_params={"tierkv": {...}}``, strictly read."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.blocks import Media
from tierkv.config.fields import did_you_mean
from tierkv.errors import ConfigError
from tierkv.units import parse_duration
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.vllm.scheduling.hints import Prefetch, parse_prefetch

if TYPE_CHECKING:
    from tierkv.blocks import AdapterId

__all__ = ["Asked", "Wanted", "media_mark", "media_of", "wanted_of"]

_MOST_NAME = 512


@dataclass(frozen=True, slots=True)
class Asked:
    """Wishes of one request; make them with :meth:`parse`.

    Attributes:
        session: Session whose history the request continues, or None.
        tenant: Whose it is; tenants never share blocks.
        ttl: Seconds that its blocks live after their last use, or None.
        max_load_tokens: Load no token at or behind this position; 0: load nothing.
        max_save_tokens: Store no token at or behind this position; 0: store nothing.
        load_deadline: Seconds that its loads may take; None: as the connector is set up.
        pin: Seconds for which its KV is to stay in memory, or None.
        prefetch: What is to be brought early, or None.
        salt: Secret that blocks must share to be reused; None: the request's ``cache_salt``.
        report: Whether its output tells what came of it, in ``kv_transfer_params["tierkv"]``.
    """

    session: str | None = None
    tenant: str = ""
    ttl: float | None = None
    max_load_tokens: int | None = None
    max_save_tokens: int | None = None
    load_deadline: float | None = None
    pin: float | None = None
    prefetch: Prefetch | None = None
    salt: bytes | None = None
    report: bool = False

    @classmethod
    def parse(cls, params: object) -> Asked:
        """Read the whole of ``kv_transfer_params``; keys of other connectors are none of ours.

        Raises:
            ConfigError: if what is meant for tierkv has an unknown name or a malformed value.
        """
        if not isinstance(params, Mapping) or "tierkv" not in params:
            return cls()
        values = params["tierkv"]
        if not isinstance(values, Mapping):
            raise ConfigError(f"kv_transfer_params['tierkv'] is a mapping, not {values!r:.80}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"kv_transfer_params['tierkv'] has the unknown key {name!r:.80}; "
                    f"{did_you_mean(str(name), known)}"
                )
        return cls(**{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: object) -> Any:
    if value is None and name not in {"report", "tenant"}:
        return None
    if name == "report":
        if isinstance(value, bool):
            return value
        raise _refuse(name, value, "true or false")
    if name == "prefetch":
        return parse_prefetch(value)
    if name == "salt":
        return _salt(value)
    if name in {"session", "tenant"}:
        fits = isinstance(value, str) and len(value) <= _MOST_NAME
        if fits and (value or name == "tenant"):
            return value
        raise _refuse(name, value, f"a name of at most {_MOST_NAME} characters")
    if name in {"max_load_tokens", "max_save_tokens"}:
        if type(value) is int and value >= 0:
            return value
        raise _refuse(name, value, "a whole number of tokens")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(name, value, "a duration such as '10s'")
    try:
        seconds = parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"kv_transfer_params['tierkv'][{name!r}]: {error}") from None
    if seconds <= 0:
        raise _refuse(name, value, "a duration longer than nothing")
    return seconds


def _salt(value: object) -> bytes:
    try:
        if isinstance(value, str) and len(value) <= 2 * _MOST_NAME:
            return bytes.fromhex(value)
    except ValueError:
        pass
    # said without the value: it may be a secret
    raise ConfigError("kv_transfer_params['tierkv']['salt'] is bytes in hexadecimal")


def _refuse(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"kv_transfer_params['tierkv'][{name!r}] is {wanted}, not {value!r:.80}")


def media_mark(vllm_config: Any) -> bytes:
    """What sets media apart where vLLM does not name them by content; nothing where it does.

    With neither a processor cache nor prefix caching it saves itself the hashing and numbers them
    from 1 in each process: the first image after a restart would be taken for the first before.
    """
    cache = getattr(vllm_config, "cache_config", None)
    model = getattr(vllm_config, "model_config", None)
    media = getattr(model, "multimodal_config", None)
    if getattr(cache, "enable_prefix_caching", True) or media is None:
        return b""
    return b"" if getattr(media, "mm_processor_cache_gb", None) else secrets.token_bytes(16)


def media_of(features: Any, mark: bytes = b"") -> tuple[Media, ...] | None:
    """What stands behind a request's placeholder tokens; None if one of them cannot be told apart.

    Args:
        features: vLLM's ``mm_features``: an identifier by content, and a position, of each.
        mark: See :func:`media_mark`.
    """
    found = []
    for feature in features or ():
        name = getattr(feature, "identifier", None) or getattr(feature, "mm_hash", None)
        place = getattr(getattr(feature, "mm_position", None), "offset", None)
        if not name or type(place) is not int or place < 0:
            return None
        found.append(Media(place, hashlib.sha256(mark + str(name).encode()).digest()))
    return tuple(found)


class Wanted(NamedTuple):
    """A request as the planner takes it in; see its :meth:`admit`."""

    facts: RequestFacts
    cacheable: bool
    load_limit: int | None
    save_limit: int | None
    load_deadline: float | None


def wanted_of(
    request: Any,
    asked: Asked | None,
    adapter: AdapterId | None,
    save_decoded: bool,
    ttl: float | None = None,
    era: bytes = b"",
    mark: bytes = b"",
) -> Wanted:
    """What vLLM's request is to the planner.

    Args:
        request: vLLM's request; only looked at.
        asked: What it asks of tierkv; None: that could not be read, so nothing of it is shared.
        adapter: Its LoRA adapter, if it has one.
        save_decoded: Whether decoded tokens are stored as well.
        ttl: Time to live, if it says nothing of its own.
        era: What sets KV computed since the last reset apart from all that was stored before.
        mark: See :func:`media_mark`.
    """
    media = media_of(getattr(request, "mm_features", None), mark)
    cacheable = asked is not None and media is not None and _plain(request)
    asked = asked or Asked()
    load, save = asked.max_load_tokens, asked.max_save_tokens
    prompt = int(request.num_prompt_tokens)
    if getattr(request, "resumable", False):  # behind the prompt, tokens are taken back at times
        load = prompt if load is None else min(load, prompt)
        save_decoded = False
    if not save_decoded:
        save = prompt if save is None else min(save, prompt)
    salt = asked.salt
    if salt is None:
        salt = (getattr(request, "cache_salt", None) or "").encode()
    facts = RequestFacts(
        request.request_id,
        session=asked.session,
        tenant=asked.tenant,
        ttl=asked.ttl if asked.ttl is not None else ttl,
        salt=salt,
        adapter=adapter,
        media=media or (),
        era=era,
    )
    return Wanted(facts, cacheable, load, save, asked.load_deadline)


def _plain(request: Any) -> bool:
    """Whether a request's KV is that of its token ids, and a prefix of other requests' KV."""
    return (
        getattr(request, "pooling_params", None) is None
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "prompt_is_token_ids", None) is None
        and getattr(request, "prompt_token_ids", None) is not None
    )
