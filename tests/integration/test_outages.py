"""Front-ends while their target is killed and comes back, every few seconds.

With an io-timeout above the outage no program sees an error or a wrong byte, although the target
loses its cache each time. With an io-timeout below it, requests in the outage fail with EIO, and
later ones succeed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import StartTarget
from tests.support import fio
from tests.support.faults.proxy import FaultProxy
from tests.support.fuse import need_fuse, running_mount
from tests.support.nbdkit import need, run, running_nbd
from tests.support.outages import Outages, Restarted, one_portal_at_a_time
from tests.support.target import TargetProcess

MIB = 1 << 20
REGION = MIB  # per job of fio
SPEC = f"lun:size={fio.JOBS * REGION // MIB}M:volatile-cache=64M"
SHORT_S, LONG_S = 6.0, 120.0
UP_S, DOWN_S = 1.0, 0.3
NBD = ("iserblk", "nbdkit")
FRONT_ENDS = (*NBD, "fuse")
# nbdkit's plugin is a face for threads over the same disk: it is tried in the simplest case.
OURS = ("iserblk", pytest.param("nbdkit", marks=pytest.mark.long), "fuse")


@contextmanager
def front_end(
    kind: str, urls: list[str], place: Path, options: tuple[str, ...] = ()
) -> Iterator[list[str]]:
    """The options of fio for this front-end."""
    if kind in NBD:
        need("fio", *(["nbdkit"] if kind == "nbdkit" else []))
        if "nbd" not in run("fio", "--enghelp").split():
            pytest.skip("this fio has no nbd engine (built without libnbd)")
        with running_nbd(kind, urls, place, parameters=options) as uri:
            yield ["--ioengine=nbd", f"--uri={uri}"]
    else:
        need_fuse()
        need("fio")
        with running_mount(urls, place / "mnt", *options) as mountpoint:
            yield ["--ioengine=psync", f"--filename={mountpoint}/lun0", "--fsync=50"]


def verify_for(seconds: float, engine: list[str]) -> tuple[int, float]:
    """Let fio write and verify again and again; the number of rounds, and the slowest request."""
    end = time.monotonic() + seconds
    rounds, slowest = 0, 0.0
    while time.monotonic() < end:
        slowest = max(slowest, fio.verify(*engine, region=REGION))
        rounds += 1
    return rounds, slowest


def report(capsys: pytest.CaptureFixture[str], *words: object) -> None:
    with capsys.disabled():
        print("\n ", *words)


def killed(target: TargetProcess, start_target: StartTarget) -> Outages:
    running = Restarted(target, lambda listen: start_target(SPEC, listen=listen))
    return Outages(running.kill, running.start, UP_S, DOWN_S)


def _killed_target(
    seconds: float,
    start_target: StartTarget,
    place: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = start_target(SPEC)
    with (
        front_end(kind, [f"{target.url}/0"], place, ("io-timeout=60",)) as engine,
        killed(target, start_target) as outages,
    ):
        rounds, slowest = verify_for(seconds, engine)
        assert outages.count >= 2
    report(capsys, f"{kind}: killed {outages.count} times, {rounds} rounds of fio,",
           f"longest pause {slowest:.2f} s")  # fmt: skip


@pytest.mark.parametrize("kind", FRONT_ENDS)
def test_fio_sees_no_error(
    start_target: StartTarget, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed_target(SHORT_S, start_target, tmp_path, kind, capsys)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FRONT_ENDS)
def test_fio_sees_no_error_for_two_minutes(
    start_target: StartTarget, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed_target(LONG_S, start_target, tmp_path, kind, capsys)


# -- two portals -----------------------------------------------------------------------------------


def _killed_portals(
    seconds: float,
    start_target: StartTarget,
    place: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two portals, one by iSER, one by TCP: one is killed at a time."""
    target = start_target(SPEC)
    here = ("127.0.0.1", target.port)
    with FaultProxy(here, framing="raw") as one, FaultProxy(here, framing="raw") as two:
        urls = [one.through(f"{target.url}/0"),
                two.through(f"{target.url}/0").replace("iser:", "iscsi:")]  # fmt: skip
        with (
            front_end(kind, urls, place, ("io-timeout=60",)) as engine,
            one_portal_at_a_time((one, two), UP_S, UP_S) as outages,
        ):
            rounds, slowest = verify_for(seconds, engine)
            assert outages.count >= 2 and len(one.links) > 1 and two.links
    report(capsys, f"{kind}: portals killed {outages.count} times, {rounds} rounds of fio,",
           f"longest pause {slowest:.2f} s")  # fmt: skip


