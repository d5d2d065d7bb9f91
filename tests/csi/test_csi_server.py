"""The plugin as the kubelet meets it: gRPC on Unix sockets, and registration."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from iserblk import __version__
from iserblk.csi import messages, server
from iserblk.csi.messages import message
from iserblk.csi.node import Node
from iserblk.csi.volumes import Records
from iserblk.errors import BadArgument, Busy
from tests.cli.commands import environment, iserblk
from tests.csi.fake_host import FakeHost
from tests.csi.kubelet import URL, Kubelet, publish, stage, unpublish
from tests.support.forking import Forked
from tests.support.until import until_blocking


@contextmanager
def served(tmp_path: Path, host: FakeHost, registry: Path | None = None) -> Iterator[Path]:
    path = tmp_path / "csi.sock"
    node = Node("worker-1", host, Records(tmp_path / "records"))
    ready, stopped = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=server.serve,
        args=(node, path, registry, Path("/seen/csi.sock"), ready.set, stopped),
    )
    thread.start()
    assert ready.wait(60)
    try:
        yield path
    finally:
        stopped.set()
        thread.join(60)
        assert not thread.is_alive()
    assert not path.exists()


def test_who_it_is(tmp_path: Path) -> None:
    with served(tmp_path, FakeHost(URL)) as path, Kubelet(path, "csi.v1.Identity") as kubelet:
        about = kubelet.call("GetPluginInfo")
        assert (about.name, about.vendor_version) == ("iserblk.csi", __version__)
        assert kubelet.call("Probe").ready.value
        (only,) = kubelet.call("GetPluginCapabilities").capabilities
        assert only.volume_expansion.type == messages.ONLINE
        assert path.stat().st_mode & 0o777 == 0o600


def test_calls_and_their_errors(tmp_path: Path) -> None:
    host = FakeHost(URL)
    with served(tmp_path, host) as path, Kubelet(path, "csi.v1.Node") as kubelet:
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.call("NodePublishVolume", publish())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "not staged" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.call("NodeStageVolume")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        kubelet.call("NodeStageVolume", stage())
        kubelet.call("NodePublishVolume", publish())
        assert kubelet.call("NodeGetInfo").node_id == "worker-1"
    assert host.attached == {"/dev/nbd0": URL}  # it stays


@contextlib.contextmanager
def waiting(kubelet: Kubelet, host: FakeHost, count: int) -> Iterator[None]:
    """So many calls wait, as their targets are away."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def wait(_path: str) -> None:
        begun.release()
        assert go_on.wait(60)

    host.unmount = wait  # type: ignore[method-assign,assignment]
    calls = [
        threading.Thread(target=kubelet.call, args=("NodeUnpublishVolume", unpublish(name)))
        for name in map(str, range(count))
    ]
    try:
        for each in calls:
            each.start()
        for _ in calls:
            assert begun.acquire(timeout=60)
        yield
    finally:
        go_on.set()
        for each in calls:
            each.join()


def test_calls_that_wait_leave_room_for_others(tmp_path: Path) -> None:
    """Of more volumes than a node usually has."""
    host = FakeHost(URL)
    with (
        served(tmp_path, host) as path,
        Kubelet(path, "csi.v1.Node") as kubelet,
        waiting(kubelet, host, 20),
    ):
        assert kubelet.call("NodeGetInfo").node_id == "worker-1"


def test_no_more_calls_wait_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond are refused, and cost nothing. The kubelet repeats what is refused so."""
    host = FakeHost(URL)
    monkeypatch.setattr(server, "MOST_CALLS", 5)
    with served(tmp_path, host) as path, Kubelet(path, "csi.v1.Node") as kubelet:
        with waiting(kubelet, host, 5), pytest.raises(grpc.RpcError) as caught:
            kubelet.call("NodeGetInfo")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        def is_served() -> bool:  # the calls that have ended are counted for a moment longer
            try:
                return bool(kubelet.call("NodeGetInfo").node_id == "worker-1")
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        until_blocking(is_served)


def test_a_message_without_measure(tmp_path: Path) -> None:
    with served(tmp_path, FakeHost(URL)) as path, Kubelet(path, "csi.v1.Node") as kubelet:
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.call("NodeStageVolume", stage(volume="x" * (1 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert kubelet.call("NodeGetInfo").node_id == "worker-1"


def test_no_other_user_can_connect_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever files are made with here."""
    modes = []
    change = os.chmod

    def chmod(path: Path, mode: int) -> None:
        modes.append(path.stat().st_mode & 0o777)
        change(path, mode)

    monkeypatch.setattr(os, "chmod", chmod)
    before = os.umask(0)
    try:
        with served(tmp_path, FakeHost(URL)):
            assert modes[0] & 0o077 == 0
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_call_that_runs_at_the_end_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(URL)
    begun, go_on = threading.Event(), threading.Event()

    def waiting(_path: str) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(host, "unmount", waiting)
    path, stopped = tmp_path / "csi.sock", threading.Event()
    node = Node("worker-1", host, Records(tmp_path / "records"))
    ready = threading.Event()
    serving = threading.Thread(
        target=server.serve, args=(node, path, None, path, ready.set, stopped)
    )
    serving.start()
    assert ready.wait(60)

    def refused() -> bool:
        try:
            with Kubelet(path, "csi.v1.Identity") as other:
                other.call("Probe")
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
        return False

    with Kubelet(path, "csi.v1.Node") as kubelet, ThreadPoolExecutor() as pool:
        try:
            call = pool.submit(kubelet.call, "NodeUnpublishVolume", unpublish())
            assert begun.wait(60)
            stopped.set()
            until_blocking(refused)
            assert serving.is_alive()
        finally:
            stopped.set()
            go_on.set()
        call.result(60)
    serving.join(60)
    assert not serving.is_alive()


