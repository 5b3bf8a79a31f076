"""Backends that ship with tierkv: ``host`` (RAM) and ``nvme`` (local disk)."""
