"""The CSI node plugin with the kernel's devices, file systems and mounts; it and its servers are
killed in between."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from iserblk.csi import messages
from iserblk.csi.server import NAME
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.state import Home
from iserblk.pidfile import read_pid
from tests.cli.commands import environment, iserblk
from tests.csi.kubelet import Kubelet, capability, expand, publish, stage, stats, unpublish, unstage
from tests.lab.guest.attached import MIB, RUN, block, connected, nothing_left
from tests.support.forking import Forked
from tests.support.programs import SLOW_S, run
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking

STATE = RUN / "csi"
OTHER = "iqn.2026-11.example:other"
PATIENCE_S = "300"  # in an emulated guest a server needs a quarter of a minute to start


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/{name}:size=64M" for name in "abc"], files / "log") as process:
        yield process


class Plugin:
    """``iserblk csi``, in a place of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.registry = place / "plugins_registry"
        self.registry.mkdir()
        self.socket = place / "csi.sock"
        self.start()

    def start(self) -> None:
        words = ["csi", "--endpoint", f"unix://{self.socket}", "--register", str(self.registry)]
        with (self._place / "log").open("ab") as log:
            self._process = Forked(
                "iserblk.cli", words, env=environment(), stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"ready unix://{self.socket}\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=SLOW_S)
        assert self._process.returncode == 0
        assert list(self.registry.iterdir()) == [] and not self.socket.exists()


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    made = Plugin(tmp_path)
    yield made
    made.end()
    left = [path.suffix for path in STATE.iterdir()]
    for name in connected():  # after a failure: for the next test
        iserblk("detach", name)
    shutil.rmtree(STATE)
    nothing_left()
    assert set(left) == {".lock"}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The staging path and the target path."""
    found = (str(tmp_path / "kubelet/staging"), str(tmp_path / "kubelet/pod/volume"))
    yield found
    for path in reversed(found):  # after a failure
        subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)


def call(plugin: Plugin, name: str, request: Any = None) -> Any:
    """As the kubelet does, once more while another call for the volume, or the plugin itself when
    it gives the device a new server, is under way."""
    with Kubelet(plugin.socket, "csi.v1.Node") as kubelet:
        while True:
            try:
                return kubelet.call(name, request, timeout=SLOW_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ABORTED:
                    raise
            time.sleep(1)


def server_of(device: str) -> int:
    return read_pid(Home(Device(Path(device).name, Directories())).server_pid)


def test_a_file_system(target: TargetProcess, plugin: Plugin, places: tuple[str, str]) -> None:
    """It outlives the plugin, and the server of its device."""
    staging, pod = places
    how = capability("ext4")
    asked = stage(url=f"{target.url}/0", how=how, staging=staging, io_timeout=PATIENCE_S)
    call(plugin, "NodeStageVolume", asked)
    shown = publish(how=how, staging=staging, path=pod)
    call(plugin, "NodePublishVolume", shown)
    file = Path(pod) / "file"
    file.write_bytes(b"written by the pod" * 1000)
    run("sync", file)
    (nbd,) = connected()

    plugin.kill()
    assert file.read_bytes().startswith(b"written")
    plugin.start()
    for name, request in (("NodeStageVolume", asked), ("NodePublishVolume", shown)):
        call(plugin, name, request)
    assert connected() == [nbd]

    before = server_of(nbd)
    os.kill(before, signal.SIGKILL)
    until_blocking(lambda: server_of(nbd) not in (0, before))
    Path("/proc/sys/vm/drop_caches").write_text("3")
    assert file.read_bytes() == b"written by the pod" * 1000
    file.write_bytes(b"once more")
    run("sync", file)

    usage, _ = call(plugin, "NodeGetVolumeStats", stats(pod)).usage
    assert 40 * MIB < usage.total < 64 * MIB
    call(plugin, "NodeUnpublishVolume", unpublish(path=pod))
    assert not Path(pod).exists()
    call(plugin, "NodeUnstageVolume", unstage(staging=staging))
    assert connected() == [] and not Path(staging).exists()

    call(plugin, "NodeStageVolume", asked)
    assert (Path(staging) / "file").read_bytes() == b"once more"
    call(plugin, "NodeUnstageVolume", unstage(staging=staging))


def test_a_block_device(
    target: TargetProcess, plugin: Plugin, places: tuple[str, str], tmp_path: Path
) -> None:
    """For one node alone: the LUN is reserved. Later it is read, with its data, by many."""
    staging, pod = places
    how = capability(None)
    url = f"{target.url}/2"
    call(plugin, "NodeStageVolume", stage(url=url, how=how, staging=staging))
    call(plugin, "NodePublishVolume", publish(how=how, staging=staging, path=pod))
    assert Path(pod).is_block_device()
    run("dd", "if=/dev/urandom", f"of={pod}", "bs=1M", "count=4", "oflag=direct")
    data = subprocess.check_output(["dd", f"if={pod}", "bs=1M", "count=4", "iflag=direct"])
    (usage,) = call(plugin, "NodeGetVolumeStats", stats(pod)).usage
    assert usage.total == 64 * MIB
    assert call(plugin, "NodeExpandVolume", expand(64 * MIB)).capacity_bytes == 64 * MIB
    (tmp_path / "other").write_bytes(bytes(MIB))
    other = iserblk("copy", tmp_path / "other", f"{url}?initiator-name={OTHER}")
    assert other.returncode != 0 and "reserv" in other.stderr, other

    again = stage("two", url, how, staging=f"{staging}-two", reserve="none")
    with pytest.raises(grpc.RpcError) as caught:
        call(plugin, "NodeStageVolume", again)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    (device,) = connected()
    for record in STATE.glob("*.json"):  # without it, the mount tells the device
        record.unlink()
    call(plugin, "NodeStageVolume", stage(url=url, how=how, staging=staging))
    assert connected() == [device]
    for record in STATE.glob("*.json"):
        record.unlink()
    call(plugin, "NodeUnpublishVolume", unpublish(path=pod))
    call(plugin, "NodeUnstageVolume", unstage(staging=staging))
    assert connected() == [] and not Path(staging).exists()

    readers = capability(None, messages.MULTI_NODE_READER_ONLY)
    call(plugin, "NodeStageVolume", stage(url=url, how=readers, staging=staging))
    call(plugin, "NodePublishVolume", publish(how=readers, staging=staging, path=pod))
    assert subprocess.check_output(["dd", f"if={pod}", "bs=1M", "count=4"]) == data
    descriptor = os.open(pod, os.O_WRONLY)
    try:
        with pytest.raises(PermissionError):
            os.write(descriptor, bytes(4096))
    finally:
        os.close(descriptor)
    call(plugin, "NodeUnpublishVolume", unpublish(path=pod))
    call(plugin, "NodeUnstageVolume", unstage(staging=staging))
    assert block("nbd0", "ro") == "0"  # for what is attached there next


@pytest.mark.long
def test_a_lun_that_is_too_small_for_its_file_system(
    target: TargetProcess, plugin: Plugin, places: tuple[str, str]
) -> None:
    """mkfs.xfs wants 300 MiB."""
    if not shutil.which("mkfs.xfs"):
        pytest.skip("xfsprogs is not installed: scripts/setup --tests")
    staging, _ = places
    asked = stage(url=f"{target.url}/1", how=capability("xfs"), staging=staging)
    with pytest.raises(grpc.RpcError) as caught:
        call(plugin, "NodeStageVolume", asked)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details().startswith("mkfs.xfs: ")
    assert connected() == []


def test_a_lun_that_is_not_there(
    target: TargetProcess, plugin: Plugin, places: tuple[str, str]
) -> None:
    staging, _ = places
    with pytest.raises(grpc.RpcError) as caught:
        call(plugin, "NodeStageVolume", stage(url=f"{target.url}/9", staging=staging))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert connected() == []
    with Kubelet(plugin.registry / f"{NAME}-reg.sock", "pluginregistration.Registration") as it:
        assert it.call("GetInfo").endpoint == str(plugin.socket)
