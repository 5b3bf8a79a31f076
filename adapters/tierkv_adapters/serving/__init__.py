"""What adapters for serving engines share; and how to write one for another engine.

A serving engine has one scheduler and one or several workers (ranks), in one process or in many.
The :class:`~tierkv_adapters.serving.planner.Planner` decides on the scheduler's side, from a
:class:`~tierkv_adapters.serving.replicas.ReplicaIndex` of what every rank holds; its
:class:`~tierkv_adapters.serving.orders.StepOrders` travel with the engine's own step to every
:class:`~tierkv_adapters.serving.rank.Rank`, which moves the pages. Nothing here imports a serving
engine: an adapter translates between its words and these. Those of vLLM
(:mod:`tierkv_adapters.vllm`) and TensorRT-LLM (:mod:`tierkv_adapters.trtllm`) are examples.

**Write an adapter for another engine**

1. *Pages.* Describe the worker's memory once it is allocated: a
   :class:`~tierkv_adapters.serving.pages.PageGroup` for each set of layers that shares page
   numbers, whose tensors are ``[pages, heads, page_tokens, dim]`` views of the pool, or
   :func:`~tierkv_adapters.serving.pages.opaque` bytes where the order inside a page is the
   kernel's affair (say whose, in ``packing``). They make a
   :class:`~tierkv_adapters.serving.pages.PagePools`.
   :func:`~tierkv_adapters.serving.pages.block_tokens_for` gives tokens of a block that are whole
   pages of every group. Never let a page number that means "no page" index a tensor.
2. *Identity.* Everything that KV depends on, apart from tokens, goes into the
   :class:`~tierkv.blocks.Identity`: model, :func:`~tierkv_adapters.serving.weights.weights_digest`,
   ``shard=(rank, ranks)``, ``adapters`` for LoRA, and in ``extra`` the engine, its attention
   kernel, KV dtype and topology. Salt and media of a request go into its
   :class:`~tierkv_adapters.serving.orders.RequestFacts`. What is missing here is served to the
   wrong request later: this list is the adapter's most important one.
3. *The rank's side.* Per worker one :class:`~tierkv.blocking.CacheManager` with a root of its own
   (:func:`~tierkv_adapters.serving.managers.open_manager` sees to that) and one
   ``Rank(manager, pools, space)``, called by the worker's thread alone. In each step:
   ``begin(orders)`` before anything writes pages, ``start_loads()``, ``wait_loads(ids)`` only for
   what this step reads, the forward pass, ``start_saves()``, and ``poll()``. Report to the engine
   what ``poll`` gives: a load that came short, as the engine has it (to recompute the rest).
   Keep the pages of a load until it ended, also if its request was cancelled.
4. *The scheduler's side.* Make one ``Planner``: from the space of each rank, a
   :class:`~tierkv.decisions.types.GroupRule` and the page tokens of each group, the index, a
   :class:`~tierkv_adapters.serving.negative.NegativeCache`, and the settings. Call it when a
   request comes (``admit``), is looked at (``offer``), gets pages (``accept``), is computed
   (``advance``, with the tokens that are certainly computed when this step is over: neither drafts
   nor tokens just sampled), loses its pages (``preempt``) and ends (``finish``); send ``step()``
   to the ranks with the engine's own message. Answer ``loaded`` and ``failed`` as ranks report.
   Offer multiples of a block, leave the tokens that the engine must compute (``leave``), and offer
   nothing behind half a block. Nothing here may block, do I/O, or raise. Plan no work when a
   request ends: an engine that has nothing to compute sends no step.
5. *The index.* Feed it from every rank: :class:`~tierkv_adapters.remote.feeds.LocalFeed` in the
   same process, :class:`~tierkv_adapters.remote.feeds.SocketFeed` otherwise. It is a hint: what it
   promises may be gone when the load comes. Where an engine cannot be told that a load failed,
   give the planner an index of what is held (``Engine.hold``), as the TensorRT-LLM adapter does.
6. *Settings.* Take them from the engine's own configuration where it lets you
   (:meth:`ServingSettings.parse <tierkv_adapters.serving.settings.ServingSettings.parse>` is strict
   and suggests), refuse what cannot work by name, at start-up, and never raise later.
7. *Prove it.* Write down the engine's order of calls as a replay driver, as
   :mod:`tierkv.testing.serving` and :mod:`tierkv.testing.trtllm` are: KV is a hash of the tokens
   before, freed pages are poisoned, ids are checked, requests are given up in every state. Then
   give your engine, or that driver, the few methods of :class:`tierkv.testing.adapters.Served`, and
   pass :class:`tierkv.testing.adapters.AdapterTests`::

       class TestMine(AdapterTests):
           kv_files = ("segment-*", "journal-*")  # of an nvme tier

           def make(self, root: Path) -> Served:
               return MyServer(root)

``tests/serving/test_guide.py`` follows these steps for a toy engine, in 80 lines.
"""
