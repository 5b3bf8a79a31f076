"""Eviction policies, one a file; each orders the evictable rows of one partition of a tier.

The core decides *whether* a row may go (leases, children, last copies), a policy only *which*.
:mod:`heap` orders rows by a rank, :mod:`queues` in two queues, :mod:`rows` keeps numbers by row,
:mod:`ghosts` what is remembered of parts that left.
"""
