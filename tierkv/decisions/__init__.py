"""Decisions: where a part lives, who is evicted, what may be loaded. Sans-IO.

Nothing here awaits, imports torch or owns a clock. The live engine and the offline replay drive
the very same objects.
"""
