"""``tierkv demo``: a returning conversation answered from stored KV, beside a recomputed one."""

from __future__ import annotations

from tierkv_adapters.hf.demo.command import demo

__all__ = ["demo"]
