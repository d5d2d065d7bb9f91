"""A session of libiscsi that stays idle, as a program: ``python -m tests.support.libiscsi URL``.

libiscsi's own tools end at once, and QEMU's iser:// needs its own event loop. The program logs in,
prints ``ready``, and then does only what a poll loop does, until it is killed: without a logout, in
which libiscsi 1.19 crashes over iSER.

It uses libiscsi's public functions (iscsi/iscsi.h) by ctypes.
"""

from __future__ import annotations

import ctypes
import select
import sys
from typing import NoReturn

NORMAL_SESSION = 2  # enum iscsi_session_type
TRANSPORTS = {"iscsi": 0, "iser": 1}  # enum iscsi_transport_type
INITIATOR = b"iqn.2026-11.example:libiscsi"


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libiscsi.so.7")
    library.iscsi_create_context.restype = ctypes.c_void_p
    library.iscsi_get_error.restype = ctypes.c_char_p
    return library


class Idle:
    """Logged in to ``target`` at ``portal`` (HOST:PORT). Raises SystemExit with libiscsi's words
    where something fails."""

    def __init__(self, transport: str, portal: str, target: str) -> None:
        self._library = _library()
        self._context = ctypes.c_void_p(
            self._library.iscsi_create_context(ctypes.c_char_p(INITIATOR))
        )
        self._must(self._library.iscsi_set_session_type(self._context, NORMAL_SESSION))
        self._must(
            self._library.iscsi_init_transport(self._context, TRANSPORTS[transport]), "transport"
        )
        self._must(
            self._library.iscsi_set_targetname(self._context, ctypes.c_char_p(target.encode()))
        )
        self._must(
            self._library.iscsi_full_connect_sync(
                self._context, ctypes.c_char_p(portal.encode()), 0
            ),
            "login",
        )

    def _must(self, result: int, what: str = "setting") -> None:
        if result:
            words = self._library.iscsi_get_error(self._context) or b""
            raise SystemExit(f"{what}: {words.decode(errors='replace')}")

    def run(self) -> NoReturn:
        poll = select.poll()
        watched = -1
        while True:
            fd = self._library.iscsi_get_fd(self._context)
            if fd != watched:
                if watched >= 0:
                    poll.unregister(watched)
                watched = fd
            poll.register(fd, self._library.iscsi_which_events(self._context))
            for _, events in poll.poll():
                self._must(self._library.iscsi_service(self._context, events), "service")


def main(url: str) -> NoReturn:
    transport, rest = url.split("://")
    portal, target = rest.split("/")[:2]
    idle = Idle(transport, portal, target)
    print("ready", flush=True)
    idle.run()


if __name__ == "__main__":
    main(sys.argv[1])
