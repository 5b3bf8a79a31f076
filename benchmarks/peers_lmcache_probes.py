"""The fault probes on LMCache: the same damage, and whether what came of it was right.

Names and meaning as in :mod:`benchmarks.peers_probes`; imported by the child process only. Each
probe returns whether it *held* and what was seen. A probe may leave a thread or a lock stuck, which
is why each runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

# by plain names: the child process runs these files by path, outside of any package
if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers_lmcache import SMALL, Pool, _of, key
else:
    import __main__

    SMALL, Pool, _of, key = __main__.SMALL, __main__.Pool, __main__._of, __main__.key

__all__ = ["probe"]

Verdict = tuple[bool, str]
_CHUNK = 65536


def _pool(place: str, gib: float = 0.05, **options: Any) -> Pool:
    return Pool(SMALL, gib, directory=place, **options)


def _full_of(chunk: Any, value: float) -> bool:
    return chunk is not None and bool((chunk.tensor == value).all())


def _read(pool: Pool, number: int, value: float) -> tuple[bool, str]:
    """Whether a read gives ``value`` or a miss; and what it gave."""
    try:
        chunk = pool.disk.get_blocking(key(number))
    except Exception as error:  # noqa: BLE001 - an exception out of a get is a finding
        return False, f"raised {type(error).__name__}"
    if chunk is None:
        return True, "a miss"
    right = _full_of(chunk, value)
    return right, "a hit, right" if right else "a hit, with wrong bytes"


def _answers(what: Callable[[], object], seconds: float) -> bool:
    """Whether a call comes back; if not, its thread is left to itself."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def truncated(place: str) -> Verdict:
    """A file loses its second half."""
    pool = _pool(place)
    for number in (1, 2, 3):
        pool.write(number, float(number))
    stale = pool.fill()
    for chunk in stale:
        chunk.tensor.fill_(99.0)
        chunk.ref_count_down()
    os.truncate(pool.path(2), os.path.getsize(pool.path(2)) // 2)
    return _read(pool, 2, 2.0)


def bitflip(place: str) -> Verdict:
    """Two bytes of a file change."""
    pool = _pool(place)
    pool.write(1, 1.0)
    with open(pool.path(1), "r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x7f")
    return _read(pool, 1, 1.0)


def missing(place: str) -> Verdict:
    """A file vanishes."""
    pool = _pool(place)
    pool.write(1, 1.0)
    os.unlink(pool.path(1))
    return _read(pool, 1, 1.0)


def prefetch_oom_deadlock(place: str) -> Verdict:
    """No staging memory is left while an asynchronous read wants some."""
    pool = _pool(place, gib=0.002)
    for number in range(1, 6):
        pool.write(number, float(number))
    held = pool.fill()
    names = [key(1), key(2)]
    reading = pool.disk.batched_get_non_blocking("request", names)
    job = asyncio.run_coroutine_threadsafe(reading, pool.loop)
    with contextlib.suppress(Exception):  # only what comes after counts
        job.result(5)
    for chunk in held:
        chunk.ref_count_down()
    there = _answers(lambda: pool.disk.contains(key(1)), 5)
    return there, f"a later lookup is answered within 5 s: {there}"


def remove_accounting(place: str) -> Verdict:
    """Everything is removed from a full tier."""
    pool = _pool(place, disk_gib=1 / 1024)
    for number in range(16):
        pool.write(number, float(number))
    for number in range(16):
        pool.disk.remove(key(number))
    taken = sum(pool.write(100 + number, 1.0, timeout=1.0) for number in range(3))
    used = pool.disk.current_cache_size
    return taken == 3, f"all removed, {used} bytes accounted; {taken} of 3 new puts accepted"


def write_failure(place: str) -> Verdict:
    """The directory vanishes while chunks are written."""
    pool = _pool(place)
    space = pool.cpu.memory_allocator.pin_allocator.address_manager
    free = space.get_free_size()
    shutil.rmtree(place)
    for number in range(8):
        pool.write(number, 1.0, timeout=0.01)
    time.sleep(1.0)
    stuck = sum(pool.disk.exists_in_put_tasks(key(number)) for number in range(8))
    lost, booked = free - space.get_free_size(), pool.disk.current_cache_size
    told = f"{stuck} of 8 writes listed for ever, {booked} bytes accounted, {lost} not returned"
    return not (stuck or booked or lost), told


def restart(place: str) -> Verdict:
    """A new backend on the directory of an old one."""
    pool = _pool(place)
    for number in range(5):
        pool.write(number, float(number))
    pool.close()
    pool = _pool(place)
    found = sum(bool(pool.disk.contains(key(number))) for number in range(5))
    return found == 5, f"{found} of 5 found, {len(os.listdir(place))} files there"


def _in_flight(place: str, policy: str) -> Verdict:
    pool, errors = _pool(place, disk_gib=1 / 1024, policy=policy), []
    for number in range(200):
        try:
            pool.write(number, 1.0, timeout=0.0)
        except Exception as error:  # noqa: BLE001 - an exception out of a put is a finding
            errors.append(type(error).__name__)
    time.sleep(2.0)
    resident, files = len(pool.disk.dict), len(os.listdir(place))
    booked = pool.disk.current_cache_size / _CHUNK
    right = not errors and resident == files == booked <= 16
    return right, f"{len(errors)} exceptions, {resident} resident, {files} files, {booked:g} booked"


def lfu_inflight(place: str) -> Verdict:
    """200 puts at once into a disk tier of 16, policy LFU."""
    return _in_flight(place, "LFU")


def lru_inflight(place: str) -> Verdict:
    """The same with LRU."""
    return _in_flight(place, "LRU")


def torn_write(place: str) -> Verdict:
    """A process is killed half way through a write."""
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})\n"
        "import peers_lmcache as peer\n"
        f"pool = peer.Pool(peer.SMALL, 0.05, directory={place!r})\n"
        "def half(self, buffer, path):\n"
        "    with open(path, 'wb') as file:\n"
        "        file.write(buffer[: len(buffer) // 2])\n"
        "        file.flush()\n"
        "        os.kill(os.getpid(), 9)\n"
        "type(pool.disk).write_file = half\n"
        "pool.write(1, 1.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    sizes = [os.path.getsize(os.path.join(place, name)) for name in os.listdir(place)]
    return not sizes, f"files under their final name: {sizes} bytes of {_CHUNK}"


