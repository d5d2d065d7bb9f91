"""One LUN of LIO, and one of tgtd, as a disk of the kernel's initiator and as one of ours: what
sg3_utils is answered beside ``disk.command``, and what udev calls the two."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from iserblk.disk.blocking import ThreadDisk, open_disks
from iserblk.url import parse_url
from tests.integration.test_tgtd import COMMANDS
from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.attached import RUN, attached, nothing_left
from tests.support import udev
from tests.support.interop import Record, package
from tests.support.nbdkit import need
from tests.support.programs import SLOW_S, run
from tests.support.target import ROOT
from tests.support.tgtd import MortalTgtd

MIB = 1 << 20
TGTD_PORT = 3272
NO_CHAP = {"node.session.auth.authmethod": "None"}
SCSI_ID = Path("/lib/udev/scsi_id")
RULES = ROOT / "scripts/systemd/59-iserblk.rules"
ROOM = 1 << 16  # for an answer of any length

# Programs of sg3_utils whose answer is the parameter data of one command.
TOOLS: tuple[tuple[str, ...], ...] = (
    ("sg_inq", "--only"),
    *(
        ("sg_vpd", "--force", f"--page=0x{page:02x}")
        for page in (0x00, 0x80, 0x83, 0xB0, 0xB1, 0xB2)
    ),
    ("sg_readcap",),
    ("sg_readcap", "--16"),
    ("sg_modes", "--page=0x08"),
    ("sg_modes", "--page=0x3f"),
    ("sg_modes", "--six", "--page=0x0a"),
    ("sg_luns",),
    ("sg_luns", "--select=2"),
    ("sg_rtpg",),
    ("sg_rtpg", "--extended"),
    ("sg_requests",),
)
FEWEST = {"LIO": 15, "tgtd": 9}  # of these, that the target answers


class Lun(NamedTuple):
    """``device``: of the kernel's initiator."""

    peer: str
    url: str
    device: Path


@contextmanager
def without_chap() -> Iterator[None]:
    group = Path(os.environ["LAB_TPG"])
    files = group / "attrib/authentication", group / "param/AuthMethod"
    before = [file.read_text().strip() for file in files]
    for file, value in zip(files, ("0", "CHAP,None"), strict=True):
        file.write_text(value)
    try:
        yield
    finally:
        for file, value in zip(files, before, strict=True):
            file.write_text(value)


# tgtd's answers are compared with libiscsi's, too, and without a guest: integration/test_tgtd.py.
@pytest.fixture(scope="module", params=["LIO", pytest.param("tgtd", marks=pytest.mark.long)])
def lun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lun]:
    address = os.environ["LAB_ADDRESS"]
    with ExitStack() as stack:
        if request.param == "LIO":
            stack.enter_context(without_chap())
            url = os.environ["LAB_URL"]
        else:
            programs = Path(os.environ["LAB_TGT"]) / "usr/sbin"
            place = tmp_path_factory.mktemp("tgtd")
            tgtd = MortalTgtd(programs, address, TGTD_PORT, place, 64 * MIB)
            stack.callback(tgtd.kill)
            url = tgtd.url
        parsed = parse_url(url)
        session = kernel.logged_in(
            address, NO_CHAP, "default", parsed.port, parsed.iqn, str(parsed.lun)
        )
        yield Lun(request.param, url, stack.enter_context(session))


@pytest.fixture(scope="module")
def disk(lun: Lun) -> Iterator[ThreadDisk]:
    need("sg_raw", "sg_inq")
    with open_disks([lun.url]) as disks:
        found = disks.disks[disks.default]
        assert isinstance(found, ThreadDisk)
        yield found


def tool(*words: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=SLOW_S,
    )


def cdb_of(said: str) -> bytes:
    """The last CDB that a program of sg3_utils has sent, from what it says with ``--verbose``."""
    found = re.findall(r"cdb: (?:[^\[\n]*\[)?((?:[0-9a-f]{2}\b ?)+)", said)
    assert found, said
    return bytes.fromhex(found[-1])


def test_programs_of_sg3_utils(lun: Lun, disk: ThreadDisk, record: Record) -> None:
    """Each says which CDB it has sent; ``disk.command`` brings the same bytes for it. A program
    shows as many as the answer itself says that it has; zeroes may follow."""
    same, different = [], {}
    for words in TOOLS:
        done = tool(words[0], "--raw", "--verbose", *words[1:], lun.device)
        cdb = cdb_of(done.stderr.decode(errors="replace"))
        buffer = bytearray(ROOM)
        answer = disk.command(cdb, buffer)
        data = bytes(buffer[: ROOM - answer.residual])
        shown, rest = data[: len(done.stdout)], data[len(done.stdout) :]
        if done.stdout and not answer.status and shown == done.stdout and not any(rest):
            same.append(words)
        elif done.stdout or answer.status != 2:  # else the target has not got this
            different[words] = (cdb.hex(), str(answer), data, done)
    assert not different
    assert len(same) >= FEWEST[lun.peer], same
    programs = ", ".join(dict.fromkeys(words[0] for words in same))
    record(
        ours="initiator (disk.command)",
        peer=f"sg3_utils on a disk of iscsi_tcp, of {lun.peer}",
        version=package("sg3-utils"),
        transport="TCP",
        ran=f"{len(same)} answers of {programs}, byte for byte",
    )


