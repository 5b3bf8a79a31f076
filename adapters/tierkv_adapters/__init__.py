"""Adapters that plug tierkv into inference libraries; each is a subpackage, loaded on demand."""
