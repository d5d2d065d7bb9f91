"""Devices that are in use or absent, and devices whose server or target dies. Nothing is left.

All against our own target: it can be killed, and needs no RDMA device.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, bad, environment, good, iserblk
from tests.lab.guest.attached import (
    DEVICE,
    MIB,
    RUN,
    attached,
    block,
    connected,
    mounted,
    nothing_left,
    servers,
)
from tests.support.fuse import need_fuse
from tests.support.programs import SLOW_S, run
from tests.support.target import IQN, ROOT, TargetProcess, running_target
from tests.support.unit import Unit
from tests.support.until import until_blocking


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    (files / "read-only").write_bytes(b"written once" * 4096)
    specs = [f"{files}/a:size=64M", f"{files}/b:size=32M:block=4096", f"{files}/read-only:ro"]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[TargetProcess]:
    """A target of the test's own, which the test may kill."""
    with running_target([f"{tmp_path}/lun:size=64M"], tmp_path / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    for name in connected():  # after a failure: for the next test
        iserblk("detach", name)
    nothing_left()


@contextmanager
def in_the_background(*arguments: object, **changes: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def server_of(name: str) -> int:
    return int((RUN / name / "server.pid").read_text())


# --- before anything is connected --------------------------------------------------------------


@pytest.mark.long  # tests/nbd/kernel/test_attaching.py refuses the same without a kernel
def test_bad_input(target: TargetProcess) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        silent = f"iser://127.0.0.1:{reserved.getsockname()[1]}/{IQN}/0"
        for status, words, arguments in (
            (4, "Connection refused", (silent,)),
            (21, "no LUN 9", (f"{target.url}/9", DEVICE)),
            (7, "/dev/nbd99: no such device; there are nbd0 to nbd15", (silent, "/dev/nbd99")),
            (7, "/dev/null: no NBD device", (silent, "/dev/null")),
            (7, "3 LUNs for 1 device(s)", (target.url, DEVICE)),
        ):
            assert words in bad(status, "attach", *arguments)
    assert "nothing is attached" in bad(7, "detach", DEVICE)
    nothing_left()


@pytest.mark.long  # tests/nbd/kernel/test_device.py has the refusal
def test_for_root_only() -> None:
    for words in (["attach", f"iser://127.0.0.1/{IQN}/0"], ["detach", str(DEVICE)]):
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", *COMMAND, *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
            timeout=SLOW_S,
        )
        assert done.returncode == 13, done
        assert "only root" in done.stderr


def test_the_module_is_loaded_where_there_is_one(target: TargetProcess) -> None:
    run("rmmod", "nbd")
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /lib/modules && exec "$@"', "sh"]
    words = ["attach", f"{target.url}/0"]
    done = subprocess.run(
        [*hide, *COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=SLOW_S,
    )
    assert done.returncode == 27, done
    assert "this kernel's nbd module cannot be loaded" in done.stderr
    assert not Path("/sys/module/nbd").exists()
    with attached(*words[1:]) as device:
        assert device == DEVICE


# --- devices in use ----------------------------------------------------------------------------


def test_a_device_in_use_is_refused(target: TargetProcess, tmp_path: Path) -> None:
    with attached(f"{target.url}/0", DEVICE):
        assert "/0 is attached there" in bad(28, "attach", f"{target.url}/1", DEVICE)
        run("mkfs.ext4", "-q", DEVICE)
        with mounted(DEVICE, tmp_path / "place") as place:
            assert f"mounted on {place}: umount it first" in bad(28, "detach", DEVICE)
            (place / "still").write_text("there")
        with DEVICE.open("rb"):
            line = bad(28, "detach", DEVICE)
            assert f"({os.getpid()}) has it open" in line
        run("dd", f"if={DEVICE}", "of=/dev/null", "bs=1M", "count=1", "iflag=direct")
    assert "nothing is attached" in bad(7, "detach", DEVICE)


def test_devices_of_other_programs_are_left_alone(target: TargetProcess, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with subprocess.Popen(["nbdkit", "-f", "--unix", other, "memory", "4M"]) as nbdkit:
        try:
            until_blocking(other.exists)
            run("nbd-client", "-unix", other, DEVICE)
            words = "in use by another program"
            assert words in bad(28, "attach", f"{target.url}/0", DEVICE)
            assert "not attached by iserblk" in bad(7, "detach", DEVICE)
            with attached(f"{target.url}/0") as device:
                assert device.name == "nbd1"
            assert connected() == ["nbd0"]
        finally:
            run("nbd-client", "-d", DEVICE)
            nbdkit.terminate()


def test_every_disk_of_a_target(target: TargetProcess) -> None:
    assert good("attach", target.url) == "ready /dev/nbd0\nready /dev/nbd1\nready /dev/nbd2\n"
    assert [block(f"nbd{n}", "queue/logical_block_size") for n in range(3)] == [
        "512",
        "4096",
        "512",
    ]
    assert [block(f"nbd{n}", "ro") for n in range(3)] == ["0", "0", "1"]
    assert Path("/dev/nbd2").read_bytes() == b"written once" * 4096
    assert good("detach", "/dev/nbd1", "nbd0", "nbd2") == ""


# --- when something dies -----------------------------------------------------------------------


def write_unflushed(device: Path) -> None:
    with device.open("wb", buffering=0) as disk:
        disk.write(os.urandom(4 * MIB))  # stays in the kernel's cache until a flush


def test_detach_after_the_target_has_died(mortal: TargetProcess) -> None:
    good("attach", f"{mortal.url}/0", DEVICE, "--io-timeout", "5")
    with DEVICE.open("rb") as disk:  # so that closing it flushes nothing
        write_unflushed(DEVICE)
        mortal.kill()
        disk.read(512)
    start = time.monotonic()
    line = bad(1, "detach", DEVICE)
    assert time.monotonic() - start < SLOW_S / 2
    assert "detached, but the last flush failed (Input/output error)" in line
    assert f"written to {mortal.url}/0 since the flush before that may be lost" in line
    nothing_left()


@pytest.mark.long  # a loss that is told is the harder half: test_detach_after_the_target_has_died
def test_nothing_is_lost_where_nothing_was_written(mortal: TargetProcess) -> None:
    good("attach", f"{mortal.url}/0", DEVICE, "--io-timeout", "5")
    mortal.kill()
    done = iserblk("detach", DEVICE)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.long  # mostly waiting; after the io-timeout it is as after a target's death
def test_detach_from_a_target_that_hangs(mortal: TargetProcess) -> None:
    """Each request fails after its io-timeout; detach does not wait longer."""
    good("attach", f"{mortal.url}/0", DEVICE, "--io-timeout", "3")
    mortal.pause()
    with DEVICE.open("rb", buffering=0) as disk, pytest.raises(OSError, match="Input/output"):
        disk.seek(32 * MIB)
        disk.read(4096)
    write_unflushed(DEVICE)
    start = time.monotonic()
    assert "the last flush failed" in bad(1, "detach", DEVICE)
    assert time.monotonic() - start < SLOW_S / 2
    nothing_left()


@contextmanager
def absent(mortal: TargetProcess, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A mounted ext4, whose target is away, and whose requests would wait for ever; with what
    unmounts it, and waits for them."""
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", DEVICE)
    place.mkdir()
    run("mount", DEVICE, place)
    (place / "flushed").write_bytes(b"x" * MIB)
    run("sync", "-f", place)
    (place / "unflushed").write_bytes(b"x" * MIB)
    mortal.kill()
    unmounts = subprocess.Popen(["umount", place], stderr=subprocess.PIPE, text=True)
    try:
        yield unmounts
    finally:
        iserblk("detach", "--force", DEVICE)
        unmounts.communicate(timeout=SLOW_S)


def is_waiting(process: subprocess.Popen[str]) -> bool:
    """In the kernel, and no signal ends that."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


def test_by_force_an_unmount_ends_whose_target_is_away(
    mortal: TargetProcess, tmp_path: Path
) -> None:
    good("attach", f"{mortal.url}/0", DEVICE, "--io-timeout", "forever")
    with absent(mortal, tmp_path / "place") as unmounts:
        until_blocking(lambda: is_waiting(unmounts))
        done = iserblk("detach", "--force", DEVICE)
        assert unmounts.wait(timeout=SLOW_S) is not None
        assert done.returncode in (1, 28), done.stderr  # it may have been unmounted just then
        assert "may be lost" in done.stderr or "all its requests fail" in done.stderr
    until_blocking(lambda: not connected())
    iserblk("detach", DEVICE)  # perhaps there is nothing to be cleaned up
    nothing_left()


@pytest.mark.long  # it waits; the server's part is in tests/nbd/test_nbd_serving.py
def test_an_unmount_ends_when_its_unit_is_told_to_end(
    mortal: TargetProcess, tmp_path: Path
) -> None:
    """What waits in the kernel fails within a minute, though requests may wait for ever."""
    words = ("attach", "-f", f"{mortal.url}/0", DEVICE, "--io-timeout", "forever")
    with in_the_background(*words) as attach:
        assert attach.stdout is not None and attach.stderr is not None
        attach.stdout.readline()
        with absent(mortal, tmp_path / "place") as unmounts:
            until_blocking(lambda: is_waiting(unmounts))
            attach.terminate()
            assert unmounts.wait(timeout=SLOW_S) is not None
            assert attach.wait(timeout=SLOW_S) in (0, 1)
            assert not connected()
    nothing_left()


@pytest.mark.parametrize(
    "words", [[], pytest.param(["--nbdkit"], marks=pytest.mark.long)], ids=["own", "nbdkit"]
)
def test_attach_cleans_up_after_a_server_that_died(
    words: list[str], target: TargetProcess, tmp_path: Path
) -> None:
    # The unmount waits for a successor that does not come: io-timeout and half a minute. What is
    # refused while the device is mounted has that time, too.
    good("attach", *words, f"{target.url}/0", DEVICE, "--io-timeout", "60")
    run("mkfs.ext4", "-q", DEVICE)
    run("sync", DEVICE)
    with mounted(DEVICE, tmp_path / "place"):
        os.kill(server_of("nbd0"), signal.SIGKILL)
        time.sleep(1)
        assert "mounted on" in bad(28, "attach", f"{target.url}/0", DEVICE)
        assert "mounted on" in bad(28, "detach", DEVICE)
    done = iserblk("attach", *words, f"{target.url}/0", DEVICE)
    assert (done.returncode, done.stdout) == (0, f"ready {DEVICE}\n")
    assert "its server has died" in done.stderr
    run("fsck.ext4", "-p", DEVICE)
    # And after nbd-client, used instead of ours.
    run("nbd-client", "-d", DEVICE)
    deadline = time.monotonic() + SLOW_S
    while servers():
        assert time.monotonic() < deadline, servers()
        time.sleep(0.1)
    assert iserblk("detach", DEVICE).returncode == 0


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.long  # tests/nbd/kernel/test_attaching.py kills it at each step
def test_an_attach_that_was_killed(target: TargetProcess) -> None:
    """An attach is killed while nbd-client connects, which goes on. (Other moments:
    tests/nbd/kernel.)"""
    with in_the_background("attach", f"{target.url}/0", DEVICE) as process:
        wait_for(RUN / "nbd0" / "client.pid", process)
        process.kill()
    done = iserblk("detach", DEVICE)
    assert done.returncode == 0, done


# --- systemd and mount(8) ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Path:
    """Install the units in the guest; yields their directory. The host is not changed."""
    for helper in ("mount.iserblk", "umount.fuse.iserblk"):  # of a host where iserblk is installed
        Path("/sbin", helper).unlink(missing_ok=True)
    run(ROOT / "scripts" / "install-units")
    return Path("/etc/systemd/system")


def test_the_attach_unit(installed: Path, target: TargetProcess, tmp_path: Path) -> None:
    """The unit is stopped while the device is mounted: it waits for the unmount, and no data is
    lost."""
    given = {"URL": f"{target.url}/0", "DEVICE": str(DEVICE), "OPTIONS": "io-timeout=60"}
    unit = Unit(installed / "iserblk-attach@.service", given)
    with unit.started(tmp_path, SLOW_S) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == f"ready {DEVICE}\n"
        run("mkfs.ext4", "-q", "-F", DEVICE)
        with mounted(DEVICE, tmp_path / "place") as place:
            process.terminate()
            assert f"mounted on {place}" in process.stderr.readline()
            (place / "file").write_text("goes on")
        assert process.wait(SLOW_S) == 0
    nothing_left()


def test_mount_by_mount_8(installed: Path, target: TargetProcess, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    options = "ro,_netdev,nofail,x-systemd.automount,io-timeout=60"
    with mounted(f"{target.url}/2", place, "-t", "iserblk", "-o", options):
        assert (place / "lun2").read_bytes() == b"written once" * 4096
    fstab = tmp_path / "fstab"
    fstab.write_text(f"{target.url}  {place}  iserblk  defaults,_netdev  0  0\n")
    run("mount", "-a", "-T", fstab)
    try:
        assert sorted(path.name for path in place.iterdir()) == ["lun0", "lun1", "lun2"]
        run("mount", "-a", "-T", fstab)  # already mounted: stays mounted
    finally:
        good("umount", place)
    done = subprocess.run(
        ["mount", "-t", "iserblk", f"{target.url}/9", place],
        capture_output=True,
        text=True,
        check=False,
        timeout=SLOW_S,
    )
    assert done.returncode == 32
    assert "no LUN 9" in done.stderr


def test_the_example_of_a_device(mortal: TargetProcess) -> None:
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "examples" / "attach.sh", f"{mortal.url}/0"],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "hello"
