"""The socket is its owner's alone, and its file is replaced or left alone as it should be."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

import tierkv
from tests.serving.remote_rig import HELLO, dial, rest, works
from tierkv.blocking import CacheManager
from tierkv.errors import ClosedError, ConfigError
from tierkv_adapters.remote import RemoteManager, RemoteServer, connections
from tierkv_adapters.remote import server as serving
from tierkv_adapters.remote.listening import listen

TIERS = [tierkv.Tier("host", "8MiB")]


# ---------------------------------------------------------------------- whose it is


def test_s3_the_socket_is_its_owners_alone(manager: CacheManager, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RemoteServer(manager, tmp_path / "new" / "e.sock"):
            folder = (tmp_path / "new").stat()
            assert stat.S_IMODE(folder.st_mode) == 0o700
            assert stat.S_IMODE((tmp_path / "new" / "e.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_s3_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    for mode in (0o755, 0o770, 0o701):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match=r"others may enter .* mode 0700"):
            listen(tmp_path / "e.sock")
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="no folder for a socket"):
        listen(tmp_path / "link" / "e.sock")
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        listen(tmp_path / ("x" * 100))


def test_s4_another_user_is_refused_by_both_ends(
    server: RemoteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RemoteManager(server.path)
    with monkeypatch.context() as patch:
        patch.setattr(serving, "peer_is_me", lambda _: False)
        assert rest(dial(server)) == b""
        with pytest.raises(ClosedError):
            client.create_session("a", salt=b"grain")
    with monkeypatch.context() as patch:
        patch.setattr(connections, "peer_is_me", lambda _: False)
        with pytest.raises(ConfigError, match="another user"):
            client.create_session("a", salt=b"grain")
    assert client.sessions() == []
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_s4_a_process_of_another_user_hears_nothing(server: RemoteServer) -> None:
    folder = Path(server.path).parent

    def try_it() -> bytes:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # nothing of pytest may run in here
            try:
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect("e.sock")
                    sock.sendall(HELLO)
                    os.write(write, b"heard " + sock.recv(100))
            except OSError as error:
                os.write(write, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            heard = told.read()
        os.waitpid(child, 0)
        return heard

    here = Path.cwd()
    os.chdir(folder)  # the folders above are pytest's
    try:
        assert try_it() == b"PermissionError"
        folder.chmod(0o755)
        Path(server.path).chmod(0o666)
        assert try_it() in (b"heard ", b"ConnectionResetError", b"BrokenPipeError")
    finally:
        os.chdir(here)
    works(server)


def test_s4_no_port_is_opened(server: RemoteServer) -> None:
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is(fd)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not mine & {f"socket:[{row.split()[9]}]" for row in rows}


def _is(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # the descriptor of the listing
        return False


# ---------------------------------------------------------------------- the file


def test_what_a_dead_process_left_is_replaced(manager: CacheManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen(1)
    assert path.exists()
    with RemoteServer(manager, path) as server:
        works(server)


def test_a_forked_child_does_not_keep_the_socket_of_a_dead_parent_alive(
    manager: CacheManager, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    dying = listen(tmp_path / "e.sock")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:  # nothing of pytest may run in here
        ours.close()
        theirs.send(b"!")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    assert ours.recv(1) == b"!"
    dying.sock.close()  # as the kernel does for a process that dies
    try:
        with RemoteServer(manager, tmp_path / "e.sock") as server:
            works(server)
    finally:
        ours.close()
        os.waitpid(child, 0)


def test_what_is_no_socket_is_left_alone(manager: CacheManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "e.sock"
    path.write_text("a poem")
    server = RemoteServer(manager, path)
    with pytest.raises(ConfigError, match="is no socket"):
        server.start()
    server.close()
    assert path.read_text() == "a poem"


def test_a_living_server_is_not_pushed_aside(server: RemoteServer) -> None:
    with CacheManager(tiers=TIERS) as other:
        with pytest.raises(ConfigError, match="belongs to a server that runs"):
            RemoteServer(other, server.path).start()
        works(server)
        Path(server.path).unlink()  # somebody made room by force
        with RemoteServer(other, server.path) as heir:
            server.close()
            works(heir)  # its file was not taken along
        assert not Path(server.path).exists()


def test_a_folder_that_another_process_has_locked_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    from tierkv_adapters.remote import listening

    monkeypatch.setattr(listening, "_PATIENCE_S", 0.05)
    tmp_path.chmod(0o700)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="has locked this folder"):
            listen(tmp_path / "e.sock")
    finally:
        os.close(folder)
    listen(tmp_path / "e.sock").close()
