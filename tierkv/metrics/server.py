"""The optional HTTP page, on the loopback interface only."""

from __future__ import annotations

import logging
import threading
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry

__all__ = ["MetricsServer", "serve"]

_log: Final = logging.getLogger("tierkv.metrics")
_PATH: Final = "/metrics"
_LOOPBACK: Final = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a scrape that hangs does not keep the process


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape every few seconds is no news."""


class MetricsServer:
    """An HTTP server for ``/metrics`` on the loopback interface, in a thread of its own."""

    __slots__ = ("_server", "_thread", "port")

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread: threading.Thread | None = thread
        self.port = server.server_port

    def __repr__(self) -> str:
        state = "open" if self._thread else "closed"
        return f"<MetricsServer {_LOOPBACK}:{self.port} {state}>"

    def close(self) -> None:
        """Stop serving and free the port; idempotent. Blocks up to half a second."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def serve(registry: CollectorRegistry, port: int) -> MetricsServer:
    """Serve ``registry`` at ``http://127.0.0.1:<port>/metrics`` until closed; log where.

    Any other path is answered with 404.

    Args:
        registry: What to serve, e.g. :attr:`MetricsObserver.registry`.
        port: Loopback port; 0 picks a free one (see :attr:`MetricsServer.port`).

    Raises:
        ConfigError: if the port cannot be opened, e.g. because it is in use.
    """
    page = make_wsgi_app(registry)
    try:
        server = make_server(_LOOPBACK, port, _one_path(page), _Server, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics_port {port}: cannot listen on {_LOOPBACK} ({error}); "
            f"choose another port, or 0 for any free one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="tierkv-metrics", daemon=True)
    thread.start()
    _log.info("metrics at http://%s:%d%s", _LOOPBACK, server.server_port, _PATH)
    return MetricsServer(server, thread)


def _one_path(page: WSGIApplication) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _PATH:
            return page(environ, start)
        start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"there is only {_PATH} here\n".encode()]

    return answer
