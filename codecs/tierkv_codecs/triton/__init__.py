"""Codecs in device memory: Triton kernels with the bits of the torch paths.

:mod:`tierkv_codecs.accelerated` decides when they run, and alone imports them: nothing here is
loaded before a tensor in device memory comes. :mod:`~tierkv_codecs.triton.coding` launches them,
for many sections at once; kernels of groups are in ``groups`` and ``settling``, those of rotated
rows in ``rotation``, how numbers are rounded in ``arithmetic``.

*Who calls them.* Whoever gives a codec a tensor in device memory, or ``coding`` a batch of them.
The engine does neither yet: it copies the raw sections of a device's tensors to host memory, where
threads encode them (:mod:`tierkv.mover.frames`), and the frames of device tiers are raw. One
section is no match for a GPU: a handful of launches take longer than a core takes to encode 128
KiB. So that what the engine is to call one day is the batch.

*What has no kernel.* ``planes`` and the other bytes codecs: they compress on the CPU, every byte
has to cross the bus for that, and to split bytes is a small part of their work there.
"""
