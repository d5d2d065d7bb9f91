"""A portal of Traditional iSCSI that does what a test says: a thread, sockets, and PDUs by hand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.text import decode_untrusted, encode
from tests.support.listening import end_threads
from tests.support.target import IQN

MPA_REQUEST = b"MPA ID Req Frame"
ANSWER_S = 30.0


class Portal:
    """``redirect``: the Status and the TargetAddress that each login gets, "" for none.
    ``answer``: the parts of the answer to SendTargets; ``asked``: the values that it had.
    ``logins``, ``mpa``: how many connections came with each. MPA Requests get no answer, as from
    any target that takes them for the beginning of a PDU; with ``slam`` the connection ends.
    A SCSI command ends the connection: there are no LUNs; with ``silent`` it is not
    answered. ``heard``: the opcodes of commands and of task management.
    ``digests``: login agrees to digests (nothing behind it computes any). ``group``: the portal
    group, as login tells it."""

    def __init__(self, host: str = "127.0.0.1", slam: bool = False, digests: bool = False) -> None:
        self.redirect: tuple[int, str] | None = None
        self.answer: list[bytes] = [encode([("TargetName", IQN)])]
        self.asked: list[str] = []
        self.group = 1
        self.silent = False
        self.heard: list[int] = []
        self.logins = 0
        self.mpa = 0
        self._slam = slam
        self._digests = digests
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.port: int = self._socket.getsockname()[1]
        self.name = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._sockets = [self._socket]  # and all connections
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        end_threads(self._threads, self._sockets)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(ANSWER_S)
                self._sockets.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            if connection.recv(16, socket.MSG_PEEK).startswith(MPA_REQUEST[:8]):
                self.mpa += 1
                while not self._slam and connection.recv(4096):
                    pass
                return
            self.logins += 1
            self.iscsi(connection)

    def iscsi(self, connection: socket.socket) -> None:
        """Serve one connection that begins with a Login Request."""
        login = LoginTarget(LoginTargetConfig(IQN, 1, rdma=False))
        login.parameters.target_portal_group_tag = self.group
        if not self._digests:
            login.parameters.header_digest = login.parameters.data_digest = "None"
        while not login.done:
            header, data = receive(connection)
            if self.redirect is not None:
                self._moved(connection, header, *self.redirect)
                return
            for answer in login.receive(header, data):
                send(connection, *answer)
        parts = iter(())
        stat_sn = login.stat_sn
        while True:
            header, data = receive(connection)
            opcode = header[0] & bhs.OPCODE_MASK
            if opcode in (bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST):
                self.heard.append(opcode)
                if not self.silent:
                    return
                continue
            request = pdu.TextRequest.unpack_from(header)
            numbers = {"stat_sn": stat_sn, "exp_cmd_sn": 1, "max_cmd_sn": 9}
            stat_sn += 1
            if request.opcode & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST:
                answered = pdu.LogoutResponse(response=0, itt=request.itt, **numbers)
                send(connection, answered.pack(), b"")
                return
            if request.ttt == bhs.NO_TAG:
                self.asked += [value for _, value in decode_untrusted(data)]
                parts = iter(list(enumerate(self.answer)))  # type: ignore[arg-type]
            number, part = next(parts)  # type: ignore[var-annotated]
            last = number == len(self.answer) - 1
            text = pdu.TextResponse(
                flags=bhs.FLAG_FINAL if last else bhs.FLAG_CONTINUE,
                ttt=bhs.NO_TAG if last else 77 + number,
                itt=request.itt,
                data_length=len(part),
                **numbers,
            )
            send(connection, text.pack(), part)

    @staticmethod
    def _moved(connection: socket.socket, header: bytes, status: int, address: str) -> None:
        request = pdu.LoginRequest.unpack_from(header)
        data = encode([("TargetAddress", address)]) if address else b""
        response = pdu.LoginResponse(
            flags=0,
            data_length=len(data),
            isid=request.isid,
            tsih=0,
            itt=request.itt,
            stat_sn=0,
            exp_cmd_sn=request.cmd_sn,
            max_cmd_sn=request.cmd_sn,
            status=status,
        )
        send(connection, response.pack(), data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    header = exactly(connection, bhs.BHS_LENGTH)
    size = int.from_bytes(header[5:8], "big")
    return header, exactly(connection, size + 3 & ~3)[:size]


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def send(connection: socket.socket, header: bytes, data: bytes) -> None:
    connection.sendall(header + data + bytes(-len(data) & 3))


@contextmanager
def portals(count: int, make: Callable[[], Portal] = Portal) -> Iterator[list[Portal]]:
    made = [make() for _ in range(count)]
    try:
        yield made
    finally:
        for portal in made:
            portal.close()
