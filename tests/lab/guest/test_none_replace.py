"""A device gets another server: requests wait, then go on; what the kernel does meanwhile.

The facts of docs/devices-internals.md about the kernel are measured here.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.nbd.kernel.client import KERNEL
from iserblk.nbd.kernel.links import kept, open_links
from iserblk.nbd.kernel.netlink import Settings
from tests.cli.commands import bad, good, iserblk
from tests.lab.guest.attached import (
    DEVICE,
    MIB,
    RUN,
    attached,
    block,
    connected,
    mounted,
    nothing_left,
)
from tests.support.nbdkit import need
from tests.support.programs import SLOW_S, run
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    specs = [f"{files}/a:size=64M", f"{files}/b:size=64M"]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    for name in connected():  # after a failure: for the next test
        iserblk("detach", name)
    nothing_left()


def server() -> int:
    return int((RUN / "nbd0" / "server.pid").read_text())


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_text()


def direct(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["dd", "bs=4k", "count=1", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long  # about the kernel alone
def test_the_kernel_ignores_sockets_while_the_old_ones_live(target: TargetProcess) -> None:
    with attached(f"{target.url}/0", DEVICE, "--connections", "2"):
        backend = block("nbd0", "backend")
        assert backend
        home = RUN / "nbd0" / "socket"
        with open_links(home, 2) as links:
            inodes = {link.inode for link in links}
            sockets = [link.sock.fileno() for link in links]
            KERNEL.reconfigure(0, Settings(backend=backend, sockets=sockets))
        assert kept(inodes) == set()
        for other in ("another", None):
            with pytest.raises(OSError, match="Invalid argument") as raised:
                KERNEL.reconfigure(0, Settings(backend=other))
            assert raised.value.errno == errno.EINVAL
        with open_links(home, 1) as links, pytest.raises(OSError, match="busy") as raised:
            sockets = [links[0].sock.fileno()]
            KERNEL.connect(0, Settings(size=MIB, sockets=sockets))
        assert raised.value.errno == errno.EBUSY


def test_requests_wait_for_a_successor(target: TargetProcess) -> None:
    """Requests that come while there is no server wait for it. Another LUN is refused."""
    data = os.urandom(4096)
    with attached(f"{target.url}/0", DEVICE, "-o", "io-timeout=60"):
        with DEVICE.open("r+b", buffering=0) as disk:
            disk.write(data)
            os.fsync(disk.fileno())
        old = server()
        os.kill(old, signal.SIGKILL)
        until_blocking(lambda: ended(old))
        reader = direct(f"if={DEVICE}", "iflag=direct", "skip=8")
        writer = direct("if=/dev/zero", f"of={DEVICE}", "oflag=direct", "seek=16")
        assert "is another LUN" in bad(7, "attach", "--replace", f"{target.url}/1", DEVICE)
        assert (reader.poll(), writer.poll()) == (None, None)
        good("attach", "--replace", f"{target.url}/0", DEVICE, "-o", "io-timeout=60")
        for process in (reader, writer):
            assert process.wait(SLOW_S / 2) == 0, process.communicate()[1]
            process.communicate()
        run("dd", f"if={DEVICE}", "of=/dev/null", "bs=1M", "count=16", "iflag=direct")


# The kernel's limit with several connections: 60 s, and much longer than the test may take.
@pytest.mark.parametrize(
    ("connections", "io_timeout"), [pytest.param(2, 15, marks=pytest.mark.long), (1, 3600)]
)
def test_requests_under_way_are_sent_again(
    connections: int, io_timeout: int, target: TargetProcess
) -> None:
    """Those that the old server had received and not answered. With one connection the kernel looks
    for them every few seconds; with several they wait until the kernel's time limit for them has
    passed. Later requests do not wait for them."""
    words = ("-o", f"io-timeout={io_timeout}")
    with attached(f"{target.url}/0", DEVICE, "--connections", connections, *words):
        old = server()
        with DEVICE.open("rb") as disk:  # the kernel looks for partitions now
            disk.read(512)
        os.kill(old, signal.SIGSTOP)
        early = direct("if=/dev/zero", f"of={DEVICE}", "oflag=direct", "seek=16")
        until_blocking(lambda: block("nbd0", "inflight").split() == ["0", "1"])
        os.kill(old, signal.SIGKILL)
        good("attach", "--replace", f"{target.url}/0", DEVICE, *words)
        run("dd", f"if={DEVICE}", "of=/dev/null", "bs=4k", "count=1", "skip=32", "iflag=direct")
        assert connections == 1 or early.poll() is None
        assert early.wait(SLOW_S) == 0, early.communicate()[1]
        early.communicate()


def test_a_server_that_is_slow_keeps_its_only_connection(target: TargetProcess) -> None:
    """The kernel looks after a request again and again, and does not send it a second time."""
    with attached(f"{target.url}/0", DEVICE, "-o", "io-timeout=1"):
        os.kill(server(), signal.SIGSTOP)
        run("dmesg", "--clear")
        writer = direct("if=/dev/zero", f"of={DEVICE}", "oflag=direct", "seek=16")
        until_blocking(lambda: run("dmesg").count("Possible stuck request") >= 2)
        assert writer.poll() is None
        os.kill(server(), signal.SIGCONT)
        assert writer.wait(SLOW_S / 2) == 0, writer.communicate()[1]
        writer.communicate()
        assert "Receive control failed" not in run("dmesg")


def test_what_waits_for_a_dead_server_fails_when_detach_is_asked(
    target: TargetProcess, tmp_path: Path
) -> None:
    """What it had received would wait for a successor for ever, and what came behind its death for
    three minutes and a half; so umount could not end."""
    good("attach", f"{target.url}/1", DEVICE)
    run("mkfs.ext4", "-q", "-F", DEVICE)
    with mounted(DEVICE, tmp_path / "place"):
        old = server()
        os.kill(old, signal.SIGSTOP)
        readers = [direct(f"if={DEVICE}", "iflag=direct", "skip=8")]
        until_blocking(lambda: block("nbd0", "inflight").split()[0] != "0")
        os.kill(old, signal.SIGKILL)
        until_blocking(lambda: ended(old))
        readers.append(direct(f"if={DEVICE}", "iflag=direct", "skip=16"))
        until_blocking(lambda: "submit_bio_wait" in stack(readers[1].pid))
        assert "all requests fail" in bad(28, "detach", DEVICE)
        for reader in readers:
            assert reader.wait(SLOW_S / 10) == 1
            assert "Input/output error" in reader.communicate()[1]
    iserblk("detach", DEVICE)


@pytest.mark.parametrize(("kill", "words"), [(True, []), (False, ["--force"])])
def test_a_device_is_detached_whose_partitions_are_being_read(
    kill: bool, words: list[str], target: TargetProcess
) -> None:
    """Nobody can open it meanwhile, not even `detach`; and the server has died, or hangs."""
    good("attach", f"{target.url}/1", DEVICE)
    old = server()
    os.kill(old, signal.SIGSTOP)
    reader = direct(f"if={DEVICE}", "iflag=direct", "skip=8")
    until_blocking(lambda: "bdev_disk_changed" in stack(reader.pid))
    if kill:
        os.kill(old, signal.SIGKILL)
        until_blocking(lambda: ended(old))
    done = iserblk("detach", *words, DEVICE)
    assert reader.wait(SLOW_S / 10) == 1
    reader.communicate()
    assert (done.returncode, "nbd0" in done.stderr) == ((0, False) if kill else (1, True)), done


def test_a_device_is_attached_anew_whose_partitions_are_being_read(target: TargetProcess) -> None:
    """`attach` would hang in open(2) for ever, as its server has died."""
    good("attach", f"{target.url}/1", DEVICE)
    old = server()
    os.kill(old, signal.SIGSTOP)
    reader = direct(f"if={DEVICE}", "iflag=direct", "skip=8")
    until_blocking(lambda: "bdev_disk_changed" in stack(reader.pid))
    os.kill(old, signal.SIGKILL)
    until_blocking(lambda: ended(old))
    done = iserblk("attach", f"{target.url}/1", DEVICE)
    assert (done.returncode, done.stdout) == (0, f"ready {DEVICE}\n"), done
    assert "its server has died; detaching it" in done.stderr
    assert reader.wait(SLOW_S / 10) == 1
    reader.communicate()
    run("dd", f"if={DEVICE}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct")
    good("detach", DEVICE)


def stack(pid: int) -> str:
    """Where a process waits in the kernel."""
    return Path(f"/proc/{pid}/stack").read_text()


def test_without_a_successor_requests_fail(target: TargetProcess) -> None:
    with attached(f"{target.url}/0", DEVICE, "-o", "io-timeout=1"):
        os.kill(server(), signal.SIGKILL)
        done = direct(f"if={DEVICE}", "iflag=direct", "skip=8")
        assert done.wait(SLOW_S / 2) == 1
        assert "Input/output error" in done.communicate()[1]
        # And afterwards a successor serves again.
        good("attach", "--replace", f"{target.url}/0", DEVICE)
        run("dd", f"if={DEVICE}", "of=/dev/null", "bs=4k", "count=1", "skip=8", "iflag=direct")


# (Living servers hand over in test_none_handover.)
@pytest.mark.parametrize("how", [pytest.param("alive", marks=pytest.mark.long), "killed"])
def test_a_file_system_sees_a_pause(how: str, target: TargetProcess, tmp_path: Path) -> None:
    """fio writes and compares while the server is replaced."""
    with attached(f"{target.url}/1", DEVICE, "-o", "io-timeout=2"):
        run("mkfs.ext4", "-q", "-F", DEVICE)
        with mounted(DEVICE, tmp_path / "place") as place:
            words = (
                *("fio", "--name=verify", f"--directory={place}", "--size=4M", "--bs=4k"),
                *("--rw=randwrite", "--verify=crc32c", "--verify_state_save=0", "--direct=1"),
                *("--ioengine=libaio", "--iodepth=8", "--fsync=32"),
            )
            with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as fio:
                try:
                    for _ in range(2):
                        time.sleep(2)
                        if how == "killed":
                            os.kill(server(), signal.SIGKILL)
                        good("attach", "--replace", f"{target.url}/1", DEVICE, "-o", "io-timeout=2")
                    output, _ = fio.communicate(timeout=SLOW_S)
                finally:
                    fio.kill()
            assert fio.returncode == 0, output
        run("e2fsck", "-f", "-n", DEVICE)


def test_growth_reaches_the_device(tmp_path: Path) -> None:
    with (
        running_target([f"{tmp_path}/lun:size=16M"], tmp_path / "log") as growing,
        attached(f"{growing.url}/0", DEVICE),
    ):
        os.truncate(tmp_path / "lun", 32 * MIB)
        until_blocking(lambda: block("nbd0", "size") == str(32 * MIB // 512))


def test_nbdkit_is_killed_that_was_to_write_again_what_the_target_has_lost(tmp_path: Path) -> None:
    """An acknowledged write is lost with the target's cache; only nbdkit has it, and hangs. The
    kernel hears of it by its next flush."""
    need("nbdkit")
    specs = [f"{tmp_path}/lun:size=64M:volatile-cache=16M"]
    target = TargetProcess(specs, tmp_path / "log")
    words = ("--nbdkit", f"{target.url}/0?io-timeout=1")
    with attached(*words, DEVICE):
        run("dd", "if=/dev/urandom", f"of={DEVICE}", "bs=4k", "count=1", "oflag=direct")
        os.kill(server(), signal.SIGSTOP)
        target.kill()
        target = TargetProcess(specs, tmp_path / "log", target.listen)
        done = iserblk("attach", "--replace", *words, DEVICE)
        assert done.returncode == 0 and "the next flush fails" in done.stderr
        with DEVICE.open("rb") as disk:
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(disk.fileno())
            os.fsync(disk.fileno())
    target.stop()
