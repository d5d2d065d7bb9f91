"""What portals of Traditional iSCSI do with the MPA Request of an initiator that expects iSER.

- tgtd, istgt: wait for the rest of a PDU, for ever, and serve other connections meanwhile. tgtd
  even agrees to RDMAExtensions in a login, and is silent behind it in the same way. Seen with tgt
  1.0.85 and istgt 20111008 (tests/integration/test_tgtd.py, test_istgt.py).
- LIO: reads 48 bytes (a BHS), whatever they are, in the one thread that takes connections; so
  there is no other connection before they have come. Then it answers with a Login Response, status
  0200h, as the opcode is none of a login, and closes. Read in Linux's iscsi_target_nego.c
  (iscsi_target_check_login_request) and iscsi_target_login.c.

Each class is a server in threads of its own; end it with ``close``.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from tests.support.listening import end_threads
from tests.support.portal import Portal, exactly, receive, send
from tests.support.target import IQN


class Tgtd(Portal):
    """Agrees to RDMAExtensions. ``first_requests``: the first Login Request of each connection."""

    def __init__(self) -> None:
        self.first_requests: list[pdu.LoginRequest] = []
        super().__init__()

    def iscsi(self, connection: socket.socket) -> None:
        login = LoginTarget(LoginTargetConfig(IQN, 1, rdma=True, max_recv_data_segment_length=8192))
        login.parameters.header_digest = login.parameters.data_digest = "None"
        first = True
        while not login.done:
            header, data = receive(connection)
            if first:
                self.first_requests.append(pdu.LoginRequest.unpack_from(header))
                first = False
            for answer in login.receive(header, data):
                send(connection, *answer)
        while connection.recv(4096):
            pass


class Lio:
    """Takes one connection at a time. ``logins``: how many Login Requests have come."""

    def __init__(self) -> None:
        self.logins = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._sockets = [self._socket]  # and all connections
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        end_threads([self._thread], self._sockets)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._sockets.append(connection)
            with contextlib.suppress(OSError, EOFError), connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        login = LoginTarget(LoginTargetConfig(IQN, 1, rdma=False))
        while not login.done:
            header = exactly(connection, bhs.BHS_LENGTH)
            if header[0] & bhs.OPCODE_MASK != bhs.LOGIN_REQUEST:
                refusal = pdu.LoginResponse(
                    flags=0,
                    data_length=0,
                    isid=header[8:14],
                    tsih=0,
                    itt=int.from_bytes(header[16:20], "big"),
                    stat_sn=0,
                    exp_cmd_sn=0,
                    max_cmd_sn=0,
                    status=0x0200,
                )
                connection.sendall(refusal.pack())
                return
            self.logins += 1
            size = int.from_bytes(header[5:8], "big")
            data = exactly(connection, size + 3 & ~3)[:size]
            for answer in login.receive(header, data):
                send(connection, *answer)
        while connection.recv(4096):
            pass
