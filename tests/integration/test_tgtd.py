"""Our initiator and tgtd, over Traditional iSCSI. Needs ``scripts/peers tgt``."""

from __future__ import annotations

import ctypes.util
import logging
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from iserblk.commands.running import command
from iserblk.disk.blocking import open_disks
from iserblk.disk.lun.reservation import Reservation
from iserblk.errors import (
    AuthenticationError,
    Busy,
    LoginError,
    OtherProtocol,
    ReservationConflict,
    ReservationLost,
    ScsiError,
)
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.iscsi.send_targets import Portal
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.scsi import cdb, luns
from iserblk.url import parse_url
from tests.cli.commands import good
from tests.support import libiscsi, logs
from tests.support.blockwork import everything
from tests.support.cores import core_of, in_thread
from tests.support.endurance import disk_and_session
from tests.support.faces import FACES, one_disk, read, write
from tests.support.interop import Record
from tests.support.ports import free_port
from tests.support.sessions import Host
from tests.support.target import ROOT
from tests.support.until import until_blocking

pytestmark = pytest.mark.logs(logs.RESERVATION)

PEER = "iqn.2026-11.example:peer"
MIB = 1 << 20
SIZE = 80 * MIB
# Targets by the authentication that they ask for: tid, and accounts (the second: the target's own).
OWN, THEIRS = ("host", "hush-hush-hush"), ("disk", "not-a-word-more")
ASKS = {"none": (1, ()), "one-way": (2, (OWN,)), "mutual": (3, (OWN, THEIRS))}