def pin_leak_evict(place: str) -> Verdict:
    """RAM full of pinned chunks: what becomes of one more."""
    pool = _pool(place, gib=0.002)
    chunks = pool.fill()
    for number, chunk in enumerate(chunks):
        pool.cpu.submit_put_task(key(number), chunk)
        chunk.ref_count_down()
        pool.cpu.pin(key(number))
    there = _answers(pool.allocate, 3)
    return there, f"allocate() answers within 3 s: {there}"


def put_overwrite(place: str) -> Verdict:
    """A second put of a key, with other bytes."""
    pool = _pool(place)
    pool.write(1, 1.0)
    told = pool.write(1, 7.0)
    right = _full_of(pool.disk.get_blocking(key(1)), 1.0)
    return right and not told, f"the first one stays: {right}; the second is called done: {told}"


def use_after_evict(place: str) -> Verdict:
    """A chunk is got and released, evicted, and its memory used again."""
    pool = _pool(place, gib=0.002)
    chunk = pool.allocate()
    chunk.tensor.fill_(5.0)
    pool.cpu.submit_put_task(key(1), chunk)
    chunk.ref_count_down()
    got = pool.cpu.get_blocking(key(1))
    kept = got.tensor
    got.ref_count_down()
    pool.cpu.remove(key(1))
    pool.allocate().tensor.fill_(9.0)
    value = float(kept.view(-1)[0])
    return value == 5.0, f"reads {value:g} after another chunk took the place"


# --------------------------------------------------------------------------- the other stack

_DISTRIBUTED = "lmcache.v1.distributed"


def _manager(policy: str = "LRU", directory: str | None = None) -> Any:
    config = f"{_DISTRIBUTED}.config"
    memory = _of(config, "L1MemoryManagerConfig")(
        size_in_bytes=64 << 20, use_lazy=False, shm_name=""
    )
    adapters = []
    if directory is not None:
        adapters = [
            _of(f"{_DISTRIBUTED}.l2_adapters.fs_l2_adapter", "FSL2AdapterConfig")(directory)
        ]
    bus = "lmcache.v1.mp_observability.event_bus"
    _of(bus, "init_event_bus")(_of(bus, "EventBusConfig")())
    return _of(f"{_DISTRIBUTED}.storage_manager", "StorageManager")(
        _of(config, "StorageManagerConfig")(
            l1_manager_config=_of(config, "L1ManagerConfig")(memory_config=memory),
            eviction_config=_of(config, "EvictionConfig")(eviction_policy=policy),
            l2_adapter_config=_of(f"{_DISTRIBUTED}.l2_adapters.config", "L2AdaptersConfig")(
                adapters=adapters
            ),
        )
    )


def _name(number: int) -> Any:
    return _of(f"{_DISTRIBUTED}.api", "ObjectKey")(number.to_bytes(32, "big"), "m", 0)


def _layout() -> Any:
    kind = _of(f"{_DISTRIBUTED}.api", "MemoryLayoutDesc")
    return kind(shapes=[torch.Size([2, 1, 16, 1024])], dtypes=[torch.bfloat16])


