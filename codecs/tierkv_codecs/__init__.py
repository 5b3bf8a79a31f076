"""Codecs that come with tierkv; they are found by name through :mod:`tierkv.registry`."""
