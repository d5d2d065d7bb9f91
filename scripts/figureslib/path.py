"""What a 4 KiB READ passes through in ``iserblk nbd``, over iSER, in the plain form."""

from __future__ import annotations

import json
import re
import signal
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchlib.nbd_load import Connection
from benchlib.servers import Server

_IQN = "iqn.2026-11.example:figures"
_SIZE = 64 << 20
_ONCE = 200  # requests before any is counted: what is done once is done then
_ROUNDS = 20
_REQUESTS = 20  # of a round
_SCRIPTS = Path(__file__).resolve().parents[1]
_READY = re.compile(r"ready (iser://\S+)")


@dataclass(slots=True, frozen=True)
class Way:
    """Of one request, in the round with the fewest calls: on a busy machine the server waits more
    often. ``files``: those that at least every second request passes through."""

    calls: float
    crossings: float
    files: list[str]


def read(top: Path) -> Way:
    """Run the servers of the checkout ``top``, and read one block after the other. Raises Absent,
    OSError, LoadFailed."""
    python = str(top / ".venv/bin/python")
    plain = {"ISERBLK_PLAIN": "1"}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="iserblk-figures.")))
        lun = place / "lun"
        with lun.open("wb") as file:
            file.truncate(_SIZE)
        command = [python, "-P", "-m", "iserblk.cli", "target", "--listen", "127.0.0.1:0",
                   "--iqn", _IQN, "--lun", str(lun)]  # fmt: skip
        target = stack.enter_context(Server("target", command, place, environment=plain))
        url = target.wait_until(lambda: _url(target))
        path, output = place / "nbd", place / "calls"
        # A loop that stays awake for the answer would make as many calls as it has time for.
        words = ["nbd", f"{url}/0?busy-poll=0", "--socket", str(path)]
        command = [python, "-P", "-m", "figureslib.traced", str(output), *words]
        environment = {**plain, "PYTHONPATH": str(_SCRIPTS)}
        server = stack.enter_context(Server("nbd", command, place, environment=environment))
        server.wait_until(lambda: "ready " in server.said())
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(str(path))
        client = Connection(sock, "")
        _reads(client, _ONCE)
        rounds = []
        for _ in range(_ROUNDS):
            server.signal(signal.SIGUSR1)
            _reads(client, _REQUESTS)
            server.signal(signal.SIGUSR2)
            server.wait_until(output.exists)
            rounds.append(json.loads(output.read_text()))
            output.unlink()
        client.disconnect()
    counted = min(rounds, key=lambda each: each["calls"])
    files = sorted(name for name, calls in counted["files"].items() if calls >= _REQUESTS / 2)
    return Way(counted["calls"] / _REQUESTS, counted["crossings"] / _REQUESTS, files)


def _url(target: Server) -> str | None:
    found = _READY.search(target.said())
    return found[1] if found else None


def _reads(client: Connection, count: int) -> None:
    for _ in range(count):
        client.request()
        client.send()
        while not client.answered():
            pass
