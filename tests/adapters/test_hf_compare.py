"""The margin rule: what is excused, what is not, and that it is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tierkv_adapters.hf.compare import MARGIN, Comparison, compare_tokens


class Scripted(torch.nn.Module):
    """A model whose logits after any prompt are given."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)
        self.embedding = torch.nn.Embedding(2, 1)
        self.asked: list[list[int]] = []

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.asked.append(input_ids[0].tolist())
        return SimpleNamespace(logits=self.logits.expand(1, input_ids.shape[1], -1))


def compare(logits: list[float], reference: list[int], other: list[int]) -> tuple[Any, list[str]]:
    said: list[str] = []
    return compare_tokens(Scripted(logits), reference, other, said.append), said


def test_equal_sequences_ask_the_model_nothing() -> None:
    model = Scripted([0.0, 1.0])
    assert compare_tokens(model, [1, 2], [1, 2]) == Comparison(identical=True, excused=False)
    assert model.asked == []


def test_a_near_tie_is_excused_and_said() -> None:
    result, said = compare([5.0, 5.0 + MARGIN / 2, 1.0], [9, 1, 4], [9, 0, 8, 8])
    assert result.ok
    assert result.excused
    assert not result.identical
    assert result.position == 1
    assert 0 < result.margin < MARGIN
    assert len(said) == 1
    assert "excused: token 1 is 0 instead of 1" in said[0]


def test_a_clear_difference_is_not_excused() -> None:
    result, said = compare([5.0, 5.0 + MARGIN * 2, 1.0], [9, 1], [9, 0])
    assert not result.ok
    assert result.margin > MARGIN
    assert said == []


def test_a_third_token_is_not_excused_by_a_near_tie() -> None:
    result, said = compare([5.0, 5.0, 1.0], [9, 1], [9, 2])
    assert not result.ok
    assert said == []


def test_lengths_and_first_tokens_are_never_excused() -> None:
    for reference, other in ([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3]), ([1], [2]), ([1], []):
        result, said = compare([5.0, 5.0], reference, other)
        assert not result.ok
        assert said == []


def test_only_the_shared_prefix_is_run() -> None:
    model = Scripted([1.0, 2.0])
    compare_tokens(model, [7, 8, 9, 1], [7, 8, 5, 1])
    assert model.asked == [[7, 8]]
