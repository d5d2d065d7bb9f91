"""Our initiator and istgt, over Traditional iSCSI. Needs ``scripts/peers istgt``."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import pytest
import trio

from iserblk.doctor.finding import OK
from iserblk.doctor.portal import Limits, check_portal
from iserblk.errors import AuthenticationError, OtherProtocol
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.scsi import luns
from iserblk.url import parse_url
from tests.cli.commands import bad, good, good_json
from tests.support import fenced, fio, greeting, istgt, logs, lost_cache
from tests.support.blockwork import everything
from tests.support.faces import one_disk
from tests.support.failing_disk import (
    BLOCK,
    LOST_ANSWER,
    FailingDisk,
    changes_a_block_in_part,
    changes_a_dropped_block_in_part,
    loses_the_answer_that_tells,
)
from tests.support.faults.proxy import FaultProxy
from tests.support.interop import Record, package
from tests.support.istgt import OWN, THEIRS, Istgt
from tests.support.nbdkit import need, run, running_nbd
from tests.support.outages import Outages

MIB = 1 << 20
SIZE = 64 * MIB
REGION = MIB  # per job of fio
UP_S, DOWN_S = 1.5, 0.3
KILLS = 2
DIGESTS = {"none": "", "crc32c": "?header_digest=crc32c&data_digest=crc32c"}
in_thread = trio.to_thread.run_sync


OverFailing = tuple[Istgt, FaultProxy]


@pytest.fixture(scope="module")
def program() -> Path:
    return istgt.program()


@pytest.fixture(scope="module")
def running(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Istgt]:
    made = Istgt(program, tmp_path_factory.mktemp("istgt"), SIZE)
    yield made
    made.stop()


@pytest.fixture
def mortal(program: Path, tmp_path: Path) -> Iterator[Istgt]:
    """One that the test may kill."""
    made = Istgt(program, tmp_path, SIZE)
    try:
        yield made
        made.check()
    finally:
        made.kill()


def with_secrets(folder: Path, own: str = OWN[1], theirs: str = "") -> dict[str, str]:
    """The options that name a file with the secrets of the test."""
    file = folder / "secrets"
    file.write_text(f"{own}\n{theirs}\n" if theirs else f"{own}\n")
    file.chmod(0o600)
    return {"chap_secret_file": str(file)}


def as_user(url: str) -> str:
    return url.replace("iscsi://", f"iscsi://{OWN[0]}@")


def test_info(running: Istgt, record: Record) -> None:
    """What its LUN has not is told before anything is tried."""
    (told,) = good_json("info", running.url)["disks"]
    assert (told["size"], told["block_size"]) == (SIZE, 512)
    assert (told["vendor"], told["product"], told["serial"]) == ("istgt", "none", "S1")
    assert told["write_cache"] and not told["read_only"]
    lacks = ("fua", "can_trim", "can_zero", "zero_by_unmap", "can_extents")
    assert not any(told[each] for each in lacks)
    found = good_json("discover", f"iscsi://{running.portal}")
    assert {each["name"] for each in found["targets"]} == set(running.names)
    record(
        ours="iserblk", peer="istgt", version=running.version, transport="TCP", ran="discover, info"
    )


@pytest.mark.parametrize("digest", DIGESTS)
def test_copy_both_ways(running: Istgt, tmp_path: Path, record: Record, digest: str) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    # With a part of zeroes, which it has no command for, and an end that is no whole MiB.
    content = random.Random(digest).randbytes(17 * MIB + 4608) + bytes(9 * MIB)
    there.write_bytes(content + random.Random(1).randbytes(SIZE - len(content)))
    url = running.url + DIGESTS[digest]
    good("copy", there, url)
    good("copy", url, back)
    assert back.read_bytes() == there.read_bytes() == running.disk().read_bytes()
    record(
        ours="iserblk copy",
        peer="istgt",
        version=running.version,
        transport=f"TCP, {digest.upper() if digest != 'none' else 'no'} digests",
        ran=f"a file of {SIZE // MIB} MiB to the LUN, and the LUN to a file",
    )


async def test_an_iser_url_is_told_which_url_is_right(running: Istgt) -> None:
    right = re.escape(f"speaks Traditional iSCSI, and no iSER: write {running.url} in place of")
    with pytest.raises(OtherProtocol, match=right):
        await connect(parse_url(running.url.replace("iscsi://", "iser://")), Options())


def test_a_trim_is_refused(running: Istgt) -> None:
    assert bad(27, "trim", running.url, "--all") == (
        "iserblk: lun0: the LUN cannot unmap; zero the range instead"
    )


# shows: SYSTEM-45, SYSTEM-51
@pytest.mark.parametrize("asks", istgt.ASKS)
@pytest.mark.parametrize("digest", DIGESTS)
async def test_all_block_operations(
    running: Istgt, tmp_path: Path, record: Record, asks: str, digest: str
) -> None:
    """A write with FUA becomes a write and a flush; zeroes are written."""
    url, options = running.urls[asks] + DIGESTS[digest], {}
    if asks != "none":
        url = as_user(url)
        options = with_secrets(tmp_path, theirs=THEIRS[1] if asks == "mutual" else "")
    outcome = await everything(url, options)
    wanted = "CRC32C" if digest == "crc32c" else "None"
    about = outcome.connection
    assert (about["header_digest"], about["data_digest"]) == (wanted, wanted)
    record(
        ours="initiator",
        peer="istgt",
        version=running.version,
        transport=f"TCP, digests {wanted}, CHAP {asks}",
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("asks", "own", "theirs", "remedy"),
    [
        ("one-way", "loud-loud-loud", "", "authentication failed: check user name and secret"),
        ("one-way", "", "", "the target wants a user name and a secret"),
        ("mutual", OWN[1], "loud-loud-loud", "did not prove who it is"),
        ("mutual", OWN[1], "", "authentication failed"),  # it asks for both ways
    ],
)
async def test_a_wrong_secret(
    running: Istgt, tmp_path: Path, asks: str, own: str, theirs: str, remedy: str
) -> None:
    url, options = running.urls[asks], {}
    if own:
        url, options = as_user(url), with_secrets(tmp_path, own, theirs)
    with pytest.raises(AuthenticationError, match=remedy):
        async with one_disk("async", url, options):
            pass


@pytest.mark.parametrize("kind", ["iserblk", "nbdkit"])
def test_through_nbd(running: Istgt, tmp_path: Path, record: Record, kind: str) -> None:
    """qemu-img writes an image to it through NBD, and finds no difference; libnbd's client flushes
    and is told that there are no discards."""
    need("qemu-img")
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    image = tmp_path / "image"
    image.write_bytes(random.Random(kind).randbytes(SIZE - MIB) + bytes(MIB))
    with running_nbd(kind, [running.url], tmp_path) as uri:
        run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", str(image), uri)
        run("qemu-img", "compare", "-f", "raw", "-F", "raw", str(image), uri)
        client = nbd.NBD()
        client.connect_uri(uri)
        client.pwrite(b"n" * 5000, 700, nbd.CMD_FLAG_FUA)
        client.zero(8192, 8192)
        client.flush()
        assert client.pread(5000, 700) == b"n" * 5000
        assert client.pread(8192, 8192) == bytes(8192)
        assert not client.can_trim()
        client.shutdown()
    content = running.disk().read_bytes()
    assert content[700:5700] == b"n" * 5000 and content[8192:16384] == bytes(8192)
    record(
        ours="iserblk nbd" if kind == "iserblk" else "nbd_plugin",
        peer="istgt",
        version=running.version,
        transport="TCP",
        ran=f"{package('qemu-utils')} convert and compare, libnbd: write with FUA, zero, flush",
    )


# -- its own death ---------------------------------------------------------------------------------


async def test_what_a_new_nexus_hears(mortal: Istgt) -> None:
    """29/00, but only the first one after its start."""
    names = [f"iqn.2026-11.example:{each}" for each in "ab"]
    heard = [await greeting.greeting(mortal.url, name) for name in names]
    await in_thread(mortal.kill)
    await in_thread(mortal.start)
    heard += [await greeting.greeting(mortal.url, name) for name in reversed(names)]
    assert heard == [["29/00"], [], ["29/00"], []]


async def test_the_doctor_leaves_what_a_new_nexus_hears(mortal: Istgt) -> None:
    """Its INQUIRY and REPORT LUNS take no unit attention away: whether the cache was lost is told
    to those who have written."""
    report = await check_portal(parse_url(mortal.url), Options(), Limits())
    assert [each.status for each in report.findings[-2:]] == [OK, OK], report
    assert await greeting.greeting(mortal.url) == ["29/00"]


def need_nbd_engine() -> None:
    if "nbd" not in run("fio", "--enghelp").split():
        pytest.skip("this fio has no nbd engine (built without libnbd)")


@pytest.mark.parametrize("kind", ["iserblk", "nbdkit"])
def test_it_is_killed_under_fio(mortal: Istgt, tmp_path: Path, record: Record, kind: str) -> None:
    """fio writes, reads and compares, and sees no error while it is killed and started again."""
    need("fio", *(["nbdkit"] if kind == "nbdkit" else []))
    need_nbd_engine()
    with (
        running_nbd(kind, [mortal.url], tmp_path, parameters=("io-timeout=60",)) as uri,
        Outages(mortal.kill, mortal.start, UP_S, DOWN_S) as outages,
    ):
        while outages.count < KILLS:
            fio.verify("--ioengine=nbd", f"--uri={uri}", region=REGION)
    record(
        ours="iserblk nbd" if kind == "iserblk" else "nbd_plugin",
        peer="istgt",
        version=mortal.version,
        transport="TCP",
        ran=f"{package('fio')} verify while istgt is killed and started again",
    )


class Lossy:
    """istgt behind a proxy: it dies with what was not flushed, and when it is back, another
    initiator comes first and hears 29/00. Ours hears nothing."""

    def __init__(self, target: Istgt, proxy: FaultProxy) -> None:
        self._target = target
        self._proxy = proxy
        self.url = proxy.through(target.url)
        self.version = target.version
        self.medium = lost_cache.Medium(target.disk(), SIZE)

    async def lose(self) -> None:
        await in_thread(self.die)
        self.medium.lose()
        await self.return_()

    async def lose_nothing(self) -> None:
        await in_thread(self.die)
        await self.return_()

    def die(self) -> None:
        self._proxy.refuse()
        self._target.kill()

    async def return_(self) -> None:
        await in_thread(self._target.start)
        assert await greeting.greeting(self._target.url) == ["29/00"]
        self._proxy.admit()


@pytest.fixture
def lossy(mortal: Istgt) -> Iterator[Lossy]:
    with FaultProxy(mortal.address, framing="raw") as proxy:
        yield Lossy(mortal, proxy)


def test_it_loses_its_cache_under_fio(lossy: Lossy, tmp_path: Path, record: Record) -> None:
    """All that fio wrote since the last flush is lost each time, and nothing tells of it."""
    need("fio")
    need_nbd_engine()
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    alive = Lock()

    def strike() -> None:
        alive.acquire()
        lossy.die()

    def mend() -> None:
        try:
            lossy.medium.lose()
            trio.run(lossy.return_)
        finally:
            alive.release()

    lossy.medium.keep()
    with (
        running_nbd("iserblk", [lossy.url], tmp_path, parameters=("io-timeout=60",)) as uri,
        Outages(strike, mend, UP_S, DOWN_S) as outages,
    ):
        client = nbd.NBD()
        client.connect_uri(uri)
        while outages.count < KILLS:
            fio.verify("--ioengine=nbd", f"--uri={uri}", region=REGION)
            with alive:
                client.flush()
                lossy.medium.keep()
        client.shutdown()
    record(
        ours="iserblk nbd",
        peer="istgt",
        version=lossy.version,
        transport="TCP",
        ran=f"{package('fio')} verify while istgt loses what was not flushed, and tells another "
        "host",
    )


may_be_logged = pytest.mark.logs(
    logs.RECONNECTED, logs.LOST_POWER, logs.LOST_WRITES, logs.ONE_OF_SEVERAL
)


# shows: SYSTEM-30
@may_be_logged
@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("name", lost_cache.CASES)
async def test_a_loss_of_which_it_tells_another_host(
    lossy: Lossy, record: Record, name: str, connections: int
) -> None:
    case = lost_cache.CASES[name]
    await lost_cache.loses_its_cache(lossy.url, lossy.medium, lossy.lose, case, connections)
    record(
        ours="initiator",
        peer="istgt",
        version=lossy.version,
        transport=f"TCP, connections={connections}",
        ran=f"killed, what was not flushed is lost, and another host hears of it first: {case.ran}",
    )


@may_be_logged
@pytest.mark.parametrize("options", [{}, {"shared": "yes"}], ids=["journal", "shared=yes"])
async def test_a_restart_that_loses_nothing(lossy: Lossy, options: dict[str, str]) -> None:
    await lost_cache.loses_nothing(lossy.url, lossy.medium, lossy.lose_nothing, options)


# How many of the 18 WRITEs come before the other host.
@pytest.mark.logs(logs.RECONNECTED, logs.LOST_WRITES)
@pytest.mark.parametrize("number", [0, 3, 17])
async def test_another_host_reserves_the_lun_while_the_journal_is_sent_again(
    mortal: Istgt, record: Record, number: int
) -> None:
    await fenced.reserves_while_the_journal_is_sent_again(
        mortal.url, mortal.address, mortal.disk(), number, luns.encode(0)
    )
    record(
        ours="initiator",
        peer="istgt",
        version=mortal.version,
        transport="TCP",
        ran="another host reserves the LUN while the journal is sent again: nothing older goes "
        "over something newer, and what was refused is told",
    )


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_WRITES)
@pytest.mark.parametrize("writes", [True, False])
async def test_another_host_reserves_the_lun_before_the_connection_is_lost(
    mortal: Istgt, record: Record, writes: bool
) -> None:
    await fenced.reserves_before_the_connection_is_lost(
        mortal.url, mortal.address, mortal.disk(), writes, luns.encode(0)
    )
    record(
        ours="initiator",
        peer="istgt",
        version=mortal.version,
        transport="TCP",
        ran="another host has reserved the LUN, and written, before the connection is lost: what "
        "it has written stays",
    )


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_WRITES)
async def test_another_host_reserves_the_lun_again_while_it_is_compared(
    mortal: Istgt, record: Record
) -> None:
    await fenced.reserves_again_while_the_lun_is_compared(
        mortal.url, mortal.address, mortal.disk(), luns.encode(0)
    )
    record(
        ours="initiator",
        peer="istgt",
        version=mortal.version,
        transport="TCP",
        ran="another host reserves the LUN a second time, while it is compared after the first: "
        "what it has written stays",
    )


@pytest.fixture
def over_failing(program: Path, tmp_path: Path, failing: FailingDisk) -> Iterator[OverFailing]:
    target = Istgt(program, tmp_path, SIZE, {"none": Path(failing.device)}, BLOCK)
    try:
        with FaultProxy(target.address) as proxy:
            yield target, proxy
    finally:
        target.kill()


@may_be_logged
@pytest.mark.parametrize("connections", [1, 2])
async def test_a_block_is_changed_in_part_while_the_report_of_a_loss_is_on_its_way(
    over_failing: OverFailing, failing: FailingDisk, record: Record, connections: int
) -> None:
    """fsync fails below it: its SYNCHRONIZE CACHE ends with CHECK CONDITION, and no sense data."""
    target, proxy = over_failing
    await changes_a_block_in_part(proxy.through(target.url), proxy, failing, connections)
    record(
        ours="initiator",
        peer="istgt",
        version=target.version,
        transport=f"TCP, connections={connections}",
        ran="its disk does not keep a block, which is changed in part before a flush tells of "
        "that: it is written again, and then changed",
    )


@may_be_logged
@pytest.mark.parametrize("hears", [True, False])
async def test_a_block_that_was_dropped_is_changed_in_part(
    over_failing: OverFailing, failing: FailingDisk, record: Record, hears: bool
) -> None:
    """Before a flush has told of that; and it is told to no connection that lives."""
    target, proxy = over_failing
    await changes_a_dropped_block_in_part(proxy.through(target.url), proxy, failing, hears)
    record(
        ours="initiator",
        peer="istgt",
        version=target.version,
        transport="TCP",
        ran="its disk does not keep a block, which is changed in part before a flush tells of "
        "that: a flush comes first, and nothing is lost, also where its status goes astray",
    )


@may_be_logged
@pytest.mark.parametrize("fua", [False, True], ids=["flush", "FUA"])
async def test_the_answer_that_tells_of_a_loss_is_lost(
    over_failing: OverFailing, failing: FailingDisk, record: Record, fua: bool
) -> None:
    """And the kernel goes on showing what it could not write: a comparison proves nothing."""
    target, proxy = over_failing
    await loses_the_answer_that_tells(proxy.through(target.url), proxy, failing, fua)
    record(
        ours="initiator",
        peer="istgt",
        version=target.version,
        transport="TCP",
        ran=LOST_ANSWER,
    )
