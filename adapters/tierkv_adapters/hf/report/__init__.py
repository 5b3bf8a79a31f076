"""``tierkv codec-report``: what each codec chain costs and gives on a live model's KV."""

from __future__ import annotations

from tierkv_adapters.hf.report.command import codec_report

__all__ = ["codec_report"]
