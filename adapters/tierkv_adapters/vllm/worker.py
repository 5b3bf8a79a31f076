"""The worker's side of the connector: one engine per rank, fed with the scheduler's orders."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.config import load_config
from tierkv.errors import ConfigError
from tierkv.layout import GroupKind
from tierkv_adapters.remote.leftovers import socket_folder
from tierkv_adapters.remote.server import RemoteServer
from tierkv_adapters.serving.leaving import at_exit, not_at_exit
from tierkv_adapters.serving.managers import is_lossy, open_manager
from tierkv_adapters.serving.pages import PagePools, block_tokens_for
from tierkv_adapters.serving.rank import Rank
from tierkv_adapters.serving.registry import announce, withdraw
from tierkv_adapters.serving.settings import ServingSettings
from tierkv_adapters.vllm.attached.room import check_blocks
from tierkv_adapters.vllm.facts import (
    attention_backends,
    check_order,
    check_supported,
    identity_of,
    rank_of,
    space_of,
)
from tierkv_adapters.vllm.layouts import page_groups, shapes

if TYPE_CHECKING:
    import torch

    from tierkv.blocking import CacheManager
    from tierkv.blocks import AdapterId
    from tierkv.layout import Layout, Space
    from tierkv_adapters.serving.orders import LoadOrder, StepOrders
    from tierkv_adapters.serving.pages import PageGroup
    from tierkv_adapters.serving.rank import Ended

__all__ = ["Results", "WorkerSide", "check_policy", "check_settings", "connector_settings"]

_log = logging.getLogger(__name__)
_IDLE_S = 0.0005


class Results(NamedTuple):
    """What ended since the last step.

    Attributes:
        received: Requests whose load ended, well or not.
        failed: Those of them whose load must be computed anew as a whole.
        invalid: Pages that a load left without content.
        loads: Per request, tokens in place and why they are fewer than ordered.
        saves: Per request, the token up to which it is stored.
    """

    received: set[str]
    failed: set[str]
    invalid: set[int]
    loads: dict[str, tuple[int, str | None]]
    saves: dict[str, int]


class _OwnSettings(NamedTuple):
    settings: ServingSettings
    token: str | None
    weights: str | None
    source: Any


def connector_settings(vllm_config: Any) -> _OwnSettings:
    """Read and check ``kv_connector_extra_config``.

    Besides the fields of :class:`~tierkv_adapters.serving.settings.ServingSettings` it may hold
    ``manager`` (the token of a manager of this process), ``weights`` (the user's name for the
    revision of the weights), and ``settled`` (whether ``config`` is final: the environment does not
    change it any more).

    Raises:
        ConfigError: if a setting is unknown or malformed, there is no tier, or vLLM is set to
            fail requests whose load failed.
    """
    transfer = vllm_config.kv_transfer_config
    check_policy(transfer)
    return _settings(transfer.kv_connector_extra_config)


def check_policy(transfer: Any) -> None:
    """Refuse a ``KVTransferConfig`` with which a load that falls short fails its request.

    Raises:
        ConfigError: says what to set.
    """
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a block that cannot be loaded would fail its "
            "request; set KVTransferConfig(..., kv_load_failure_policy='recompute')",
            setting="kv_load_failure_policy",
        )


def check_settings(extra: Mapping[str, Any] | None) -> None:
    """Refuse ``kv_connector_extra_config`` that :func:`connector_settings` would refuse.

    Raises:
        ConfigError: if a setting is unknown or malformed, or there is no tier.
    """
    _settings(extra)


def _settings(given: Mapping[str, Any] | None) -> _OwnSettings:
    extra = dict(given or {})
    token, weights = extra.pop("manager", None), extra.pop("weights", None)
    for name, value in (("manager", token), ("weights", weights)):
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{name} is a text, not {value!r:.80}", setting=name)
    settled = extra.pop("settled", False)
    settings = ServingSettings.parse(extra, engine="vllm")
    source: Any = settings.config
    if settled is True and isinstance(source, Mapping):
        source = load_config(None, **source).config
    elif settled is not False:
        raise ConfigError("settled goes with a config that is a mapping", setting="settled")
    elif token is None:  # also read again where it is opened: here what is wrong is known early
        load_config(source)
    return _OwnSettings(settings, token, weights, source)


class WorkerSide:
    """Owns the rank's engine and its pages. Called by the worker's thread alone.

    Args:
        vllm_config: vLLM's configuration of this worker.
        kv_cache_config: vLLM's ``KVCacheConfig`` of this worker.

    Raises:
        ConfigError: if a setting is malformed or cannot be honoured.
        AttachError: if this way of running vLLM cannot be served.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        check_supported(vllm_config)
        check_order(vllm_config, kv_cache_config)
        self._vllm = vllm_config
        self._caches = kv_cache_config
        self._own = connector_settings(vllm_config)
        self._settings = self._own.settings
        self._facts = rank_of(vllm_config)
        self._rank: Rank | None = None
        self._manager: CacheManager | None = None
        self._owned = False
        self._server: RemoteServer | None = None
        self._folder: str | None = None
        self._socket = ""
        self._handshake: dict[str, Any] | None = None
        self._begun: Any = None
        self._idle = False
        self._one_group = True
        self._page_tokens = 1
        self._pages: dict[str, array[int]] = {}
        self._loading: dict[str, tuple[LoadOrder, array[int]]] = {}

    # ------------------------------------------------------------------ start

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take over the cache's pages: open the engine, and serve the scheduler's side.

        Raises:
            AttachError: if the model, its weights or its pages cannot be served.
            ConfigError: if a setting of the engine cannot be honoured.
            BackendError: if a tier cannot be used.
        """
        if self._rank is not None:  # the caches were made anew: the engine stays
            self._rank.close()
            self._rank = None
        backends = attention_backends(self._vllm, caches)
        if self._manager is None:
            own, facts = self._own, self._facts
            opened = open_manager(own.source, own.token, facts.number, facts.workers)
            self._manager, self._owned = opened
            at_exit(self.close)  # for a vLLM that ends without a word
        try:
            self._start(self._manager, caches, backends)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        manager: CacheManager,
        caches: Mapping[str, torch.Tensor],
        backends: Mapping[str, str],
    ) -> None:
        identity = identity_of(self._vllm, backends, weights=self._own.weights)
        groups = page_groups(caches, self._caches, backends, described=self._described(manager))
        pools = PagePools(groups)
        block_tokens = block_tokens_for(groups, self._settings.block_tokens)
        layout = pools.layout(block_tokens)
        check_blocks(manager.config, block_tokens, layout.raw_bytes(block_tokens))

        def space(adapter: AdapterId | None) -> Space:
            made = space_of(identity, layout, block_tokens, adapter)
            manager.bind(made)  # or nobody who asks the manager would see what is in it
            return made

        space(None)
        self._rank = Rank(manager, pools, space)
        # of a state there is no shorter part that is right: such loads are computed as a whole anew
        states = any(group.kind is GroupKind.STATE for group in groups)
        self._one_group = len(self._caches.kv_cache_groups) == 1 and not states
        self._page_tokens = groups[0].page_tokens
        if self._server is None:
            self._serve(manager)
        self._handshake = {
            "rank": self._facts.rank,
            "world": self._facts.world,
            "pid": os.getpid(),
            "socket": self._socket,
            "identity": identity,
            "layout": layout,
            "block_tokens": block_tokens,
            "groups": shapes(groups),
            "tiers": tuple((tier.name, tier.kind) for tier in manager.config.tiers),
        }
        self._tell(groups, layout, block_tokens)

    def _tell(self, groups: tuple[PageGroup, ...], layout: Layout, block_tokens: int) -> None:
        kinds = ", ".join(f"{len(g.layers)} layers {g.kind.value}" for g in groups)
        _log.info(
            "tierkv serves rank %d of %d: %s; blocks of %d tokens, %d bytes; tiers %s",
            self._facts.rank,
            self._facts.world,
            kinds,
            block_tokens,
            layout.raw_bytes(block_tokens),
            [tier.name for tier in self._manager.config.tiers] if self._manager else [],
        )

    def _described(self, manager: CacheManager) -> bool:
        """Whether pages are stored with their axes; page_groups says why where they cannot be."""
        if self._settings.layout != "auto":
            return self._settings.layout == "described"
        # lossless chains work on any bytes, and opaque pages travel in fewer pieces
        return is_lossy(manager.config)

    def _serve(self, manager: CacheManager) -> None:
        folder = self._settings.socket_dir
        if folder is None:
            folder = self._folder = socket_folder()
        self._socket = os.path.join(folder, f"rank{self._facts.number}.sock")
        self._server = RemoteServer(manager, self._socket, self.about)
        self._server.start()
        announce(self._socket, manager)

    def handshake(self) -> dict[str, Any] | None:
        """What the scheduler's side needs to know of this rank; plain data.

        Returns:
            ``rank``, ``world``, ``pid``, ``socket``, ``identity`` (without adapters), ``layout``,
            ``block_tokens``, ``groups`` (kind, window and page tokens of each) and ``tiers``
            (name and kind of each, in the order of residency's bits); None before
            :meth:`register`.
        """
        return self._handshake

    # ------------------------------------------------------------------ steps

    def begin(self, metadata: Any) -> None:
        """Take a step's orders, once, and wait for copies out of pages that it overwrites.

        vLLM hands the metadata over twice, and which call comes first depends on its version.
        """
        if metadata is self._begun or self._rank is None:
            return
        self._begun = metadata
        orders: StepOrders = metadata.orders
        self._idle = bool(metadata.idle)
        self._note(orders)
        self._rank.begin(orders)

    def start_loads(self) -> None:
        """Start the step's loads, and wait for those that its forward pass reads."""
        if self._rank is None or self._begun is None:
            return
        self._rank.start_loads()
        sync = [order.id for order in self._begun.orders.loads if order.sync]
        if sync:
            self._rank.wait_loads(sync)

    def start_saves(self) -> None:
        """Submit the step's saves; the forward pass is over, or is queued before them."""
        if self._rank is not None and self._begun is not None:
            self._rank.start_saves()

    def end(self) -> None:
        """Forget the step's orders."""
        self._begun = None

    def results(self) -> Results:
        """What ended since the last call."""
        found = Results(set(), set(), set(), {}, {})
        if self._rank is None:
            return found
        ended = self._rank.poll()
        if not ended and self._idle:
            # no token is computed in this step: the engine asks again at once, and would
            # otherwise spend the whole wait asking
            time.sleep(_IDLE_S)
            ended = self._rank.poll()
        for one in ended:
            if one.kind == "load":
                self._loaded(one, found)
            else:
                found.saves[one.id] = max(one.tokens, found.saves.get(one.id, 0))
        return found

    def _loaded(self, ended: Ended, found: Results) -> None:
        order, pages = self._loading.pop(ended.id, (None, None))
        if order is None or pages is None:
            return
        found.received.add(ended.id)
        short = ended.tokens < order.stop
        found.loads[ended.id] = ended.tokens, (ended.reason or "short") if short else None
        if short and self._one_group:
            first = max(ended.tokens, order.start) // self._page_tokens
            last = -(-order.stop // self._page_tokens)
            found.invalid.update(page for page in pages[first:last] if page >= 0)
        elif short:
            found.failed.add(ended.id)

    def _note(self, orders: StepOrders) -> None:
        """Keep the pages of requests, to name those that a load leaves without content."""
        for name in orders.ended:
            self._pages.pop(name, None)
        for name in orders.voided:
            self._pages.pop(name, None)
        for grown in orders.grown:
            if grown.replace or grown.id not in self._pages:
                self._pages[grown.id] = array("q", grown.pages[0])
            else:
                self._pages[grown.id].extend(grown.pages[0])
        for order in orders.loads:
            pages = array("q", self._pages.get(order.id, ()))
            self._loading[order.id] = order, pages

    def about(self) -> dict[str, Any]:
        """What :func:`tierkv_adapters.vllm.status` tells of this rank: plain data, any thread."""
        rank, handshake = self._rank, self._handshake
        if rank is None or handshake is None:
            return {}
        told = {name: handshake[name] for name in ("rank", "world", "pid", "block_tokens")}
        return {**told, "requests": rank.requests, "counters": rank.counters.snapshot()}

    def counted(self) -> dict[str, int | float]:
        """What the rank counted since the last call."""
        return self._rank.counters.take() if self._rank is not None else {}

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stop serving and close the engine, if it is this rank's own. Idempotent, bounded."""
        not_at_exit(self.close)
        rank, self._rank = self._rank, None
        server, self._server = self._server, None
        manager, self._manager = self._manager, None
        if rank is not None:
            rank.close()
        if self._socket:
            withdraw(self._socket)
        if server is not None:
            server.close()
        folder, self._folder = self._folder, None
        if folder is not None:  # before what takes time: vLLM may not wait for it
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
        if manager is not None and self._owned:
            manager.close()
