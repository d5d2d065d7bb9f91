"""A session of libiscsi, as a program: ``python -m tests.support.libiscsi URL [commands]``.

libiscsi's own tools end at once, and QEMU's iser:// needs its own event loop. The program logs in,
prints ``ready``, and then does only what a poll loop does, until it is killed: without a logout, in
which libiscsi 1.19 crashes over iSER. With ``commands`` it takes SCSI commands from stdin instead,
as JSON, and prints what they were answered: see ``answers``.

It uses libiscsi's public functions and structures (iscsi/iscsi.h, iscsi/scsi-lowlevel.h) by ctypes.
"""

from __future__ import annotations

import ctypes
import json
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from tests.support.forking import ROOT
from tests.support.interop import package

NORMAL_SESSION = 2  # enum iscsi_session_type
TRANSPORTS = {"iscsi": 0, "iser": 1}  # enum iscsi_transport_type
INITIATOR = b"iqn.2026-11.example:libiscsi"


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libiscsi.so.7")
    library.iscsi_create_context.restype = ctypes.c_void_p
    library.iscsi_get_error.restype = ctypes.c_char_p
    library.scsi_create_task.restype = ctypes.c_void_p
    library.iscsi_scsi_command_sync.restype = ctypes.c_void_p
    return library


class Answer(NamedTuple):
    """What a SCSI command was answered. ``residual``: negative where there was more."""

    status: int
    sense: bytes
    residual: int
    data_in: bytes


class _Task(ctypes.Structure):
    """The beginning of struct scsi_task, since libiscsi 1.19."""

    _fields_ = (
        ("status", ctypes.c_int),
        ("request", ctypes.c_byte * 28),
        ("residual_status", ctypes.c_int),
        ("residual", ctypes.c_size_t),
    )


class _Came(ctypes.Structure):
    """struct scsi_data: Data-In; or the sense data, with two bytes of length in front, where the
    status is CHECK CONDITION."""

    _fields_ = (("size", ctypes.c_int), ("data", ctypes.c_void_p))


def _length_of_sense() -> int:
    """Of struct scsi_sense, which is between these two: it has INFORMATION, too, since 1.20."""
    return 16 if package("libiscsi7").startswith("libiscsi7 1.19.") else 24


class _Data(ctypes.Structure):
    """struct iscsi_data."""

    _fields_ = (("size", ctypes.c_size_t), ("data", ctypes.c_char_p))


_DIRECTIONS = {(False, False): 0, (True, False): 1, (False, True): 2}  # enum scsi_xfer_dir
_OVERFLOW = 2  # enum scsi_residual


class Session:
    """Logged in to ``target`` at ``portal`` (HOST:PORT), and ``lun`` ready. Raises SystemExit with
    libiscsi's words where something fails."""

    def __init__(self, transport: str, portal: str, target: str, lun: int = 0) -> None:
        self._lun = lun
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
                self._context, ctypes.c_char_p(portal.encode()), lun
            ),
            "login",
        )

    def _must(self, result: int, what: str = "setting") -> None:
        if result:
            words = self._library.iscsi_get_error(self._context) or b""
            raise SystemExit(f"{what}: {words.decode(errors='replace')}")

    def command(self, cdb: bytes, into: int, out: bytes) -> Answer:
        """``into``: bytes of Data-In that it takes; ``out``: its Data-Out."""
        task = self._library.scsi_create_task(
            len(cdb),
            ctypes.c_char_p(cdb),
            _DIRECTIONS[bool(into), bool(out)],
            into or len(out),
        )
        data = ctypes.byref(_Data(len(out), out)) if out else None
        ended = self._library.iscsi_scsi_command_sync(
            self._context, self._lun, ctypes.c_void_p(task), data
        )
        if not ended:
            self._must(1, "command")
        found = _Task.from_address(ended)
        datain = _Came.from_address(ended + ctypes.sizeof(_Task) + _length_of_sense())
        came = ctypes.string_at(datain.data, datain.size) if datain.data else b""
        residual = -found.residual if found.residual_status == _OVERFLOW else found.residual
        sense = came[2:] if found.status == 2 else b""
        answer = Answer(found.status, sense, residual, b"" if sense else came)
        self._library.scsi_free_scsi_task(ctypes.c_void_p(ended))
        return answer

    def idle(self) -> NoReturn:
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


def answers(url: str, commands: Sequence[tuple[bytes, int, bytes]]) -> list[Answer]:
    """What libiscsi, in a process of its own, is answered to ``commands``: of each the CDB, how
    many bytes it takes, and what it writes. ``url`` names the LUN."""
    asked = [(cdb.hex(), into, out.hex()) for cdb, into, out in commands]
    said = subprocess.run(
        [sys.executable, "-m", "tests.support.libiscsi", url, "commands"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return [
        Answer(status, bytes.fromhex(sense), residual, bytes.fromhex(data))
        for status, sense, residual, data in json.loads(said.stdout)
    ]


def main(url: str, what: str = "idle") -> None:
    transport, rest = url.split("://")
    portal, target, lun = (*rest.split("/"), "0")[:3]
    session = Session(transport, portal, target, int(lun))
    if what == "commands":
        found = []
        for cdb, into, out in json.load(sys.stdin):
            answer = session.command(bytes.fromhex(cdb), into, bytes.fromhex(out))
            found.append((answer.status, answer.sense.hex(), answer.residual, answer.data_in.hex()))
        print(json.dumps(found))
        return
    print("ready", flush=True)
    session.idle()


if __name__ == "__main__":
    main(*sys.argv[1:])
