"""What requests pass through in ``iserblk nbd`` and ``iserblk target``, over iSER, in the plain
form."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchlib.nbd_load import Connection, LoadFailed
from benchlib.servers import Server

_IQN = "iqn.2026-11.example:figures"
_SIZE = 64 << 20
_ONCE = 200  # requests before any is counted: what is done once is done then
_ROUNDS = 20
_REQUESTS = 20  # of a round
JOURNEYS = ("login", "READ", "WRITE")
_TIMES = 5  # that each journey is taken; a login twice
_BLOCK = bytes(4096)
_NBD = struct.Struct(">IHHQQI")  # magic, flags, command, cookie, offset, length
_NBD_MAGIC = 0x25609513
_NBD_WRITE, _NBD_FLUSH = 1, 3
_NBD_REPLY = struct.Struct(">IIQ")  # magic, error, cookie
_SCRIPTS = Path(__file__).resolve().parents[1]
_READY = re.compile(r"ready (iser://\S+)")

Call = tuple[str, str]  # file from the root of the project, and function


@dataclass(slots=True, frozen=True)
class Way:
    """Of one request, in the round with the fewest calls: on a busy machine the server waits more
    often. ``files``: those that at least every second request passes through."""

    calls: float
    crossings: float
    files: list[str]


@dataclass(slots=True, frozen=True)
class Journey:
    """One login, READ, or WRITE with its flush: the calls of both processes, in their order."""

    nbd: list[Call]
    target: list[Call]


class _Servers:
    """A target, and an NBD server of its LUN; ends both on exit of ``stack``. ``profile``: that of
    figureslib.traced for the NBD server, and with "list" for the target, too."""

    def __init__(self, top: Path, profile: str, stack: ExitStack) -> None:
        self._place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="iserblk-fig.")))
        self._python = str(top / ".venv/bin/python")
        self._stack = stack
        lun = self._place / "lun"
        with lun.open("wb") as file:
            file.truncate(_SIZE)
        words = ["target", "--listen", "127.0.0.1:0", "--iqn", _IQN, "--lun", str(lun)]
        self.target = self._start("target", words, profile if profile == "list" else "")
        self._url = self.target.wait_until(lambda: _url(self.target))
        if profile == "list":
            self.begin(self.target)
        # A loop that stays awake for the answer would make as many calls as it has time for.
        path = self._place / "socket"
        words = ["nbd", f"{self._url}/0?busy-poll=0", "--socket", str(path)]
        self.nbd = self._start("nbd", words, profile)
        self.nbd.wait_until(lambda: "ready " in self.nbd.said())
        self._path = path

    def client(self) -> tuple[Connection, socket.socket]:
        sock = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(str(self._path))
        return Connection(sock, ""), sock

    def _start(self, name: str, words: list[str], profile: str) -> Server:
        environment = {"ISERBLK_PLAIN": "1"}
        run = ["iserblk.cli"]
        if profile:
            environment["PYTHONPATH"] = str(_SCRIPTS)
            run = ["figureslib.traced", profile, str(self._place / f"{name}.calls")]
        command = [self._python, "-P", "-m", *run, *words]
        return self._stack.enter_context(
            Server(name, command, self._place, environment=environment)
        )

    def begin(self, server: Server) -> None:
        begun = self._place / f"{server.name}.begun"
        server.signal(signal.SIGUSR1)
        server.wait_until(begun.exists)
        begun.unlink()

    def end(self, server: Server) -> str:
        output = self._place / f"{server.name}.calls"
        server.signal(signal.SIGUSR2)
        server.wait_until(output.exists)
        text = output.read_text()
        output.unlink()
        return text


def read(top: Path) -> Way:
    """Run the servers of the checkout ``top``, and read one block after the other. Raises Absent,
    OSError, LoadFailed."""
    with ExitStack() as stack:
        servers = _Servers(top, "count", stack)
        client, _ = servers.client()
        _reads(client, _ONCE)
        rounds = []
        for _ in range(_ROUNDS):
            servers.begin(servers.nbd)
            _reads(client, _REQUESTS)
            rounds.append(json.loads(servers.end(servers.nbd)))
        client.disconnect()
    counted = min(rounds, key=lambda each: each["calls"])
    files = sorted(name for name, calls in counted["files"].items() if calls >= _REQUESTS / 2)
    return Way(counted["calls"] / _REQUESTS, counted["crossings"] / _REQUESTS, files)


def journeys(top: Path) -> dict[str, list[Journey]]:
    """Log in, read a block, write one and flush it, each several times. Raises as ``read``."""
    found: dict[str, list[Journey]] = {name: [] for name in JOURNEYS}
    for _ in range(2):
        with ExitStack() as stack:
            servers = _Servers(top, "list", stack)
            found["login"].append(_ended(servers))
    with ExitStack() as stack:
        servers = _Servers(top, "list", stack)
        client, sock = servers.client()
        steps: dict[str, Callable[[], None]] = {
            "READ": lambda: _reads(client, 1),
            "WRITE": lambda: _write_and_flush(sock),
        }
        for step in steps.values():
            for _ in range(_ONCE):
                step()
        for name, step in steps.items():
            for _ in range(_TIMES):
                servers.begin(servers.nbd)
                servers.begin(servers.target)
                step()
                found[name].append(_ended(servers))
        client.disconnect()
    return found


def _ended(servers: _Servers) -> Journey:
    each = [
        [(file, function) for file, function in json.loads(servers.end(server))]
        for server in (servers.nbd, servers.target)
    ]
    return Journey(*each)


def _url(target: Server) -> str | None:
    found = _READY.search(target.said())
    return found[1] if found else None


def _reads(client: Connection, count: int) -> None:
    for _ in range(count):
        client.request()
        client.send()
        while not client.answered():
            pass


def _write_and_flush(sock: socket.socket) -> None:
    for command, length, data in ((_NBD_WRITE, len(_BLOCK), _BLOCK), (_NBD_FLUSH, 0, b"")):
        sock.sendall(_NBD.pack(_NBD_MAGIC, 0, command, 0, 0, length) + data)
        reply = sock.recv(_NBD_REPLY.size, socket.MSG_WAITALL)
        if len(reply) < _NBD_REPLY.size or _NBD_REPLY.unpack(reply)[1]:
            raise LoadFailed(f"NBD command {command} failed")