class Tgtd:
    """A tgtd on a free port, with a disk for each target of ASKS. ``urls``: of LUN 1, by the
    authentication; ``url``: of the target without authentication."""

    def __init__(self, programs: Path, place: Path) -> None:
        port = free_port()
        self._programs = programs
        self.log = place / "log"
        # Its own control socket: the usual place may belong to another tgtd.
        self._environment = {**os.environ, "TGT_IPC_SOCKET": str(place / "ipc")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [programs / "tgtd", "-f", "--iscsi", f"portal=127.0.0.1:{port}"],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        try:
            self._wait(port)
            for user, secret in (OWN, THEIRS):
                account = ("--mode", "account", "--user", user)
                self.admin("--op", "new", *account, "--password", secret)
            for asks, (tid, accounts) in ASKS.items():
                self._add(tid, f"{PEER}-{asks}", place / asks, accounts)
        except BaseException:
            self.stop()
            raise
        self.urls = {asks: f"iscsi://127.0.0.1:{port}/{PEER}-{asks}/1" for asks in ASKS}
        self.url = self.urls["none"]
        said = subprocess.run([programs / "tgtd", "-V"], capture_output=True, text=True, check=True)
        self.version = f"tgt {said.stdout.strip()}"

    def _add(self, tid: int, iqn: str, disk: Path, accounts: tuple[tuple[str, str], ...]) -> None:
        with disk.open("wb") as file:
            file.truncate(SIZE)
        target = ("--tid", str(tid), "--mode")
        self.admin("--op", "new", *target, "target", "-T", iqn)
        unit = (*target, "logicalunit", "--lun", "1")
        self.admin("--op", "new", *unit, "-b", str(disk))
        self.admin("--op", "update", *unit, "--params", "thin_provisioning=1")
        for (user, _), way in zip(accounts, ((), ("--outgoing",)), strict=False):
            self.admin("--op", "bind", *target, "account", "--user", user, *way)
        self.admin("--op", "bind", *target, "target", "-I", "ALL")

    def _wait(self, port: int) -> None:
        def listens() -> bool:
            assert self._process.poll() is None, "tgtd has ended"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except ConnectionRefusedError:
                return False
            return True

        until_blocking(listens)

    def admin(self, *arguments: str) -> None:
        command = [self._programs / "tgtadm", "--lld", "iscsi", *arguments]
        subprocess.run(command, env=self._environment, check=True, timeout=20)  # type: ignore[arg-type]

    def set(self, **keys: str) -> None:
        """Set keys that tgtd offers in the logins that follow."""
        for name, value in keys.items():
            for tid, _ in ASKS.values():
                target = ("--mode", "target", "--tid", str(tid))
                self.admin("--op", "update", *target, "--name", name, "--value", value)

    def stop(self) -> None:
        # It ignores SIGTERM while it has targets, and has nothing to lose.
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def tgtd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tgtd]:
    found = subprocess.run(
        [ROOT / "scripts/peers", "tgt"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires tgtd: {found.stderr.strip().splitlines()[-1]}")
    running = Tgtd(Path(found.stdout.strip()) / "usr/sbin", tmp_path_factory.mktemp("tgtd"))
    yield running
    running.stop()


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("digest", ["None", "CRC32C"])
@pytest.mark.parametrize("unasked", ["Yes", "No"])
async def test_writes_come_back(tgtd: Tgtd, face: str, digest: str, unasked: str) -> None:
    """512 bytes to 4 MiB; digests, immediate and unsolicited data on and off."""
    tgtd.set(
        HeaderDigest=digest,
        DataDigest=digest,
        ImmediateData=unasked,
        InitialR2T="No" if unasked == "Yes" else "Yes",
    )
    wanted = digest.lower()
    async with one_disk(face, f"{tgtd.url}?header_digest={wanted}&data_digest={wanted}") as disk:
        about = disk.info.connection
        assert (about["header_digest"], about["data_digest"]) == (digest, digest)
        for seed, size in enumerate((512, 8192, 8704, 65536, 66048, MIB, 4 * MIB)):
            data = random.Random(seed).randbytes(size)
            await write(disk, data, 1024)
            assert await read(disk, 1024, size) == data
        await disk.flush()


def test_a_copy_between_a_lun_and_the_file_behind_it_loses_nothing(tgtd: Tgtd) -> None:
    """tgtd locks no files, so nothing tells that they are the same."""
    tgtd.set(HeaderDigest="None", DataDigest="None")
    chance = random.Random("self")
    content = chance.randbytes(2 * MIB) + bytes(3 * MIB) + chance.randbytes(SIZE - 5 * MIB)
    (tgtd.log.parent / "content").write_bytes(content)
    file = tgtd.log.parent / "none"
    good("copy", tgtd.log.parent / "content", tgtd.url)
    for source, destination in ((tgtd.url, file), (file, tgtd.url)):
        good("copy", source, destination, "--verify")
        assert file.read_bytes() == content
        good("copy", tgtd.url, tgtd.log.parent / "back")
        assert (tgtd.log.parent / "back").read_bytes() == content


@pytest.mark.logs(logs.RECONNECTED)
@pytest.mark.parametrize("face", FACES)
async def test_a_lost_session_is_reinstated_after_time2wait(
    tgtd: Tgtd, face: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On which the login has agreed. A target that wants none is not waited for."""
    caplog.set_level(logging.INFO)
    try:
        for wait in (1, 0):
            tgtd.set(HeaderDigest="None", DataDigest="None", DefaultTime2Wait=str(wait))
            async with disk_and_session(face, tgtd.url, {}) as (disk, session):
                assert session.parameters.default_time2wait == wait
                caplog.clear()
                session.disconnect()
                data = random.Random(wait).randbytes(MIB)
                await write(disk, data, 4096)
                assert await read(disk, 4096, MIB) == data
                assert session.counts.reconnects == 1
            told = [each for each in caplog.messages if "Time2Wait of the target" in each]
            assert len(told) == wait
    finally:
        tgtd.set(DefaultTime2Wait="2")


# shows: SYSTEM-5
@pytest.mark.logs(logs.FALLBACK)
@pytest.mark.parametrize("face", FACES)
async def test_a_target_without_iser(tgtd: Tgtd, face: str) -> None:
    """It knows nothing of iSER on that port: an iser:// URL works all the same, as Traditional
    iSCSI, with fallback=iscsi. proves: ISER-2.2-1, ISER-GEN-3.4-1"""
    tgtd.set(HeaderDigest="None", DataDigest="None")
    url = tgtd.url.replace("iscsi://", "iser://")
    async with one_disk(face, url, {"fallback": "iscsi"}) as disk:
        about = disk.info.connection
        assert (about["datamover"], about["provider"]) == ("tcp", "tcp")
        data = random.Random(22).randbytes(MIB)
        await write(disk, data, 4096)
        assert await read(disk, 4096, MIB) == data
        await disk.flush()


async def test_an_iser_url_is_told_which_url_is_right(tgtd: Tgtd) -> None:
    """tgtd is silent to MPA, and agrees to RDMAExtensions, which it does not have on that port."""
    right = re.escape(f"speaks Traditional iSCSI, and no iSER: write {tgtd.url} in place of")
    with pytest.raises(OtherProtocol, match=right):
        await connect(parse_url(tgtd.url.replace("iscsi://", "iser://")), Options())


# shows: SYSTEM-26
async def test_behind_a_gateway(tgtd: Tgtd) -> None:
    """iSER in front, tgtd behind: data, zeroes, trims and errors of the disk.

    proves: ISER-B.1-1, ISER-IB00-6.2-1
    """
    tgtd.set(HeaderDigest="None", DataDigest="None")
    async with one_disk("gateway", tgtd.url) as disk:
        assert disk.info.vendor == "IET" and disk.info.connection["datamover"] == "iser"
        for seed, size in enumerate((512, 8704, MIB, 4 * MIB)):
            data = random.Random(seed).randbytes(size)
            await write(disk, data, 1024, fua=bool(seed % 2))
            assert await read(disk, 1024, size) == data
        await disk.zero(4096, 8192, may_trim=True)
        await disk.trim(MIB, MIB)
        await disk.flush()
        assert await read(disk, 4096, 8192) == bytes(8192)


# shows: SYSTEM-36
def test_a_bidirectional_command(tgtd: Tgtd) -> None:
    """tgtd's iSCSI layer takes it, with the length of the AHS; its disks have no such command. Then
    the session goes on."""
    tgtd.set(HeaderDigest="None", DataDigest="None")
    data, back = bytes(4096), bytearray(3584)
    tgtd.admin("--op", "update", "--mode", "sys", "--name", "debug", "--value", "on")
    try:
        with open_disks([tgtd.url], {}) as disks:
            disk = disks.disks[disks.default]
            core = core_of(disk)
            steps = command(
                core.session,
                core.lun,
                cdb.xdwriteread10(8, 8),
                core.info.name,
                data_in=memoryview(back),
                data_out=memoryview(data),
            )
            with pytest.raises(ScsiError, match="does not know this command"):
                in_thread(disk, steps)
            disk.write(memoryview(data), 4096)
            disk.flush()
    finally:
        tgtd.admin("--op", "update", "--mode", "sys", "--name", "debug", "--value", "off")
    assert "bidi read len 3584" in tgtd.log.read_text(errors="replace")


# CDB, bytes of Data-In that it takes, Data-Out: what both of tgtd's disks answer alike.
COMMANDS: dict[str, tuple[bytes, int, bytes]] = {
    "TEST UNIT READY": (cdb.test_unit_ready(), 0, b""),
    "INQUIRY": (cdb.inquiry(96), 96, b""),
    "INQUIRY, cut": (cdb.inquiry(36), 20, b""),
    "INQUIRY, page 0": (cdb.inquiry(255, 0), 255, b""),
    "INQUIRY, page 83h": (cdb.inquiry(255, 0x83), 255, b""),
    "INQUIRY, no such page": (cdb.inquiry(255, 0x42), 255, b""),
    "READ CAPACITY(10)": (cdb.read_capacity10(), 8, b""),
    "READ CAPACITY(16)": (cdb.read_capacity16(32), 64, b""),
    "REPORT LUNS": (bytes((0xA0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0)), 256, b""),
    "MODE SENSE(6)": (bytes((0x1A, 0, 0x3F, 0, 255, 0)), 255, b""),
    "WRITE(10)": (bytes((0x2A, 0, 0, 0, 0, 9, 0, 0, 2, 0)), 0, b"0123456789abcdef" * 64),
    "READ(10)": (bytes((0x28, 0, 0, 0, 0, 9, 0, 0, 2, 0)), 1024, b""),
    "READ(10), room for more": (bytes((0x28, 0, 0, 0, 0, 9, 0, 0, 2, 0)), 4096, b""),
    "READ(10) behind the end": (bytes((0x28, 0, 0xFF, 0, 0, 0, 0, 0, 1, 0)), 512, b""),
    "WRITE(16) behind the end": (bytes((0x8A, 0xFF, *(0,) * 11, 1, 0, 0)), 0, bytes(512)),
    "SYNCHRONIZE CACHE(10)": (bytes((0x35,)) + bytes(9), 0, b""),
    "PERSISTENT RESERVE IN": (bytes((0x5E, 0, 0, 0, 0, 0, 0, 0, 64, 0)), 64, b""),
    "PERSISTENT RESERVE OUT": (bytes((0x5F, 1, 0, 0, 0, 0, 0, 0, 24, 0)), 0, bytes(24)),
    "a command that there is not": (bytes((0xC7,)) + bytes(9), 0, b""),
}


def test_commands_of_the_callers_as_libiscsi_sends_them(tgtd: Tgtd) -> None:
    """``disk.command`` brings, bit by bit, the status, sense data, residual and data that libiscsi
    is given for the same CDBs."""
    if not ctypes.util.find_library("iscsi"):
        pytest.skip("requires libiscsi")
    tgtd.set(HeaderDigest="None", DataDigest="None")
    theirs = libiscsi.answers(tgtd.url, list(COMMANDS.values()))
    with open_disks([tgtd.url], {}) as disks:
        disk = disks.disks[disks.default]
        for (name, (block, into, out)), answer in zip(COMMANDS.items(), theirs, strict=True):
            buffer = bytearray(into)
            result = disk.command(block, buffer, out)
            moved = into - max(0, result.residual) if not result.status else 0
            ours = (result.status, result.sense, result.residual, bytes(buffer[:moved]))
            assert ours == answer, name
    statuses = [answer.status for answer in theirs]
    assert statuses.count(0) > 10 and statuses.count(2) >= 4


async def test_a_digest_that_it_does_not_have(tgtd: Tgtd) -> None:
    tgtd.set(HeaderDigest="None", DataDigest="None")
    with pytest.raises(LoginError, match="header-digest=crc32c,none"):
        async with one_disk("async", f"{tgtd.url}?header_digest=crc32c"):
            pass
    async with one_disk("async", f"{tgtd.url}?header_digest=crc32c,none") as disk:
        assert disk.info.connection["header_digest"] == "None"


@pytest.mark.parametrize("face", FACES)
async def test_reserve_exclusive(tgtd: Tgtd, face: str) -> None:
    """The LUN is reserved, refused to other initiators, given back, and reserved by another."""
    key = {"reserve": "exclusive", "reserve-key": "0xa"}
    first = {**key, "initiator-name": "iqn.2026-11.example:a"}
    other = {"reserve": "exclusive", "initiator-name": "iqn.2026-11.example:b"}
    async with one_disk(face, tgtd.url, first) as disk:
        await write(disk, b"d" * 512, 0)
        with pytest.raises(Busy, match="key 0xa, Exclusive Access, Registrants Only"):
            async with one_disk(face, tgtd.url, other):
                pass
        async with one_disk(face, tgtd.url, {"initiator-name": "iqn.2026-11.example:c"}) as beside:
            with pytest.raises(ReservationConflict):
                await write(beside, b"x" * 512, 0)
    async with one_disk(face, tgtd.url, other) as disk:
        assert await read(disk, 0, 512) == b"d" * 512


async def test_take_over_and_resume(tgtd: Tgtd) -> None:
    async def log_in() -> Host:
        driver = TrioDriver(await connect(parse_url(tgtd.url), Options()))
        await nursery.start(driver.run)
        sessions.append(Host(driver, luns.encode(1)))
        return sessions[-1]

    sessions: list[Host] = []
    dead, taken = (Reservation("lun1", "naa.3", 0xA, initiator_name("")) for _ in range(2))
    async with trio.open_nursery() as nursery:
        first, again, third = [await log_in() for _ in range(3)]
        await first.run(dead.acquire(first.session, first.lun))
        dead._unlock()  # as if its process had been killed
        await again.run(taken.acquire(again.session, again.lun))
        assert await again.keys() == [0xA]
        with pytest.raises(ReservationConflict):
            await first.write(b"x" * 512)
        await again.run(taken.resume(again.session, again.lun))
        await third.run(taken.resume(third.session, third.lun))
        assert await third.keys() == [0xA]
        await third.write(b"y" * 512)
        with pytest.raises(ReservationLost):
            await first.run(dead.resume(first.session, first.lun))
        await third.run(taken.release(third.session, third.lun))
        assert await first.keys() == []
        for each in sessions:
            await each.driver.log_out()
        nursery.cancel_scope.cancel()


# -- CHAP ------------------------------------------------------------------------------------------


def with_secrets(folder: Path, own: str = OWN[1], theirs: str = "") -> dict[str, str]:
    """The options that name a file with the secrets of the test."""
    file = folder / "secrets"
    file.write_text(f"{own}\n{theirs}\n" if theirs else f"{own}\n")
    file.chmod(0o600)
    return {"chap_secret_file": str(file)}


def as_user(url: str, query: str = "") -> str:
    return url.replace("iscsi://", f"iscsi://{OWN[0]}@") + query


# shows: SYSTEM-45
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("unasked", ["Yes", "No"])
async def test_all_block_operations(
    tgtd: Tgtd, tmp_path: Path, record: Record, asks: str, unasked: str
) -> None:
    """With digests, and unsolicited data on and off. proves: ISER-11-2"""
    tgtd.set(
        HeaderDigest="CRC32C",
        DataDigest="CRC32C",
        ImmediateData=unasked,
        InitialR2T="No" if unasked == "Yes" else "Yes",
    )
    url, options = tgtd.urls[asks], {"header_digest": "crc32c", "data_digest": "crc32c"}
    if asks != "none":
        url = as_user(url)
        options |= with_secrets(tmp_path, theirs=THEIRS[1] if asks == "mutual" else "")
    outcome = await everything(url, options)
    about = outcome.connection
    assert (about["header_digest"], about["data_digest"]) == ("CRC32C", "CRC32C")
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport=f"TCP, CRC32C digests, CHAP {asks}, ImmediateData={unasked}",
        outcome=outcome,
    )


async def test_only_md5(tgtd: Tgtd, tmp_path: Path) -> None:
    """tgtd has SHA-1 under the number of SHA-256: so the initiator offers MD5 before that."""
    tgtd.set(HeaderDigest="None", DataDigest="None")
    url, secrets = tgtd.urls["mutual"], with_secrets(tmp_path, theirs=THEIRS[1])
    async with one_disk("async", as_user(url, "?auth=md5"), secrets) as disk:
        assert disk.size == SIZE
    for auth in ("sha1", "sha256", "sha3-256"):
        with pytest.raises(LoginError):
            async with one_disk("async", as_user(url, f"?auth={auth}"), secrets):
                pass


@pytest.mark.parametrize(
    ("asks", "own", "theirs", "remedy"),
    [
        ("one-way", "loud-loud-loud", "", "authentication failed"),
        ("mutual", OWN[1], "loud-loud-loud", "did not prove who it is"),
    ],
)
async def test_a_wrong_secret(
    tgtd: Tgtd, tmp_path: Path, asks: str, own: str, theirs: str, remedy: str
) -> None:
    with pytest.raises(AuthenticationError, match=remedy) as caught:
        async with one_disk("async", as_user(tgtd.urls[asks]), with_secrets(tmp_path, own, theirs)):
            pass
    assert "loud" not in str(caught.value)


async def test_no_credentials(tgtd: Tgtd) -> None:
    with pytest.raises(LoginError):
        async with one_disk("async", tgtd.urls["one-way"]):
            pass


# shows: SYSTEM-7
async def test_discovery(tgtd: Tgtd, record: Record) -> None:
    """Discovery of several targets, and of so many that the answer does not fit into one PDU."""
    url = replace(parse_url(tgtd.url), iqn="", lun=None)
    answer = await send_targets(url, Options())
    assert [each.name for each in answer.targets] == [f"{PEER}-{asks}" for asks in ASKS]
    assert {each.portals for each in answer.targets} == {(Portal("127.0.0.1", url.port, 1),)}
    extra = [f"{PEER}-{number:03}-{'x' * 60}" for number in range(100)]
    for tid, name in enumerate(extra, 100):
        tgtd.admin("--op", "new", "--mode", "target", "--tid", str(tid), "-T", name)
        tgtd.admin("--op", "bind", "--mode", "target", "--tid", str(tid), "-I", "ALL")
    try:
        answer = await send_targets(url, Options())
    finally:
        for tid, _ in enumerate(extra, 100):
            tgtd.admin("--op", "delete", "--mode", "target", "--tid", str(tid))
    assert sorted(each.name for each in answer.targets)[:100] == extra
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport="TCP",
        ran="SendTargets=All with 103 targets",
    )
