"""Commands in the guest, by the QEMU guest agent: JSON over a virtio port, so that they need no
network there."""

from __future__ import annotations

import base64
import json
import socket
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.5
_DELIMITER = b"\xff"  # stands before the answer to guest-sync-delimited, and nowhere else
_SYNC = 4711  # any number
_ANSWER_S = 60.0  # on a busy machine


class Failed(Exception):
    """Something in the guest, or of a case, is not as it has to be; the text says what."""


class Agent:
    """One connection to the agent of one boot. Requests are answered in order, one at a time."""

    def __init__(self, place: Path) -> None:
        """``place``: QEMU's Unix socket for the agent's port."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(place))
        self._received = b""
        self._asked = False

    def close(self) -> None:
        self._socket.close()

    def answers(self, within_s: float) -> bool:
        """Whether the agent runs, or comes to run in that time. Raises Failed: the guest has
        ended."""
        if not self._asked:  # once: what it does not read fills the socket
            self._send("guest-sync-delimited", {"id": _SYNC}, before=_DELIMITER)
            self._asked = True
        deadline = time.monotonic() + within_s
        try:
            while True:
                line = self._line(deadline).rpartition(_DELIMITER)[2]
                if line.strip() and json.loads(line) == {"return": _SYNC}:
                    return True
        except TimeoutError:
            return False

    def run(self, script: str, *, limit_s: float = 60.0, given: str = "") -> str:
        """Run a script of sh with ``given`` as its standard input; returns its output. Raises
        Failed: it ended with another status than 0, or took longer."""
        first = script.strip().splitlines()[0]
        arguments = {**_shell(script), "capture-output": True}
        if given:
            arguments["input-data"] = base64.b64encode(given.encode()).decode()
        deadline = time.monotonic() + limit_s
        process = self._ask("guest-exec", arguments, deadline)["pid"]
        while True:
            status = self._ask("guest-exec-status", {"pid": process}, deadline)
            if status["exited"]:
                break
            if time.monotonic() > deadline:
                raise Failed(f"{first}: took longer than {limit_s:.0f} s")
            time.sleep(_POLL_S)
        said = [
            base64.b64decode(status.get(name, "")).decode() for name in ("out-data", "err-data")
        ]
        if status.get("exitcode") != 0:
            how = status.get("exitcode", f"signal {status.get('signal')}")
            raise Failed(f"{first}: status {how}: {' '.join(''.join(reversed(said)).split())}")
        return said[0]

    def start(self, script: str) -> None:
        """Run a script that may be the end of the agent. Raises Failed: it cannot be started."""
        self._ask("guest-exec", _shell(script), time.monotonic() + _ANSWER_S)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Make a file in the guest."""
        self.run(f"cat >{path}\nchmod {mode:o} {path}", given=text)

    def _ask(self, command: str, arguments: dict[str, Any], deadline: float) -> Any:
        self._send(command, arguments)
        try:
            answer = json.loads(self._line(max(deadline, time.monotonic() + _ANSWER_S)))
        except TimeoutError:
            raise Failed(f"the guest does not answer to {command}") from None
        if "error" in answer:
            raise Failed(f"{command}: {answer['error'].get('desc', answer['error'])}")
        return answer["return"]

    def _send(self, command: str, arguments: dict[str, Any], before: bytes = b"") -> None:
        message = json.dumps({"execute": command, "arguments": arguments})
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.sendall(before + message.encode() + b"\n")
        except OSError:
            raise Failed("the guest has ended") from None

    def _line(self, deadline: float) -> bytes:
        """Raises TimeoutError; Failed when QEMU has ended."""
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise Failed("the guest has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


def _shell(script: str) -> dict[str, Any]:
    """Arguments of guest-exec."""
    variables = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root"]
    return {"path": "/bin/sh", "arg": ["-euc", script], "env": variables}
