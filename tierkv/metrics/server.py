"""The optional HTTP page, on the loopback interface only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    import threading
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer", "serve"]


class MetricsServer:
    """An HTTP server for ``/metrics`` on the loopback interface, in a thread of its own."""

    __slots__ = ("_server", "_thread", "port")

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread: threading.Thread | None = thread
        self.port = server.server_port

    def __repr__(self) -> str:
        state = "open" if self._thread else "closed"
        return f"<MetricsServer 127.0.0.1:{self.port} {state}>"

    def close(self) -> None:
        """Stop serving and free the port; idempotent. Blocks up to half a second."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def serve(registry: CollectorRegistry, port: int) -> MetricsServer:
    """Serve ``registry`` at ``http://127.0.0.1:<port>/metrics`` until closed.

    Args:
        registry: What to serve, e.g. :attr:`MetricsObserver.registry`.
        port: Loopback port; 0 picks a free one (see :attr:`MetricsServer.port`).

    Raises:
        ConfigError: if the port cannot be opened, e.g. because it is in use.
    """
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics_port {port}: cannot listen on 127.0.0.1 ({error}); "
            f"choose another port, or 0 for any free one"
        ) from error
    return MetricsServer(server, thread)