@pytest.mark.parametrize("kind", OURS)
def test_one_of_two_portals(
    start_target: StartTarget, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed_portals(SHORT_S, start_target, tmp_path, kind, capsys)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FRONT_ENDS)
def test_one_of_two_portals_for_two_minutes(
    start_target: StartTarget, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _killed_portals(LONG_S, start_target, tmp_path, kind, capsys)


# -- below the outage ------------------------------------------------------------------------------

Io = Callable[[], object]


@contextmanager
def requests(
    kind: str, urls: list[str], place: Path, io_timeout: int
) -> Iterator[tuple[dict[str, Io], type[Exception]]]:
    """The kinds of request, and the exception that a failed one raises, which has an ``errno``."""
    block = b"r" * 4096
    if kind in NBD:
        need(*(["nbdkit"] if kind == "nbdkit" else []))
        nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
        with running_nbd(kind, urls, place, parameters=(f"io-timeout={io_timeout}",)) as uri:
            client = nbd.NBD()
            client.connect_uri(uri)
            yield (
                {
                    "read": lambda: client.pread(4096, 0),
                    "write": lambda: client.pwrite(block, 4096),
                    "flush": client.flush,
                    "zero": lambda: client.zero(4096, 8192),
                    "trim": lambda: client.trim(4096, 12288),
                },
                nbd.Error,
            )
            client.shutdown()
        return
    need_fuse()
    with running_mount(urls, place / "mnt", f"io-timeout={io_timeout}") as mountpoint:
        fd = os.open(mountpoint / "lun0", os.O_RDWR)
        try:
            yield (
                {
                    "read": lambda: os.pread(fd, 4096, 0),
                    "write": lambda: os.pwrite(fd, block, 4096),
                    "flush": lambda: os.fsync(fd),
                },
                OSError,
            )
        finally:
            os.close(fd)


@pytest.mark.parametrize("kind", FRONT_ENDS)
def test_an_outage_beyond_io_timeout(start_target: StartTarget, tmp_path: Path, kind: str) -> None:
    """Each request fails with EIO within its io-timeout; later requests succeed."""
    target = start_target(SPEC)
    with requests(kind, [f"{target.url}/0"], tmp_path, 1) as (calls, failure):
        for call in calls.values():
            call()
        target.kill()
        for name, call in calls.items():
            with pytest.raises(failure) as caught:
                call()
            code = caught.value.errno  # type: ignore[attr-defined]
            assert code in (errno.EIO, "EIO"), name
        start_target(SPEC, listen=target.listen)
        deadline = time.monotonic() + 60
        while True:
            try:
                calls["read"]()
                break
            except failure:
                assert time.monotonic() < deadline
        for _ in range(3):
            for name in ("write", "read", "flush"):
                calls[name]()
        assert bytes(calls["read"]()) == bytes(4096)  # type: ignore[call-overload]


# -- a black hole ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", OURS)
def test_a_portal_becomes_a_black_hole(
    start_target: StartTarget, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the missing answer to a ping shows that the connection is gone."""
    target = start_target(SPEC)
    here = ("127.0.0.1", target.port)
    with FaultProxy(here, framing="raw") as one, FaultProxy(here, framing="raw") as two:
        urls = [each.through(f"{target.url}/0") for each in (one, two)]
        with requests(kind, urls, tmp_path, 60) as (calls, _):
            calls["write"]()
            one.refuse()
            assert one.cut("black hole") == 1
            start = time.monotonic()
            calls["write"]()
            calls["flush"]()
            pause = time.monotonic() - start
            assert two.alive
    report(capsys, f"{kind}: a black hole costs {pause:.1f} s")
