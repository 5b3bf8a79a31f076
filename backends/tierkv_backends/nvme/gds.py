"""GPUDirect Storage as kvikio offers it: whether it is here, whether it works, and how.

kvikio is one per process: its thread pool must not be resized once transfers run (they hang), and
does not survive a fork (they hang, too). So it is set up once, in the first root that wants it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv_backends.nvme.transfer import PAGE, open_at

if TYPE_CHECKING:
    import torch

__all__ = ["INSTALL", "DeviceArray", "Kvikio", "Unavailable", "load"]

INSTALL: Final = "pip install --no-deps kvikio-cu12 and the wheels that README names"
_THREADS: Final = 4
_PROBE: Final = "probe"
_PROBE_S: Final = 10.0
_MEMORY_TYPE: Final = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
_COMPAT_ON: Final = "ON"

_lock = threading.Lock()
_loaded: Kvikio | None = None


class Unavailable(Exception):
    """kvikio cannot be used here; says why."""


class DeviceArray:
    """A tensor as kvikio wants it; keeps the tensor alive.

    Args:
        tensor: uint8, one-dimensional, contiguous.
    """

    __slots__ = ("__cuda_array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class Kvikio:
    """The library, set up for this process.

    Attributes:
        version: Of the library.
        pid: Process that loaded it.
        mode: ``"gds"``, or ``"posix"`` where cuFile is missing or switched off: the library then
            copies through buffers of its own in host memory.
    """

    def __init__(self) -> None:
        """Import and set up; see :func:`load`."""
        if importlib.util.find_spec("kvikio") is None:
            raise Unavailable(f"kvikio is not installed ({INSTALL})")
        try:
            self._driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise Unavailable(f"there is no CUDA driver ({error})") from error
        self._driver.cuPointerGetAttribute.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint64,
        )
        ours = "kvikio" not in sys.modules
        try:
            self._module = importlib.import_module("kvikio")
            defaults = importlib.import_module("kvikio.defaults")
            # once, before anything runs: whoever used it before us, or set its environment,
            # chose a number already, and changing it under running transfers hangs them
            if ours and not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys():
                defaults.set("num_threads", _THREADS)
            if "KVIKIO_AUTO_DIRECT_IO_READ" not in os.environ:
                defaults.set("auto_direct_io_read", True)
            self.mode = self._find_mode(defaults)
        except Exception as error:
            raise Unavailable(f"kvikio cannot be loaded: {error}") from error
        self.version = str(self._module.__version__)
        self.pid = os.getpid()

    def open(self, fd: int) -> Any:
        """Open the file behind a descriptor once more, for reading and writing.

        Returns:
            A ``kvikio.CuFile``.

        Raises:
            RuntimeError: if kvikio cannot.
        """
        return self._module.CuFile(f"/proc/self/fd/{fd}", "r+")

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Whether the driver takes this memory for a device's. Quick."""
        kind = ctypes.c_uint(0)
        code = self._driver.cuPointerGetAttribute(
            ctypes.byref(kind), _MEMORY_TYPE, tensor.data_ptr()
        )
        return code == 0 and kind.value == _DEVICE

    def probe(self, directory: int) -> None:
        """Write a page and read it back with the library. Blocks.

        Raises:
            Unavailable: if that does not work, or does not end: as after a fork of a process that
                had used kvikio.
        """
        page = np.full(PAGE, 0xA5, np.uint8)
        back = np.zeros(PAGE, np.uint8)
        fd = -1
        try:
            fd = open_at(directory, _PROBE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            file = self.open(fd)
            _await(file.pwrite(page), file)
            _await(file.pread(back), file)
            file.close()
        except Exception as error:
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(f"kvikio does not work here: {error}") from error
        finally:
            if fd >= 0:
                os.close(fd)
                os.unlink(_PROBE, dir_fd=directory)
        if not np.array_equal(page, back):
            raise Unavailable("kvikio reads other bytes than it wrote")

    def _find_mode(self, defaults: Any) -> str:
        driver = importlib.import_module("kvikio.cufile_driver")
        forced = getattr(defaults.get("compat_mode"), "name", "") == _COMPAT_ON
        try:
            return "gds" if driver.get("is_gds_available") and not forced else "posix"
        except RuntimeError:  # no cuFile at all
            return "posix"


_stuck: list[object] = []  # what a transfer that never ended may still touch


def _await(future: Any, *held: object) -> None:
    end = time.monotonic() + _PROBE_S
    while not future.done():
        if time.monotonic() > end:
            _stuck.extend((future, held))
            raise Unavailable(
                "kvikio does not answer; a process forked after it was used has to be spawned "
                "instead"
            )
        time.sleep(0.0005)
    future.get()


def load() -> Kvikio:
    """Set kvikio up, once per process. Blocks, and imports a library.

    Raises:
        Unavailable: if it is not installed, does not load, or was loaded by a parent process.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = Kvikio()
        if _loaded.pid != os.getpid():
            raise Unavailable(
                "kvikio was loaded before this process was forked, and its threads are gone; start "
                "worker processes by spawn"
            )
        return _loaded