def test_bytes_that_are_no_message(tmp_path: Path) -> None:
    with served(tmp_path, FakeHost(URL)) as path, Kubelet(path, "csi.v1.Node") as kubelet:
        with grpc.insecure_channel(f"unix://{path}") as channel:
            for name in ("/csi.v1.Node/NodeStageVolume", "/csi.v1.Controller/CreateVolume"):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(name)(b"\xff" * 100, timeout=60)
        assert kubelet.call("NodeGetInfo").node_id == "worker-1"


def test_registration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = tmp_path / "plugins_registry"
    registry.mkdir()
    with served(tmp_path, FakeHost(URL), registry):
        name = "pluginregistration.Registration"
        with Kubelet(registry / "iserblk.csi-reg.sock", name) as kubelet:
            about = kubelet.call("GetInfo")
            assert (about.type, about.name) == ("CSIPlugin", "iserblk.csi")
            assert about.endpoint == "/seen/csi.sock" and list(about.supported_versions)
            status = message(f"{messages.REGISTRATION}.RegistrationStatus")
            kubelet.call("NotifyRegistrationStatus", status(plugin_registered=True))
    assert list(registry.iterdir()) == []


def test_where_it_cannot_listen(tmp_path: Path) -> None:
    node = Node("worker-1", FakeHost(URL), Records(tmp_path / "records"))

    def refused(path: Path, error: type[Exception], words: str | None = None) -> None:
        with pytest.raises(error, match=words):
            server.serve(node, path, None, path, lambda: None, threading.Event())

    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", BadArgument)
    refused(tmp_path / "nowhere" / "csi.sock", BadArgument, "is there such a directory")
    refused(tmp_path / ("s" * 120), BadArgument, "107 at most: name a shorter one")
    with served(tmp_path, FakeHost(URL)) as path:
        refused(path, Busy)


def test_the_socket_of_one_that_was_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "csi.sock"))
    with served(tmp_path, FakeHost(URL)) as path, Kubelet(path, "csi.v1.Identity") as kubelet:
        assert kubelet.call("Probe").ready.value


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "csi.sock"
    process = Forked(
        "iserblk.cli",
        ["csi", "--endpoint", f"unix://{path}", "--node-id", "worker-7"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        until_blocking(path.exists)
        with Kubelet(path, "csi.v1.Node") as kubelet:
            assert kubelet.call("NodeGetInfo").node_id == "worker-7"
    finally:
        process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"ready unix://{path}\n", "")


def test_an_endpoint_that_is_none() -> None:
    done = iserblk("csi", "--endpoint", "csi.sock")
    assert (done.returncode, done.stdout) == (7, "") and "unix:///PATH" in done.stderr


# The wire form, byte by byte, as csi.proto numbers the fields.
@pytest.mark.parametrize(
    ("name", "fields", "wire"),
    [
        ("csi.v1.NodeUnstageVolumeRequest", {"volume_id": "a", "staging_target_path": "/b"},
         b"\x0a\x01a\x12\x02/b"),
        ("csi.v1.NodeStageVolumeRequest", {"secrets": {"u": "p"}},
         b"\x2a\x06\x0a\x01u\x12\x01p"),
        ("csi.v1.NodePublishVolumeRequest", {"readonly": True}, b"\x30\x01"),
        ("csi.v1.NodeGetInfoResponse", {"node_id": "n", "max_volumes_per_node": 16},
         b"\x0a\x01n\x10\x10"),
        ("csi.v1.NodeExpandVolumeResponse", {"capacity_bytes": 300}, b"\x08\xac\x02"),
        ("pluginregistration.PluginInfo", {"supported_versions": ["1"]}, b"\x22\x011"),
    ],
)  # fmt: skip
def test_the_wire(name: str, fields: dict[str, Any], wire: bytes) -> None:
    assert message(name)(**fields).SerializeToString() == wire
    assert message(name).FromString(wire) == message(name)(**fields)
