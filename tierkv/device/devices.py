"""The devices of one engine: made by name, found by tensor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tierkv.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.abc import Device, View

__all__ = ["Devices"]

_log = logging.getLogger(__name__)


class Devices:
    """The devices of one engine; iterates over those that are known now."""

    def __init__(self) -> None:
        self._known: dict[str, Device] = {}

    def __repr__(self) -> str:
        return f"<Devices {', '.join(self._known) or 'none'}>"

    def __iter__(self) -> Iterator[Device]:
        return iter(list(self._known.values()))

    def open(self, name: str) -> Device:
        """The device of that name (``"cuda:0"``, ``"cpu"``), made on first use.

        Raises:
            ConfigError: if no plug-in has that kind.
            BackendError: if there is no such device here.
        """
        if name not in self._known:
            made: Device = resolve("devices", name.partition(":")[0])(name)
            known = self._known.setdefault(made.name, made)
            if known is not made:  # "cuda" is "cuda:0"
                made.close()
            return known
        return self._known[name]

    def add(self, device: Device) -> None:
        """Take in a device that a tier made."""
        self._known[device.name] = device

    def of(self, view: View) -> Device | None:
        """The device whose memory the view is in; None: plain host memory.

        The CPU is a device where a tier uses it as one, and then only.

        Raises:
            ConfigError: if no plug-in knows such memory.
            BackendError: if the plug-in finds no such device.
        """
        tensor = view.anchor()
        if tensor is None:
            return None
        for device in self:
            if device.owns(tensor):
                return device
        return None if tensor.device.type == "cpu" else self.open(str(tensor.device))

    def close(self) -> None:
        """Close every device, whatever one of them raises. Idempotent."""
        for device in self:
            try:
                device.close()
            except Exception as error:  # noqa: BLE001 - a third-party device may raise anything
                _log.warning("device %s failed while it was closed: %r", device.name, error)
