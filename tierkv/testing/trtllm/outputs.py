"""What ``build_connector_meta`` gets: the data classes of both APIs, field by field as there."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FirstOutput", "FirstRequestData", "SecondOutput", "SecondRequestData"]


@dataclass
class FirstRequestData:
    """``RequestData`` of the first API."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class FirstOutput:
    """``SchedulerOutput`` of the first API."""

    new_requests: list[FirstRequestData] = field(default_factory=list)
    cached_requests: list[FirstRequestData] = field(default_factory=list)


@dataclass
class SecondRequestData:
    """``RequestData`` of the second API."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SecondOutput:
    """``SchedulerOutput`` of the second API."""

    new_requests: list[SecondRequestData] = field(default_factory=list)
    cached_requests: list[SecondRequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None
