"""What another process may ask of a manager: every request is checked before it is carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tierkv.blocks import KEY_BYTES, BlockKey
from tierkv.errors import ConfigError
from tierkv_adapters.remote.wire import unpack_media, unpack_tokens

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Mapping

    from tierkv.blocking import CacheManager
    from tierkv.blocks import Media
    from tierkv.layout import Space

__all__ = ["Fields", "Operations"]

_T = TypeVar("_T")
_REQUIRED: Final = object()


class Fields:
    """The fields of one request, each of the kind that it should be, or a typed error."""

    def __init__(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._header = header
        self.body = body

    def get(self, name: str, kind: type[_T], default: object = _REQUIRED) -> _T:
        """One field.

        Raises:
            ConfigError: if it is missing or of another kind.
        """
        value = self._header.get(name, default)
        if value is default and default is not _REQUIRED:
            return cast("_T", default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"a request's {name!r} is a {kind.__name__}; this one's is not")
        return value

    def either(self, name: str) -> float | str | None:
        """A duration: seconds, text, or nothing.

        Raises:
            ConfigError: if it is something else.
        """
        value = self._header.get(name)
        if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"a request's {name!r} is a duration; this one's is not")

    def raw(self, name: str) -> bytes | None:
        """Bytes, which travel in hexadecimal; None if there are none.

        Raises:
            ConfigError: if these are none.
        """
        text = self._header.get(name)
        if text is None:
            return None
        try:
            return bytes.fromhex(text)
        except (TypeError, ValueError):  # said without the value: it may be a salt
            raise ConfigError(f"a request's {name!r} is hexadecimal; this one's is not") from None

    def tokens(self) -> array[int] | None:
        """Token ids, if the request has some."""
        return unpack_tokens(self.body) if self.get("tokens", bool, False) else None

    def media(self) -> tuple[Media, ...]:
        """Content behind placeholder tokens; nothing if the request says nothing of it."""
        return unpack_media(self._header.get("media"))

    def keys(self) -> tuple[BlockKey, ...]:
        """Block keys, which are the body.

        Raises:
            ConfigError: if these are not whole keys.
        """
        body = self.body
        if len(body) % KEY_BYTES:
            raise ConfigError(f"{len(body)} bytes are no list of block keys")
        return tuple(BlockKey(body[at : at + KEY_BYTES]) for at in range(0, len(body), KEY_BYTES))


class Operations:
    """The operations on sessions and on the whole, on the loop of the manager's engine."""

    def __init__(self, manager: CacheManager, about: Callable[[], Mapping[str, Any]]) -> None:
        self._manager = manager
        self._told = about
        self.table: dict[str, Callable[[Fields], Awaitable[object]]] = {
            "about": self._about,
            "clear_session": self._clear,
            "create_session": self._create,
            "destroy_session": self._destroy,
            "explain": self._explain,
            "flush": self._flush,
            "hint": self._hint,
            "knows_session": self._knows,
            "prefetch": self._prefetch,
            "reset": self._reset,
            "sessions": self._sessions,
            "stats": self._stats,
        }

    def space(self, fields: Fields) -> Space:
        """The space that a request names, or the only one there is.

        Raises:
            ConfigError: if there is none.
        """
        return self._manager.space(fields.raw("space"))

    def _named(self, fields: Fields) -> Space | None:
        return None if fields.raw("space") is None else self.space(fields)

    async def _about(self, _: Fields) -> dict[str, Any]:
        return dict(self._told())

    async def _create(self, fields: Fields) -> str:
        fidelity = fields.get("fidelity", str, None)
        return self._manager.create_session(
            fields.get("name", str, None),
            tenant=fields.get("tenant", str, ""),
            ttl=fields.either("ttl"),
            fidelity=fidelity,
            salt=fields.raw("salt") or b"",
            adopt=fields.get("adopt", bool, False),
        )

    async def _knows(self, fields: Fields) -> bool:
        return self._manager.knows_session(fields.get("name", str))

    async def _clear(self, fields: Fields) -> None:
        await self._manager.aclear_session(fields.get("name", str))

    async def _destroy(self, fields: Fields) -> None:
        self._manager.destroy_session(fields.get("name", str))

    async def _sessions(self, _: Fields) -> object:
        return await self._manager.asessions()

    async def _stats(self, _: Fields) -> object:
        return await self._manager.astats()

    async def _flush(self, _: Fields) -> object:
        return await self._manager.engine.flush()

    async def _reset(self, _: Fields) -> int:
        return await self._manager.areset()

    async def _explain(self, fields: Fields) -> object:
        ids = fields.tokens()
        name = fields.get("session", str, None)
        asked = [] if ids is None else ids
        return await self._manager.aexplain(asked, name, self.space(fields), fields.media())

    async def _prefetch(self, fields: Fields) -> None:
        name = fields.get("session", str, None)
        await self._manager.aprefetch(fields.tokens(), name, self._named(fields), fields.media())

    async def _hint(self, fields: Fields) -> None:
        await self._manager.ahint(
            fields.get("session", str),
            self._named(fields),
            fields.either("next_in"),
            fields.get("stop_reason", str, None),
        )