def _admit(manager: Any, number: int) -> bool:
    found = manager.reserve_write([_name(number)], _layout())
    if found:
        manager.finish_write(list(found))
    return bool(found)


def mp_write_burst(place: str) -> Verdict:
    """4000 chunks in a row into RAM for 1000, all of it evictable."""
    manager = _manager()
    admitted = sum(_admit(manager, number) for number in range(4000))
    return admitted == 4000, f"{admitted} of 4000 admitted"


def mp_isolated_lru_thread(place: str) -> Verdict:
    """The policy with quotas runs into its watermark."""
    manager = _manager("IsolatedLRU")
    for number in range(1000):
        _admit(manager, number)
    time.sleep(3.5)
    control = manager._eviction_controller
    thread = getattr(control, "_thread", None) or getattr(control, "_eviction_thread", None)
    alive, more = bool(thread and thread.is_alive()), _admit(manager, 99_999)
    return alive and more, f"eviction thread alive: {alive}, a new chunk admitted: {more}"


def mp_lru_after_1s(place: str) -> Verdict:
    """RAM full of evictable chunks: is the next one admitted at once."""
    manager = _manager()
    for number in range(1100):
        _admit(manager, number)
    begin = time.perf_counter()
    first = _admit(manager, 99_999)
    while not first and time.perf_counter() - begin < 10 and not _admit(manager, 99_999):
        time.sleep(0.01)
    return first, f"admitted after {time.perf_counter() - begin:.2f} s"


def mp_poisoned_key_e2e(place: str) -> Verdict:
    """A chunk leaves RAM, its file is truncated; it is recomputed and stored again."""
    api = f"{_DISTRIBUTED}.api"
    manager = _manager(directory=place)

    def store() -> None:
        found = manager.reserve_write([_name(1)], _layout())
        for chunk in found.values():
            chunk.tensor.fill_(3.0)
        manager.finish_write(list(found))
        time.sleep(1.0)

    def fetch() -> int:
        manager._l1_manager.clear(force=True)
        keys = _of(api, "GroupedObjectKeys")(
            keys=[_name(1)], object_group_id=0, layout_desc=_layout()
        )
        handle = manager.submit_prefetch_task(_of(api, "PrefetchTaskSpec")(key_groups=[keys]))
        manager.wait_prefetch_status(handle, 5)
        hits: int = manager.query_prefetch_status(handle).hit_cells[0].popcount()
        if hits:
            manager.finish_read_prefetched([_name(1)])
        return hits

    store()
    first = fetch()
    (file,) = [x for x in os.listdir(place) if x.endswith(".data")]
    os.truncate(os.path.join(place, file), 100)
    second = fetch()
    store()
    third = fetch()
    right = (first, second, third) == (1, 0, 1)
    return right, f"hits {first}, truncated {second}, stored anew {third}"


def fs_l2(place: str) -> Verdict:
    """A file of the other stack is truncated, stored anew, then rots."""
    module = f"{_DISTRIBUTED}.l2_adapters.fs_l2_adapter"
    pool = Pool(SMALL, 0.05)
    adapter = _of(module, "FSL2Adapter")(_of(module, "FSL2AdapterConfig")(place))

    def wait(ask: Callable[[], Any]) -> Any:
        for _ in range(500):
            found = ask()
            if found:
                return found
            time.sleep(0.01)
        return None

    def store() -> None:
        chunk = pool.allocate()
        chunk.tensor.fill_(3.0)
        adapter.submit_store_task([_name(1)], [chunk])
        wait(adapter.pop_completed_store_tasks)

    def load() -> float | None:
        chunk = pool.allocate()
        chunk.tensor.fill_(0.0)
        task = adapter.submit_load_task([_name(1)], [chunk])
        found = wait(lambda: adapter.query_load_result(task))
        if found is None or not found.popcount():
            return None
        return float(chunk.tensor.view(-1)[0])

    store()
    (file,) = [os.path.join(place, x) for x in os.listdir(place)]
    os.truncate(file, 100)
    first = load()
    store()
    second = load()
    if os.path.exists(file):
        os.unlink(file)
    store()
    with open(file, "r+b") as damaged:
        damaged.write(b"\xff\x7f" * 4)
    third = load()
    right = (first, second, third) == (None, 3.0, None)
    return right, f"truncated {first}, stored anew {second}, rotten {third}"


def probe(which: str, directory: str) -> Verdict:
    """Run a probe in an empty directory; an exception out of it is a finding too."""
    import logging

    logging.disable(logging.CRITICAL)
    os.makedirs(directory, exist_ok=True)
    try:
        verdict: Verdict = globals()[which](directory)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return False, f"{type(error).__name__}: {error}"[:200]
    return verdict
