"""Eviction policies, one a file; each orders the evictable rows of one partition of a tier.

The core decides *whether* a row may go (leases, children, last copies), a policy only *which*.
"""
