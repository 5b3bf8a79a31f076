"""What a model is taken to be, once somebody changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv_adapters.hf.attachment import Attachment

if TYPE_CHECKING:
    import pytest


def test_i1_another_window_in_the_configuration_is_another_cache(
    gemma3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is made after the configuration, which is no weight."""
    attachment = Attachment(gemma3, None, 8)
    before = attachment.bind()
    assert attachment.bind() == before
    window = gemma3.config.sliding_window
    assert window in {layer.window for layer in before.layers}
    monkeypatch.setattr(gemma3.config, "sliding_window", window // 2)  # others have it, too
    after = attachment.bind()
    assert window // 2 in {layer.window for layer in after.layers}
    assert window not in {layer.window for layer in after.layers}
    assert after.space.fingerprint != before.space.fingerprint
    assert not attachment.unchanged(before)
