"""The requests that vLLM has not finished, and how the planner comes to know each of them."""

from __future__ import annotations

import functools
import logging
import secrets
import time
import uuid
from typing import TYPE_CHECKING, Any

from tierkv.errors import ConfigError
from tierkv_adapters.serving.limited_log import LimitedLog
from tierkv_adapters.vllm.facts import adapter_id
from tierkv_adapters.vllm.scheduling.asking import Asked, media_mark, wanted_of
from tierkv_adapters.vllm.scheduling.fingerprints import Fingerprints
from tierkv_adapters.vllm.scheduling.hints import Hinting
from tierkv_adapters.vllm.scheduling.live import Live
from tierkv_adapters.vllm.scheduling.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import AdapterId
    from tierkv_adapters.serving.planner import Planner
    from tierkv_adapters.serving.settings import ServingSettings

__all__ = ["Intake"]

_log = logging.getLogger(__name__)


class Intake:
    """Keeps the requests alive, and admits them to the planner once their keys are known.

    Args:
        kv_cache_config: vLLM's page groups.
        settings: The adapter's settings.
        digest: Reads a LoRA adapter's files, in a thread of its own; default: :func:`adapter_id`.
        vllm_config: vLLM's configuration (read: whether media are named by their content).

    Attributes:
        malformed: Requests whose own settings could not be read.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        settings: ServingSettings,
        digest: Callable[[Any], AdapterId] | None,
        vllm_config: Any = None,
    ) -> None:
        self._tables = Tables(getattr(kv_cache_config, "kv_cache_groups", ()))
        self._settings = settings
        since = functools.partial(adapter_id, since=time.time(), mark=uuid.uuid4().hex)
        self._fingerprints = Fingerprints(digest or since)
        self._limited = LimitedLog(_log)
        self._hinting = Hinting()
        self._live: dict[str, Live] = {}
        self._era = b""
        self._mark = media_mark(vllm_config)
        self._planner: Planner | None = None
        self.malformed = 0

    def on_new_request(self, request: Any) -> None:
        """A request came in: read what it asks for, and find out about its LoRA adapter."""
        try:
            asked: Asked | None = Asked.parse(getattr(request, "kv_transfer_params", None))
        except ConfigError as error:
            asked = None  # its tenant may be what is malformed: it is computed, and shares nothing
            self.malformed += 1
            self._limited.warning("malformed request settings, not cached", str(error))
        hinted = None
        if asked is not None:
            hinted = self._hinting.read(request, asked.pin, asked.prefetch)
        self._live[request.request_id] = Live(request, asked, hinted, self._era)
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            self._fingerprints.ask(lora)

    def _admitted(self, request: Any) -> Live | None:
        """The request, known to the planner if it can be; None: nobody told that it came."""
        live = self._live.get(request.request_id)
        planner = self._planner
        if live is None or planner is None:
            return None
        if live.admitted:
            self._catch_up(live)
            return live
        lora = getattr(request, "lora_request", None)
        adapter = None if lora is None else self._fingerprints.known(lora)
        if lora is not None and adapter is None:
            return live  # perhaps by the next step
        hinted = live.hinted
        ttl = None if hinted is None else hinted.ttl
        decoded, era = self._settings.save_decoded, live.era
        wanted = wanted_of(request, live.asked, adapter, decoded, ttl, era, self._mark)
        planner.admit(
            wanted.facts,
            request.all_token_ids[:],
            cacheable=wanted.cacheable,
            load_limit=wanted.load_limit,
            save_limit=wanted.save_limit,
            deadline=wanted.load_deadline,
        )
        live.admitted = True
        self._fingerprints.take(request, adapter)
        if hinted is not None:
            self._hinting.came(hinted, wanted.facts, request.all_token_ids[:])
        self._catch_up(live)
        return live

    def _begin_era(self) -> None:
        """From now on everything is keyed apart; requests of now are not cached any more."""
        self._era = secrets.token_bytes(16)

    def _fits(self, live: Live) -> bool:
        """Whether what is computed of a request is what it would be stored as."""
        return live.era == self._era and self._fingerprints.fits(live.request)

    def _catch_up(self, live: Live) -> None:
        """Tell the planner of a preemption: the request's pages are not its any more."""
        count = int(getattr(live.request, "num_preemptions", 0))
        if count != live.preemptions:
            live.preemptions = count
            self._tables.forget(live.request.request_id)
            if self._planner is not None:
                self._planner.preempt(live.request.request_id)

    def _over(self, name: str) -> None:
        self._fingerprints.over(name)
        self._tables.forget(name)
        if self._live.pop(name, None) is not None and self._planner is not None:
            self._planner.finish(name)
