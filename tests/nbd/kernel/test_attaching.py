"""attach and detach with a real target, real servers and a fake kernel."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from threading import Event

import pytest

from iserblk.disk.wish import Wish
from iserblk.errors import Busy
from iserblk.metrics.scraping import scrape
from iserblk.nbd.buffers import CLIENT_BYTES
from iserblk.nbd.kernel import attaching, client
from iserblk.nbd.kernel.attaching import Lun, attach
from iserblk.nbd.kernel.device import Device, Directories
from tests.cli.commands import good_json, serving
from tests.nbd.kernel.attachers import SIZE, Attacher, path_of, wait_for
from tests.nbd.kernel.fake_kernel import FakeKernel, FakeNetlink
from tests.support.target import END_S, IQN, TargetProcess
from tests.support.until import until_blocking

# What attach does before and beside its server is the same with both.
of_ours = pytest.mark.parametrize(
    "tool", ["own", pytest.param("nbdkit", marks=pytest.mark.long)], indirect=True
)


def test_attach_and_detach(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    assert tool.good("attach", f"{target.url}/1") == f"ready {path_of(kernel, 'nbd0')}\n"
    assert kernel.connected() == ["nbd0"]
    assert kernel.size("nbd0") == SIZE * 2
    (server,) = tool.servers()
    assert b"io-timeout=180/30" in Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
    assert json.loads((tool.run / "nbd0/state.json").read_text())["io_timeout"] == 180
    assert (tool.run / "nbd0").stat().st_mode & 0o777 == 0o700
    (metrics,) = tool.run.glob("*.metrics")
    assert [lun.size for lun in scrape(metrics).luns] == [SIZE * 2]
    assert tool.good("detach", "nbd0") == ""
    tool.assert_nothing_left()
    assert "nothing is attached" in tool.refused(7, "detach", "nbd0")


@pytest.mark.parametrize(
    ("words", "kib"),
    [((), 1024), (("-o", "max-transfer=65536"), 64), (("-o", "journal=off"), 1024)],
)
def test_the_kernel_may_send_larger_requests(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess, words: tuple[str, ...], kib: int
) -> None:
    """As large as one command may be, but no larger than a client's share of memory allows for
    several at once."""
    queue = kernel.root / "sys/block/nbd0/queue"
    queue.mkdir()
    tool.good("attach", f"{target.url}/1", *words)
    assert (queue / "max_sectors_kb").read_text() == f"{kib}\n"
    assert 4 * (kib << 10) < CLIENT_BYTES
    tool.good("detach", "nbd0")


@pytest.mark.parametrize("how", ["detach", "killed"])
def test_the_next_program_finds_the_device_as_it_was(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess, how: str
) -> None:
    """The kernel keeps these settings when a device is disconnected. They are put back also where
    the server was killed, and the device was connected anew."""
    settings = {"io_timeout": "30000", "max_sectors_kb": "128"}
    queue = kernel.root / "sys/block/nbd0/queue"
    queue.mkdir()
    for name, value in settings.items():
        (queue / name).write_text(f"{value}\n")
    tool.good("attach", f"{target.url}/1", "nbd0")
    assert (queue / "max_sectors_kb").read_text() == "1024\n"
    if how == "killed":
        (server,) = tool.servers()
        os.kill(server, signal.SIGKILL)
        tool.good("attach", "--replace", f"{target.url}/1", "nbd0")
        assert (queue / "max_sectors_kb").read_text() == "1024\n"
    tool.good("detach", "nbd0")
    assert {name: (queue / name).read_text().strip() for name in settings} == settings


def test_udev_is_told_what_the_lun_is_called(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """In the words of scsi_id, until the detach, which has the kernel send an event."""
    event = kernel.root / "sys/block/nbd0/uevent"
    event.write_text("DEVNAME=nbd0\n")
    tool.good("attach", f"{target.url}/1")
    (disk,) = good_json("info", f"{target.url}/1")["disks"]
    (naa,) = [each for each in disk["identifiers"] if each.startswith("naa.")]
    told = (tool.run / "nbd0" / "udev").read_text().splitlines()
    assert f"ID_ISERBLK=3{naa.removeprefix('naa.')}" in told
    assert f"ID_WWN_WITH_EXTENSION=0x{naa.removeprefix('naa.')}" in told
    assert event.read_text() == "DEVNAME=nbd0\n"
    tool.good("detach", "nbd0")
    assert event.read_text().startswith("change")
    tool.assert_nothing_left()


@of_ours
def test_named_luns(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess, tmp_path: Path
) -> None:
    """They are attached where their files say, unless the user says where."""
    for number in (0, 1):
        text = f"URL={target.url}/{number}\nDEVICE=nbd{number + 1}\nOPTIONS=io-timeout=20\n"
        (tmp_path / f"lun-{number}.conf").write_text(text)
    (tmp_path / "free.conf").write_text(f"URL={target.url}/2\n")
    tool.environment["ISERBLK_CONFIG_DIR"] = str(tmp_path)
    said = [f"ready {path_of(kernel, name)}\n" for name in ("nbd0", "nbd1", "nbd2")]
    assert tool.good("attach", "lun-0", "lun-1") == said[1] + said[2]
    assert [kernel.size(name) for name in ("nbd1", "nbd2")] == [SIZE, SIZE * 2]
    assert json.loads((tool.run / "nbd1/state.json").read_text())["io_timeout"] == 20
    tool.good("detach", "lun-0", "nbd2")
    assert kernel.connected() == []
    assert "has no device of its own" in tool.refused(7, "detach", "free")
    assert tool.good("attach", "lun-0", "nbd0") == said[0]
    assert tool.good("attach", "--replace", "lun-0", "nbd0") == said[0]
    assert "another LUN" in tool.refused(7, "attach", "--replace", "lun-1", "nbd0")
    assert tool.good("attach", "free", "--io-timeout", "forever") == said[1]
    assert int(kernel.attribute("nbd1", "dead_timeout")) > 10 * 86400
    tool.good("detach", "nbd0", "nbd1")
    assert "lun-0 has a device of its own" in tool.refused(7, "attach", "lun-0", "free")
    assert "`iserblk list`" in tool.refused(7, "attach", "lun-7")
    tool.assert_nothing_left()


def test_with_a_secret(tool: Attacher, kernel: FakeKernel, tmp_path: Path) -> None:
    """The servers of two devices get the secret of a file; no command line and no file in the run
    directory shows it. A refusal does not show a secret of the URL."""
    secret = "hush-hush-hush"
    for name, text in (("accounts", f"host:{secret}\n"), ("secret", f"{secret}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    words = ["target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", f"{tmp_path}/a:size=1M"]
    words += ["--lun", f"{tmp_path}/b:size=2M", "--chap-accounts", f"{tmp_path}/accounts"]
    with serving(*words, log=tmp_path / "log") as server:
        url = server.url.replace("//", "//host@")
        tool.good("attach", url, "-o", f"chap-secret-file={tmp_path}/secret")
        assert [kernel.size(name) for name in ("nbd0", "nbd1")] == [1 << 20, 2 << 20]
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in tool.servers()]
        assert len(lines) == 2 and all("chap-secret-fd=" in line for line in lines)
        assert not any(secret in line for line in lines)
        for state in tool.run.glob("*/*"):
            assert not state.is_file() or secret not in state.read_text()
        for name in ("nbd0", "nbd1"):
            tool.good("detach", name)
        line = tool.refused(24, "attach", server.url.replace("//", "//host%wrong-wrong-wrong@"))
        assert "authentication failed" in line and "wrong-wrong" not in line


def test_the_first_free_device(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    kernel.connect_other("nbd0")
    assert tool.good("attach", f"{target.url}/0") == f"ready {path_of(kernel, 'nbd1')}\n"
    assert "is attached there" in tool.refused(28, "attach", f"{target.url}/0", "nbd1")
    assert "another program" in tool.refused(28, "attach", f"{target.url}/0", "nbd0")
    assert "not attached by iserblk" in tool.refused(7, "detach", "nbd0")
    kernel.connect_other("nbd2")
    assert "all 3 NBD devices are in use" in tool.refused(28, "attach", f"{target.url}/0")
    tool.good("detach", "nbd1")
    assert kernel.connected() == ["nbd0", "nbd2"]
    for name in kernel.connected():
        (kernel.root / "sys/block" / name / "pid").unlink()


def test_two_at_once_take_two_devices(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    started = [tool.start("attach", f"{target.url}/0") for _ in range(2)]
    said = [process.communicate(timeout=END_S * 2)[0] for process in started]
    assert sorted(said) == [f"ready {path_of(kernel, name)}\n" for name in ("nbd0", "nbd1")]
    tool.good("detach", "nbd0", "nbd1")


@of_ours
def test_a_second_device_of_a_lun_is_warned(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """And told of the server of the first. (nbdkit's servers leave no record.) A new server for a
    device is no second one."""
    url = f"{target.url}/0"
    tool.good("attach", url, "nbd0")
    status, out, err = tool.ended("attach", url, "nbd1")
    assert (status, out) == (0, f"ready {path_of(kernel, 'nbd1')}\n")
    if tool.by_nbdkit:
        assert err == ""
    else:
        (line,) = err.splitlines()
        assert f"{url}: written to by process " in line
        assert "(iserblk attach at /dev/nbd0), too" in line
    tool.good("detach", "nbd0")
    tool.good("attach", "--replace", url, "nbd1")
    tool.good("detach", "nbd1")


@of_ours
def test_every_disk_as_json(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    devices = json.loads(tool.good("attach", target.url, "--json"))["devices"]
    assert devices == [
        {
            "device": path_of(kernel, f"nbd{number}"),
            "url": f"{target.url}/{number}",
            "size": SIZE << number,
            "block_size": 512,
        }
        for number in range(3)
    ]
    assert [kernel.size(f"nbd{number}") for number in range(3)] == [SIZE, SIZE * 2, SIZE * 4]
    tool.good("detach", "nbd0", "nbd1", "nbd2")


@of_ours
def test_all_or_none(tool: Attacher, kernel: FakeKernel, target: TargetProcess) -> None:
    kernel.refuse("nbd1")
    line = tool.refused(1, "attach", target.url, "nbd0", "nbd1", "nbd2")
    assert "nbd1: the kernel could not connect it: Input/output error" in line
    tool.assert_nothing_left()


@pytest.mark.parametrize(
    ("status", "words", "arguments"),
    [
        (7, "not a URL", ["nbd0"]),
        (7, "named twice", ["{url}/0", "{url}/1", "nbd0", "nbd0"]),
        (7, "3 LUNs for 1 device(s)", ["{url}", "nbd0"]),
        (7, "no such device; there are nbd0 to nbd2", ["{url}/0", "nbd3"]),
        (7, "no NBD device", ["{url}/0", "/dev/null"]),
        (7, "write NAME=VALUE", ["{url}/0", "-o", "soon"]),
        (7, "every user would see it", ["{url}/0", "-o", "target_password=hush"]),
        (7, "unknown option 'colour'", ["{url}/0", "-o", "colour=blue"]),
        (7, "give seconds", ["{url}/0", "-o", "io-timeout=soon"]),
        (21, "no LUN 9", ["{url}/9"]),
        (7, "without a secret", ["iser://user@host/iqn.2026-11.example:disk/0"]),
    ],
)
def test_what_is_refused(
    status: int, words: str, arguments: list[str], tool: Attacher, target: TargetProcess
) -> None:
    line = tool.refused(status, "attach", *(word.format(url=target.url) for word in arguments))
    assert words in line
    assert "hush" not in line


# --- accidents ---------------------------------------------------------------------------------


@of_ours
@pytest.mark.parametrize("then", ["attach", "detach"])
@pytest.mark.parametrize("moment", ["state.json", "server.pid", "client.pid"])
def test_an_attach_that_is_killed(
    moment: str, then: str, tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """An attach is killed at any step; the next attach or detach cleans up."""
    process = tool.start("attach", f"{target.url}/0", "nbd0")
    wait_for(tool.run / "nbd0" / moment)
    process.kill()
    process.communicate()
    # The processes that it started go on.
    if then == "attach":
        status, out, err = tool.ended("attach", f"{target.url}/1", "nbd0")
        if status == 28:  # all was done, except for the ready line
            assert "/0 is attached there" in err
        else:
            assert (status, out) == (0, f"ready {path_of(kernel, 'nbd0')}\n")
            assert kernel.size("nbd0") == SIZE * 2
    assert tool.ended("detach", "nbd0")[0] == 0


@of_ours
@pytest.mark.parametrize("moment", ["state.json", "server.pid", "client.pid"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_attach_that_is_told_to_end(
    moment: str, number: int, status: int, tool: Attacher, target: TargetProcess
) -> None:
    process = tool.start("attach", f"{target.url}/0", "nbd0")
    wait_for(tool.run / "nbd0" / moment)
    process.send_signal(number)
    out, _ = process.communicate(timeout=END_S)
    if out:  # it was quicker
        assert (moment, out) == ("client.pid", f"ready {path_of(tool.kernel, 'nbd0')}\n")
        tool.good("detach", "nbd0")
    else:
        assert process.returncode == status


# --- in the foreground -------------------------------------------------------------------------


@of_ours
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_in_the_foreground(
    number: int, tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    if number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, by nohup")
    process = tool.start("attach", "-f", f"{target.url}/0")
    assert process.stdout is not None
    assert process.stdout.readline() == f"ready {path_of(kernel, 'nbd0')}\n"
    process.send_signal(number)
    assert process.communicate(timeout=END_S) == ("", "")
    assert process.returncode == 0


def test_in_the_foreground_told_again(
    tool: Attacher, kernel: FakeKernel, target: TargetProcess
) -> None:
    """At once: it waits until the device is not in use. Later: it does not."""
    process = tool.start("attach", "-f", f"{target.url}/0")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == f"ready {path_of(kernel, 'nbd0')}\n"
    with open(path_of(kernel, "nbd0"), "rb"):
        for _ in range(2):
            process.terminate()
        assert "waiting; another signal ends this" in process.stderr.readline()
        # What uses the device must not wait for a target that is away.
        assert Wish(tool.run / "nbd0" / "ending").made
        process.terminate()
        assert process.poll() is None

        def ended() -> bool:
            process.terminate()
            return process.poll() is not None

        until_blocking(ended)  # for as long as a user has patience
        process.communicate()
        assert process.returncode == 28
    tool.good("detach", "nbd0")


@pytest.mark.parametrize("opens", [True, False])
def test_the_device_of_a_dead_server_cannot_be_opened(
    kernel: FakeKernel, target: TargetProcess, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    """The kernel reads its partitions: its requests have to fail first; and where that does not
    help, the attach ends with what does."""
    tool = Attacher(kernel)
    tool.good("attach", f"{target.url}/0")
    (server,) = tool.servers()
    os.kill(server, signal.SIGKILL)
    until_blocking(lambda: not tool.servers())
    places = Directories(kernel.root / "sys", kernel.root / "dev", Path("/proc"), tool.run)
    monkeypatch.setattr(client, "KERNEL", FakeNetlink(kernel.root))
    failed, over = Event(), Event()

    def claim(device: Device) -> int:
        (failed if opens else over).wait()
        raise Busy(f"{device.path}: mounted on /data: umount it first")

    with monkeypatch.context() as busy:
        busy.setattr(Device, "claim", claim)
        busy.setattr(client, "fail_all", lambda _home: failed.set())
        busy.setattr(attaching, "OPENED_S", 0.5)
        lun = Lun([f"{target.url}/1"], "", {}, 30.0, SIZE, 512, 1 << 20, "name")
        with pytest.raises(Busy, match="mounted on" if opens else "iserblk detach --force"):
            attach(lun, Device("nbd0", places), 1, places)
        over.set()
    assert failed.is_set()
    assert kernel.connected() != []  # nothing has changed
    tool.ended("detach", "--force", "nbd0")
    tool.assert_nothing_left()
