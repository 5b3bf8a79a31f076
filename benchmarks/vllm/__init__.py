"""Real vLLM with tierkv and with what it brings itself, on the same work; see ``__main__``."""
