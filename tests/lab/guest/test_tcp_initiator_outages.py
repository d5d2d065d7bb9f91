"""What a disk of the kernel's initiator, and beside it a device of ours, does while its target is
away, and when the target comes back without its cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from iserblk.url import parse_url
from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest import lio
from tests.lab.guest.attached import attached, mounted, nothing_left
from tests.lab.guest.test_tcp_initiator_same_lun import NO_CHAP, without_chap
from tests.support.programs import SLOW_S, run
from tests.support.target import IQN, TargetProcess
from tests.support.until import until_blocking

MIB = 1 << 20
SPEC = "lun:size=64M:volatile-cache=64M"
SHORT_S = 15  # and long enough for a request to a target that is there: the guest is emulated


def writing(file: Path) -> subprocess.Popen[str]:
    """A program that writes a file, and waits until that is on the disk."""
    return subprocess.Popen(
        ["dd", "if=/dev/zero", f"of={file}", "bs=64k", "count=1", "conv=fsync"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=SLOW_S)
    return process.returncode, said


def waits(process: subprocess.Popen[str]) -> bool:
    """Whether it waits for a disk."""
    assert process.poll() is None, process.communicate()
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


def read_only(folder: Path) -> bool:
    """Whether a program that writes in it is told so. It may fail otherwise."""
    return "Read-only file system" in outcome(writing(folder / "another"))[1]


def answers(device: Path) -> bool:
    words = ["dd", f"if={device}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]
    done = subprocess.run(words, capture_output=True, check=False, timeout=SLOW_S)
    return done.returncode == 0


@contextmanager
def second_lun_of_lio(initiator: str, limit_s: int) -> Iterator[Path]:
    """A disk of it, whose requests wait so long for the target."""
    url = parse_url(os.environ["LAB_URL2"])
    with without_chap():
        if initiator == "iserblk":
            with attached(os.environ["LAB_URL2"], "-o", f"io-timeout={limit_s}") as device:
                yield device
        else:
            settings = {**NO_CHAP, "node.session.timeo.replacement_timeout": str(limit_s)}
            with kernel.logged_in(
                url.host, settings, "default", url.port, url.iqn, str(url.lun)
            ) as device:
                yield device
    nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("limit_s", [SHORT_S, 300])
@pytest.mark.parametrize("initiator", ["open-iscsi", "iserblk"])
def test_the_target_is_away(initiator: str, limit_s: int, tmp_path: Path) -> None:
    """Within the limit programs see a pause. After it they see errors; ext4 is read-only, and stays
    so when the target is back, until it is mounted again."""
    place = tmp_path / "place"
    files = place / "files"
    with second_lun_of_lio(initiator, limit_s) as device:
        run("mkfs.ext4", "-q", "-F", device)
        with mounted(device, place):
            files.mkdir()
            assert outcome(writing(files / "before"))[0] == 0
            lio.disable()
            try:
                meanwhile = writing(files / "meanwhile")
                if limit_s == SHORT_S:
                    assert outcome(meanwhile)[0] != 0
                    until_blocking(lambda: read_only(files))
                else:
                    until_blocking(lambda: waits(meanwhile))
            finally:
                lio.enable()
            if limit_s != SHORT_S:
                assert outcome(meanwhile)[0] == 0
            until_blocking(lambda: answers(device))
            if limit_s == SHORT_S:
                assert read_only(files)
            else:
                assert outcome(writing(files / "after"))[0] == 0
        with mounted(device, place):
            assert (files / "before").exists()
            assert outcome(writing(files / "again"))[0] == 0


@contextmanager
def by_open_iscsi(target: TargetProcess) -> Iterator[Path]:
    host, port = target.listen.split(":")
    with kernel.logged_in(host, NO_CHAP, "default", int(port), iqn=IQN) as device:
        yield device


def by_iserblk(target: TargetProcess) -> AbstractContextManager[Path]:
    url = target.url.replace("iser://", "iscsi://")
    return attached(f"{url}/0", "-o", "io-timeout=300")


@pytest.mark.parametrize("initiator", ["open-iscsi", "iserblk"])
def test_a_target_that_has_lost_its_cache(initiator: str, tmp_path: Path) -> None:
    """The target answers writes that are in its cache, dies, and comes back. With the kernel's
    initiator the flush that follows succeeds, and the data is not there. With ours it is."""
    data = os.urandom(MIB)
    (tmp_path / "data").write_bytes(data)
    log, specs = tmp_path / "target.log", [f"{tmp_path}/{SPEC}"]
    target = TargetProcess(specs, log, f"{os.environ['LAB_LISTEN']}:3260")
    try:
        opened = by_open_iscsi if initiator == "open-iscsi" else by_iserblk
        with opened(target) as device:
            run("dd", f"if={tmp_path}/data", f"of={device}", "bs=64k", "oflag=direct")
            target.kill()
            target = TargetProcess(specs, log, target.listen)
            run("sync", device)  # opens it, and calls fsync(2)
            run("dd", f"if={device}", f"of={tmp_path}/back", "bs=64k", "count=16", "iflag=direct")
    finally:
        target.stop()
    nothing_left()
    back = (tmp_path / "back").read_bytes()
    assert back == (bytes(MIB) if initiator == "open-iscsi" else data)
