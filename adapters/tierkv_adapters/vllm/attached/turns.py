"""From a prompt in a session to a request of vLLM, and from its output to a reply."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.errors import AttachError, ConfigError
from tierkv_adapters.chat import GenerateResult, encode_prompt
from tierkv_adapters.vllm.attached.history import Histories
from tierkv_adapters.vllm.attached.sampling import prompt_of, sampling_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocking import CacheManager
    from tierkv.blocking.names import SessionFacts

__all__ = ["OWN_CACHE", "Turn", "Turns"]

OWN_CACHE = "vllm"
"""What ``by_tier`` calls vLLM's own prefix cache."""


@dataclass(slots=True)
class Turn:
    """One turn of a session, as vLLM is asked for it.

    Attributes:
        facts: The session.
        ids: Ids of the whole prompt.
        prompt: What vLLM takes for a prompt.
        params: ``SamplingParams``.
        id: Name of the request.
        ttft_s: Seconds to the first new token, once there is one.
    """

    facts: SessionFacts
    ids: list[int]
    prompt: Any
    params: Any
    id: str = field(default_factory=lambda: f"tierkv-{uuid.uuid4().hex}")
    ttft_s: float | None = None


class Turns:
    """Begins and ends the turns of a manager's sessions.

    Args:
        manager: Whose sessions.
        texts: Whether the engine turns tokens into text.
    """

    def __init__(self, manager: CacheManager, *, texts: bool) -> None:
        self.manager = manager
        self.texts = texts
        self._histories = Histories(manager)

    def named(self, session: str | None) -> str:
        """The session that is meant: the one named, or the current one.

        Raises:
            ConfigError: if there is neither.
        """
        name = session if session is not None else self.manager.current_session()
        if name is None:
            raise ConfigError(
                "no session is current: name session=, or call this inside "
                "'with manager.use_session(id)'"
            )
        return name

    def begin(
        self,
        prompt: str | Sequence[int],
        name: str,
        tokenizer: Any,
        arguments: dict[str, Any],
        *,
        chat: bool,
        append: bool | None,
    ) -> Turn:
        """The request of a turn: the session's tokens, then the prompt's, joined by ids.

        Raises:
            AttachError: if the prompt or an argument cannot be used.
            ConfigError: if there is no such session.
        """
        facts, history = self._histories.begin(name)
        ids = encode_prompt(prompt, history, tokenizer, chat=chat, append=append)
        ours: dict[str, Any] = {
            "session": name,
            "tenant": facts.tenant,
            "salt": facts.salt.hex(),
            "report": True,
        }
        if facts.ttl is not None:
            ours["ttl"] = facts.ttl
        if not self.texts:
            arguments = {**arguments, "detokenize": False}
        # vLLM's own cache knows salts, and no tenants
        salt = _own_salt(facts) if facts.tenant or facts.salt else None
        return Turn(facts, ids, prompt_of(ids, salt), sampling_params(arguments, ours))

    def end(self, turn: Turn, output: Any) -> GenerateResult:
        """The reply of a turn that is over; the session has seen it from now on.

        Args:
            turn: The turn.
            output: vLLM's finished ``RequestOutput``.

        Raises:
            AttachError: if vLLM gave no reply.
        """
        if not output.outputs:
            raise AttachError(f"vLLM gave no reply to request {turn.id}")
        reply = output.outputs[0]
        whole = [*turn.ids, *reply.token_ids]
        self._histories.remember(turn.facts, whole)
        told = (output.kv_transfer_params or {}).get("tierkv") or {}
        own, loaded, tier = told.get("own", 0), told.get("loaded", 0), told.get("tier")
        by_tier = {name: n for name, n in ((OWN_CACHE, own), (tier or "?", loaded)) if n}
        return GenerateResult(
            text=reply.text if self.texts else None,
            input_ids=turn.ids,
            output_ids=whole,
            prompt_tokens=len(turn.ids),
            reused_tokens=min(own + loaded, len(turn.ids) - 1),  # the last one is computed again
            tier=tier if loaded else OWN_CACHE if own else None,
            by_tier=by_tier,
            ttft_s=turn.ttft_s or 0.0,
        )


def _own_salt(facts: SessionFacts) -> str:
    """Salt for vLLM's own cache; a digest, since a tenant and a salt are any text and any bytes."""
    tenant = facts.tenant.encode()
    return hashlib.sha256(len(tenant).to_bytes(8, "little") + tenant + facts.salt).hexdigest()
