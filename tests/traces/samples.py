"""Small traces of every format, as text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

MOONCAKE = "\n".join(
    json.dumps(row)
    for row in (
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 2000, "input_length": 600, "output_length": 1, "hash_ids": [0, 9]},
    )
)


def _call(t: float, keep: int, new: list[list[int]], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 9, "out": 3, "keep": keep, "new": new, **more}


WEKA = "\n".join(
    json.dumps(row)
    for row in (
        {
            "id": "one",
            "hash_id_scope": "local",
            "requests": [
                _call(0.0, 0, [[1, 4]], stop="tool_use", api_time=2.5),
                {
                    "type": "subagent",
                    "agent_id": "helper",
                    "t": 5.0,
                    "requests": [_call(5.0, 0, [[100, 2]], stop=""), _call(7.0, 1, [[102, 1]])],
                },
                # keeps blocks of its own last request, of which the sub-agent's has but two
                _call(9.0, 4, [[5, 1], [7, 1]], stop="end_turn"),
            ],
        },
        {"id": "two", "hash_id_scope": "local", "requests": [_call(0.0, 0, [[1, 4]])]},
    )
)
MAGAGENT = "\n".join(
    json.dumps(row)
    for row in (
        {"session": 0, "t": 3.0, "in_chars": 600, "out_chars": 80, "hash_ids": [0, 1]},
        {"session": 1, "t": 1.0, "in_chars": 300, "out_chars": 8, "hash_ids": [5]},
    )
)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,130,10
2023-11-16 18:17:05.2299600,64,2
"""
CHAT = "\n".join(
    json.dumps(row)
    for row in (
        {
            "timestamp": "2026-01-01T00:00:00+00:00",
            "session": "chat",
            "messages": [{"role": "user", "content": "a" * 600}],
            "choices": [
                {
                    "message": {"role": "assistant", "content": "b" * 300},
                    "finish_reason": "tool_use",
                }
            ],
            "usage": {"completion_tokens": 70},
        },
        {
            "timestamp": "2026-01-01T00:00:30+00:00",
            "session": "chat",
            "body": {
                "messages": [
                    {"role": "user", "content": "a" * 600},
                    {"role": "assistant", "content": "b" * 300},
                    {"role": "user", "content": [{"type": "text", "text": "c" * 300}]},
                ]
            },
        },
    )
)
ALL = {"mooncake": MOONCAKE, "weka": WEKA, "magagent": MAGAGENT, "azure": AZURE, "chat": CHAT}


def public(name: str) -> Path:
    """A public trace; the test is skipped where there is none."""
    folder = Path(os.environ.get("TIERKV_TRACES", Path(__file__).parents[3] / "shared/traces"))
    if not (folder / name).exists():
        pytest.skip(f"no {name} in {folder} (set TIERKV_TRACES)")
    return folder / name