class Answer(NamedTuple):
    status: str
    sense: bytes
    data: bytes


STATUSES = {0: "Good", 2: "Check Condition", 0x18: "Reservation Conflict"}


def sg_raw(device: Path, cdb: bytes, into: int, out: bytes, folder: Path) -> Answer:
    """What the kernel's initiator is answered to this command."""
    came, goes = folder / "came", folder / "goes"
    came.unlink(missing_ok=True)
    goes.write_bytes(out)
    words = ["sg_raw", "--verbose"]
    words += ["--request", str(into), "--outfile", str(came)] if into else []
    words += ["--send", str(len(out)), "--infile", str(goes)] if out else []
    done = tool(*words, device, *(f"{byte:02x}" for byte in cdb))
    said = done.stderr.decode(errors="replace")
    status = re.search(r"^SCSI Status: (.*?)\s*$", said, re.MULTILINE)
    assert status is not None, said
    sense = re.search(r"Raw sense data[^\n]*\n((?:\s*[0-9a-f]{2}\b)+)", said)
    return Answer(
        status[1],
        bytes.fromhex(sense[1]) if sense else b"",
        came.read_bytes() if came.exists() else b"",
    )


def test_sg_raw(lun: Lun, disk: ThreadDisk, tmp_path: Path, record: Record) -> None:
    """Status, sense data and data are those of sg_raw for the same CDB, and each reads what the
    other has written."""
    checked = []
    for name, (cdb, into, out) in COMMANDS.items():
        if name == "INQUIRY, cut":
            continue  # the kernel takes what was too much for what was too little
        theirs = sg_raw(lun.device, cdb, into, out, tmp_path)
        buffer = bytearray(into)
        answer = disk.command(cdb, buffer, out)
        data = bytes(buffer[: into - max(0, answer.residual)]) if not answer.status else b""
        # sg_raw shows no more of the sense data than it has of its own length.
        sense, rest = answer.sense[: len(theirs.sense)], answer.sense[len(theirs.sense) :]
        assert Answer(STATUSES[answer.status], sense, data) == theirs, name
        assert not any(rest), name
        checked.append(answer.status)
    assert checked.count(0) >= 10 and checked.count(2) >= 3
    write, read = (bytes((code, 0, 0, 0, 0, 64, 0, 0, 8, 0)) for code in (0x2A, 0x28))
    for number in range(2):
        data = os.urandom(4096)
        if number:
            assert sg_raw(lun.device, write, 0, data, tmp_path).status == "Good"
            found = bytearray(4096)
            assert disk.command(read, found).status == 0
        else:
            assert disk.command(write, None, data).status == 0
            found = bytearray(sg_raw(lun.device, read, 4096, b"", tmp_path).data)
        assert found == data
    record(
        ours="initiator (disk.command)",
        peer=f"sg_raw on a disk of iscsi_tcp, of {lun.peer}",
        version=package("sg3-utils"),
        transport="TCP",
        ran=f"{len(checked)} CDBs, {len(checked) - checked.count(0)} of them refused: status, "
        "sense data and data are the same",
    )


def properties(text: str) -> dict[str, str]:
    """As udev takes them from a program: without blanks around a value."""
    pairs = (line.split("=", 1) for line in text.splitlines())
    return {name: value.strip() for name, value in pairs}


@pytest.mark.long
def test_udev_calls_both_alike(lun: Lun) -> None:
    """The identity of our device, and its links, are those of the kernel's disk."""
    udev.need_udev()
    if not SCSI_ID.exists():
        pytest.skip("udev's scsi_id is not installed")
    with attached(lun.url, "-o", "io-timeout=300") as device:
        told = (RUN / device.name / "udev").read_text()
        of_ours = udev.links(device.name, RULES, told)
    nothing_left()
    ours = properties(told)
    theirs = properties(run(SCSI_ID, "--whitelisted", "--export", f"--device={lun.device}"))
    assert ours.pop("ID_ISERBLK") == theirs["ID_SERIAL"]
    assert {name: theirs.get(name) for name in ours} == ours
    assert ours["ID_SERIAL"] == theirs["ID_SERIAL"] and ours["ID_WWN"] == theirs["ID_WWN"]

    of_theirs = udev.links(lun.device.name, RULES, "")
    named = {link for link in of_ours if "/by-id/" in link}
    assert f"/dev/disk/by-id/iserblk-{theirs['ID_SERIAL']}" in named
    assert {link.replace("/iserblk-", "/scsi-") for link in named} <= of_theirs
    assert any("/wwn-" in link for link in named)
