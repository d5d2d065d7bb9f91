"""The two NBD front-ends as processes over fake disks: our server, and nbdkit with the plugin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import Forked
from tests.support.nbdkit import need
from tests.support.target import ROOT
from tests.support.until import until_blocking

PLUGIN = ROOT / "tests" / "nbd_plugin" / "fake_plugin.py"
URL = "iser://127.0.0.1/iqn.2026-11.example:fake/0"
MIB = 1 << 20
BY_NBDKIT, BY_ISERBLK = "nbdkit", "iserblk"
SERVERS = (BY_ISERBLK, BY_NBDKIT)


def libnbd() -> Any:
    """libnbd's Python module."""
    return pytest.importorskip("nbd", reason="libnbd's Python module is missing: python3-libnbd")


class Server:
    """A server in the foreground. ``words``: its parameters; ``options``: those that both have, in
    front of them. ``listen``: of our server, in place of the socket. ``uri``: of our server.
    ``log`` has the calls of the fake disks."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        words: list[str],
        luns: list[dict[str, Any]],
        read_only: bool = False,
        options: Sequence[str] = (),
        listen: str = "",
        **faults: str,
    ) -> None:
        self.kind = kind
        self.socket = directory / "nbd.sock"
        self.calls = directory / "calls"
        self.size = directory / "size"
        pidfile = directory / "pid"
        self.clients: list[Any] = []
        environment = dict(
            os.environ,
            FAKE_LUNS=json.dumps(luns),
            FAKE_LOG=str(self.calls),
            FAKE_SIZE=str(self.size),
            PYTHONPATH=str(ROOT),
            **({"FAKE_FAULTS": json.dumps(faults)} if faults else {}),
        )
        self.process: subprocess.Popen[str] | Forked
        if kind == BY_NBDKIT:
            environment.pop("PYTHONPATH")  # the plugin finds its packages by itself
            command = ["nbdkit", "-f", "-U", str(self.socket), "-P", str(pidfile)]
            command += [*(["-r"] if read_only else []), *options]
            command += ["python", str(PLUGIN), *words]
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        else:
            command = [URL, *(["--listen", listen] if listen else ["--socket", str(self.socket)])]
            command += ["--read-only"] if read_only else []
            self.process = Forked(
                "tests.contract.fake_server",
                [*command, *options, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=ROOT,
            )
        assert self.process.stdout is not None
        if kind == BY_NBDKIT:
            until_blocking(lambda: pidfile.exists() or self.process.poll() is not None)
            self.uri = ""
        else:
            _, _, self.uri = self.process.stdout.readline().strip().partition(" ")

    def client(self, export: str = "") -> Any:
        """A client that is not connected yet."""
        client = libnbd().NBD()
        client.add_meta_context("base:allocation")
        client.set_export_name(export)
        self.clients.append(client)
        return client

    def connect(self, export: str = "") -> Any:
        client = self.client(export)
        client.connect_unix(str(self.socket))
        return client

    def options(self) -> Any:
        """A client that negotiates."""
        client = self.client()
        client.set_opt_mode(True)
        client.connect_unix(str(self.socket))
        return client

    def leave(self) -> None:
        """Disconnect the clients."""
        for client in self.clients:
            if client.aio_is_negotiating():
                client.opt_abort()
            elif client.aio_is_ready():
                client.shutdown()
        self.clients.clear()

    def end(self) -> str:
        """End the server as systemd would; returns what it wrote to stderr.

        nbdkit 1.32 ends only when its clients have disconnected, even after SIGTERM.
        """
        self.leave()
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=30)
        return said

    @property
    def ended_well(self) -> bool:
        return self.process.returncode == (0 if self.kind == BY_NBDKIT else 128 + signal.SIGTERM)

    def close(self) -> None:
        """End the server in any state, and close its clients and pipes."""
        assert self.process.stdout is not None and self.process.stderr is not None
        try:
            if self.process.poll() is None:
                self.end()
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process.stderr.close()

    def log(self) -> list[str]:
        return self.calls.read_text().splitlines()

    def served(self) -> list[str]:
        """The log without the opening, of which nbdkit has one more, in a process for trial."""
        lines = self.log()
        opened = max(at for at, line in enumerate(lines) if line.startswith("open "))
        return lines[opened + 1 :]

    @property
    def memory(self) -> int:
        """Bytes of memory that are resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


Start = Callable[..., Server]


class Starter:
    """Starts servers of one kind. ``close`` ends them."""

    def __init__(self, kind: str, directory: Path) -> None:
        if kind == BY_NBDKIT:
            need("nbdkit")
        self._kind = kind
        self._directory = directory
        self._servers: list[Server] = []

    def __call__(
        self,
        *words: str,
        luns: list[dict[str, Any]] | None = None,
        read_only: bool = False,
        options: Sequence[str] = (),
        listen: str = "",
        **faults: str,
    ) -> Server:
        if self._kind == BY_NBDKIT:
            words = (f"uri={URL}", *words)
        server = Server(
            self._kind,
            self._directory,
            [*words],
            luns or [{}],
            read_only=read_only,
            options=options,
            listen=listen,
            **faults,
        )
        self._servers.append(server)
        return server

    def close(self) -> None:
        for server in self._servers:
            server.close()


def exchange_many(client: Any, size: int) -> None:
    """Write ``size`` bytes in requests of all sizes, all open at once, and read them back."""
    nbd = libnbd()
    sizes = [1, 512, 4096, 65_536, 65_537, MIB, 3 * MIB + 5]
    blocks: list[tuple[int, bytes]] = []
    at = 0
    while at + max(sizes) < size:
        blocks.append((at, os.urandom(sizes[len(blocks) % len(sizes)])))
        at += len(blocks[-1][1])
    for offset, data in blocks:
        client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), offset)
    while client.aio_in_flight():
        client.poll(-1)
    buffers = [nbd.Buffer(len(data)) for _, data in blocks]
    for buffer, (offset, _) in zip(buffers, blocks, strict=True):
        client.aio_pread(buffer, offset)
    while client.aio_in_flight():
        client.poll(-1)
    for buffer, (_, data) in zip(buffers, blocks, strict=True):
        assert bytes(buffer.to_bytearray()) == data
