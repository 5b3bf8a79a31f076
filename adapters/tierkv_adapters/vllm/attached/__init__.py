"""``attach`` and its handles: a manager joined to vLLM's arguments, or to a built engine."""
