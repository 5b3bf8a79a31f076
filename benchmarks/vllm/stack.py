"""vLLM's own tiers on a CPU, and what breaks them: needs vLLM to be importable.

vLLM's tiering needs a GPU only for the copies between the paged cache and its CPU tier:
:class:`CpuTiering` brings a worker that does them by memcpy. The other classes are the same stack
with one thing broken, as third parties or hardware may break it.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.kv_offload.base import LookupResult, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = [
    "CpuTiering",
    "CpuTieringFailing",
    "FailingTier",
    "MemcpyWorker",
    "SlowExampleConnector",
    "SlowTier",
]

SLOW_S = 8.0


class _Copy(NamedTuple):
    paged: torch.Tensor
    kept: torch.Tensor


class MemcpyWorker(OffloadingWorker):
    """Copies pages between the paged cache and the shared CPU tier, on the calling thread.

    Args:
        kv_caches: vLLM's byte views of the paged cache.
        region: The CPU tier's memory.
        success: What it reports of every copy.
    """

    def __init__(self, kv_caches: Any, region: Any, *, success: bool = True) -> None:
        self._refs = kv_caches.group_data_refs
        self._success = success
        self._region = region
        self._copies = [
            _Copy(cache.tensor, region.create_next_worker_view(cache.page_size_bytes))
            for cache in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages to the CPU tier."""
        self._copy(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages from the CPU tier."""
        self._copy(job_id, dst_spec, src_spec, store=False)
        return True

    def _copy(self, job_id: int, pages: Any, chunks: Any, *, store: bool) -> None:
        begun, first, nbytes = time.perf_counter(), 0, 0
        for refs, count in zip(self._refs, pages.group_sizes, strict=True):
            mine = torch.from_numpy(pages.block_ids[first : first + count]).long()
            kept = torch.from_numpy(chunks.block_ids[first : first + count]).long()
            for ref in refs:
                cache = self._copies[ref.tensor_idx]
                if store:
                    cache.kept[kept, : ref.page_size_bytes] = cache.paged[
                        mine, : ref.page_size_bytes
                    ]
                else:
                    cache.paged[mine, : ref.page_size_bytes] = cache.kept[
                        kept, : ref.page_size_bytes
                    ]
                nbytes += count * ref.page_size_bytes
            first += count
        self._done.append(
            TransferResult(job_id, self._success, nbytes, time.perf_counter() - begun)
        )

    def get_finished(self) -> list[TransferResult]:
        """Results since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Let go of the memory; the name of its file would stay otherwise."""
        self._copies.clear()
        self._region.cleanup()


class CpuTiering(TieringOffloadingSpec):
    """vLLM's tiering (CPU tier, then the tiers configured) with a worker that runs on a CPU."""

    success = True
    _worker: Any  # set by the base class

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker; made once."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region, success=self.success)
        return self._worker


class CpuTieringFailing(CpuTiering):
    """Every transfer between the paged cache and the CPU tier fails, and says so."""

    success = False


class FailingTier(FileSystemTierManager):
    """A tier whose index knows what it has and whose reads all fail, as a worn disk's would.

    vLLM's own file tier marks its failures as misses itself; nothing in the interface asks a tier
    to do so, and vLLM's example tier does not.
    """

    def lookup(self, key: Any, req_context: Any) -> Any:
        """What is on disk is a hit."""
        there = os.path.exists(self.file_mapper.get_file_name(key))
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        """Fail."""
        from vllm.v1.kv_offload.tiering.base import JobResult

        self._failed: list[Any] = [
            *getattr(self, "_failed", ()),
            JobResult(job_id=job_metadata.job_id, success=False),
        ]

    def get_finished_jobs(self) -> Any:
        """Also the failures."""
        failed, self._failed = getattr(self, "_failed", []), []
        return [*failed, *super().get_finished_jobs()]

    def has_pending_work(self) -> bool:
        """Also with failures to report."""
        return bool(getattr(self, "_failed", ())) or super().has_pending_work()


class SlowTier(FileSystemTierManager):
    """vLLM's file tier on a medium whose every load takes :data:`SLOW_S` longer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: list[tuple[float, Any]] = []

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load later."""
        self._held.append((time.monotonic() + SLOW_S, job_metadata))

    def get_finished_jobs(self) -> Any:
        """Start what is due, and report."""
        now = time.monotonic()
        due = [job for when, job in self._held if when <= now]
        self._held = [(when, job) for when, job in self._held if when > now]
        for job in due:
            super().submit_load(job)
        return super().get_finished_jobs()

    def has_pending_work(self) -> bool:
        """Also while something is held."""
        return bool(self._held) or super().has_pending_work()


class SlowExampleConnector(ExampleConnector):
    """vLLM's example connector on a medium whose every load takes :data:`SLOW_S` longer."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load late."""
        if any(not request.is_store for request in self._get_connector_metadata().requests):
            time.sleep(SLOW_S)
        super().start_load_kv(forward_context, **kwargs)
