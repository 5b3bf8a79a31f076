"""How bytes travel between the caller's memory and the tiers.

``core`` joins decisions to backends; ``fetch`` reads whole frames once for all who want them;
``load`` and ``layers`` put them into views; ``store`` takes them out; ``behind`` copies to slower
tiers. Everything that must not be cut in half belongs to the engine, never to a caller.
"""
