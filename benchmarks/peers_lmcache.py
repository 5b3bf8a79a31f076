"""The LMCache half of :mod:`benchmarks.peers`; runs in an environment of its own.

A child process that measures what it is asked for: one JSON object a line comes in, ``{"op": name,
...}``, and one goes out, with seconds of wall and CPU time and how many operations they took. It
imports nothing of tierkv, and tierkv imports nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

for _name, _value in {
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402 - after the environment, which decides what it brings along

MIB = 1 << 20
SMALL = (1, 2, 16, 8, 128)  # layers, K and V, tokens, heads, dim: 64 KiB in bfloat16
LARGE = (32, 2, 256, 8, 128)  # 32 MiB
_BACKENDS = "lmcache.v1.storage_backend"


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def key(number: int) -> Any:
    """Name of a chunk."""
    return _of("lmcache.utils", "CacheEngineKey")("bench", 1, 0, number, torch.bfloat16, None)


class Pool:
    """A RAM backend, and a loop and a disk backend behind it if a directory is given."""

    def __init__(
        self,
        shape: tuple[int, ...],
        gib: float,
        *,
        directory: str | None = None,
        disk_gib: float = 1.0,
        policy: str = "LRU",
        direct: bool = False,
    ) -> None:
        extra: dict[str, Any] = {}
        if directory is not None:
            extra = {"local_disk": directory, "max_local_disk_size": disk_gib}
            extra["extra_config"] = {"use_odirect": direct}
        config = _of("lmcache.v1.config", "LMCacheEngineConfig").from_defaults(
            chunk_size=shape[2],
            local_cpu=True,
            max_local_cpu_size=gib,
            cache_policy=policy,
            lmcache_instance_id="bench",
            **extra,
        )
        meta = _of("lmcache.v1.metadata", "LMCacheMetadata")(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=shape,
            chunk_size=shape[2],
        )
        _of("lmcache.v1.pin_monitor", "PinMonitor").GetOrCreate(config)
        self.cpu = _of(f"{_BACKENDS}.local_cpu_backend", "LocalCPUBackend")(config, meta, "cpu")
        self.config = config
        self._format = _of("lmcache.v1.memory_management", "MemoryFormat").KV_2LTD
        self._shapes, self._dtypes = meta.get_shapes(shape[2]), meta.get_dtypes()
        self.nbytes = 2 * self._shapes[0].numel()
        if directory is not None:
            import asyncio

            self.loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
            self._thread.start()
            self.disk = _of(f"{_BACKENDS}.local_disk_backend", "LocalDiskBackend")(
                config, self.loop, self.cpu, "cpu", None, meta
            )

    def allocate(self, **options: Any) -> Any:
        """Memory for a chunk; it evicts unless told not to."""
        return self.cpu.allocate(self._shapes, self._dtypes, self._format, **options)

    def fill(self) -> list[Any]:
        """All memory that is left, chunk by chunk."""
        return list(iter(lambda: self.allocate(eviction=False), None))

    def put(self, number: int) -> None:
        """Publish a chunk in RAM, evicting if need be."""
        chunk = self.allocate()
        self.cpu.submit_put_task(key(number), chunk)
        chunk.ref_count_down()

    def write(self, number: int, value: float, timeout: float = 3.0) -> bool:
        """Put a chunk full of ``value`` on disk; whether its callback came."""
        chunk, done = self.allocate(), threading.Event()
        chunk.tensor.fill_(value)
        self.disk.submit_put_task(key(number), chunk, on_complete_callback=lambda _: done.set())
        came = done.wait(timeout)
        chunk.ref_count_down()
        return came

    def path(self, number: int) -> str:
        """File of a chunk."""
        name: str = self.disk._key_to_path(key(number))
        return name

    def close(self) -> None:
        """Close the backends, as far as they close."""
        if hasattr(self, "disk"):
            self.disk.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)
        self.cpu.close()


Timed = dict[str, float]


@contextlib.contextmanager
def _clock(out: Timed, operations: int, *, process: bool = False) -> Any:
    cpu = time.process_time if process else time.thread_time
    wall, used = time.perf_counter(), cpu()
    yield
    out.update(wall=time.perf_counter() - wall, cpu=cpu() - used, operations=operations)


class Ram:
    """64 KiB chunks in RAM."""

    def __init__(self, chunks: int) -> None:
        self._count = chunks
        self._pool = Pool(SMALL, (chunks + 8) * 65536 / (1 << 30))
        for number in range(chunks):
            self._pool.put(number)
        self._keys = [key(number) for number in range(chunks)]
        self._out = [torch.zeros(2, 1, 16, 1024, dtype=torch.bfloat16) for _ in range(256)]
        self._next = chunks

    def get(self) -> Timed:
        """Look each chunk up and release it."""
        get, out = self._pool.cpu.get_blocking, Timed()
        with _clock(out, len(self._keys)):
            for name in self._keys:
                get(name).ref_count_down()
        return out

    def get_tensor(self) -> Timed:
        """As :meth:`get`, and look at its memory as a tensor."""
        get, out = self._pool.cpu.get_blocking, Timed()
        with _clock(out, len(self._keys)):
            for name in self._keys:
                chunk = get(name)
                _ = chunk.tensor
                chunk.ref_count_down()
        return out

    def copy(self, calls: int = 1) -> Timed:
        """Copy 256 chunks out, so many times."""
        get, out = self._pool.cpu.get_blocking, Timed()
        with _clock(out, len(self._out) * calls, process=True):
            for _ in range(calls):
                for name, target in zip(self._keys, self._out, strict=False):
                    chunk = get(name)
                    target.view(-1).copy_(chunk.tensor.view(-1))
                    chunk.ref_count_down()
        return out

    def pin(self, count: int) -> Timed:
        """Pin the oldest chunks and leave no memory free."""
        self._held = self._pool.fill()
        for name in self._keys[:count]:
            self._pool.cpu.pin(name)
        return {"operations": count}

    def put_full(self, count: int, calls: int = 1) -> Timed:
        """Put chunks that need an eviction each."""
        count *= calls
        out = Timed()
        with _clock(out, count, process=True):
            for number in range(self._next, self._next + count):
                self._pool.put(number)
        self._next += count
        return out

    def close(self) -> None:
        """Close it."""
        self._pool.close()


class Disk:
    """32 MiB chunks on disk."""

    def __init__(self, directory: str, chunks: int, direct: bool, small: bool = False) -> None:
        shape = SMALL if small else LARGE
        nbytes = 65536 if small else 32 * MIB
        room = chunks * nbytes / (1 << 30)
        self._pool = Pool(
            shape, 2 * room + 0.1, directory=directory, disk_gib=3 * room + 0.1, direct=direct
        )
        self._out: list[torch.Tensor] = []
        self._chunks = [self._pool.allocate() for _ in range(chunks)]
        for number, chunk in enumerate(self._chunks):
            chunk.tensor.fill_(float(number))
        self._first = 0

    def put(self, sync: bool) -> Timed:
        """Write new chunks, until every callback came; with ``sync``, until they are durable."""
        self._first += len(self._chunks)
        names = [key(self._first + number) for number in range(len(self._chunks))]
        done, out = threading.Semaphore(0), Timed()
        with _clock(out, len(names) * self._pool.nbytes, process=True):
            self._pool.disk.batched_submit_put_task(
                names, self._chunks, on_complete_callback=lambda _: done.release()
            )
            for _ in names:
                done.acquire()
            if sync:
                for number in range(len(names)):
                    self._sync(number)
        return out

    def _sync(self, number: int, *, drop: bool = False) -> None:
        fd = os.open(self._pool.path(self._first + number), os.O_RDONLY)
        try:
            os.fdatasync(fd)
            if drop:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def read(self, deliver: bool = False) -> Timed:
        """Read the chunks of the last put, none of which is in the page cache.

        With ``deliver`` into memory of the caller, as a load does; without, into its own pool only.
        """
        if deliver and not self._out:
            self._out = [torch.ones_like(chunk.tensor) for chunk in self._chunks]
        names = [key(self._first + number) for number in range(len(self._chunks))]
        for number in range(len(names)):
            self._sync(number, drop=True)
        out = Timed()
        with _clock(out, len(names) * self._pool.nbytes, process=True):
            found = self._pool.disk.batched_get_blocking(names)
            for chunk, target in zip(found, self._out if deliver else [], strict=False):
                target.view(-1).copy_(chunk.tensor.view(-1))
        assert all(chunk is not None for chunk in found)
        for chunk in found:
            chunk.ref_count_down()
        return out

    def close(self) -> None:
        """Close it."""
        self._pool.close()


def restart(directory: str, chunks: int) -> Timed:
    """Write chunks, close, open again: how many are found."""
    for turn in range(2):
        pool = Pool(SMALL, 0.05, directory=directory)
        if not turn:
            for number in range(chunks):
                pool.write(number, float(number))
        found = sum(bool(pool.disk.contains(key(number))) for number in range(chunks))
        pool.close()
    return {"found": found, "operations": chunks}


def _answer(things: dict[str, Any], asked: dict[str, Any]) -> Any:
    """Do one thing that was asked for."""
    op, args = asked["op"], asked.get("args", {})
    if op == "make":
        kind: Callable[..., Any] = {"ram": Ram, "disk": Disk}[asked["kind"]]
        things[asked["name"]] = kind(**args)
        return {}
    if op == "close":
        things.pop(asked["name"]).close()
        return {}
    if op == "restart":
        return restart(**args)
    if op == "probe":
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        return importlib.import_module("peers_lmcache_probes").probe(**args)
    return getattr(things[asked["name"]], op)(**args)


def main() -> None:
    """Answer until there is nothing asked any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to stderr
    torch.set_num_threads(1)
    things: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            said: Any = {"ok": _answer(things, json.loads(line))}
        except BaseException as error:  # noqa: BLE001 - the other side hears of it
            said = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
    os._exit(0)  # threads of the library outlive its close()


if __name__ == "__main__":
    main()
