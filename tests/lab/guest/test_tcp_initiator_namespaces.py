"""A pod's network namespace on a machine with the kernel's initiator: whose daemon may run there,
and where the sockets are; beside processes of ours.

The pod has a link to the machine, where LIO listens.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from iserblk.url import parse_url
from tests.cli.commands import Server, serving
from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.test_tcp_initiator_same_lun import NO_CHAP, without_chap
from tests.support.namespaces import Host, make_host
from tests.support.programs import SLOW_S, ended, run
from tests.support.until import until_blocking

NET = "10.9.8"
DAEMON = "iscsid", "--foreground", "--no-pid-file"
LISTENS = "ISCSIADM_ABSTRACT_NAMESPACE"  # its socket


@pytest.fixture(autouse=True)
def lio_without_chap() -> Iterator[None]:
    run("modprobe", "veth")
    with without_chap():
        yield


@contextmanager
def running_pod() -> Iterator[Host]:
    """Its namespace, with a link to the machine."""
    with ExitStack() as stack:
        pod = make_host(stack, "pod")
        peer = ("peer", "name", "eth0", "netns", pod.name)
        run("ip", "link", "add", "to-pod", "type", "veth", *peer)
        stack.callback(run, "ip", "link", "delete", "to-pod")
        run("ip", "address", "add", f"{NET}.1/24", "dev", "to-pod")
        run("ip", "link", "set", "to-pod", "up")
        pod.ip("address", "add", f"{NET}.2/24", "dev", "eth0")
        pod.ip("link", "set", "eth0", "up")
        pod.ip("route", "add", "default", "via", f"{NET}.1")
        yield pod


@contextmanager
def daemon(within: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another iscsid, which listens for iscsiadm."""
    with log.open("wb") as said:
        process = subprocess.Popen([*within, *DAEMON], stdout=said, stderr=said)

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        return LISTENS in run(*within, "ss", "-Hxl")

    try:
        until_blocking(listens)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(pod: Host, socket: Path) -> Iterator[Server]:
    """``iserblk nbd`` in the pod."""
    words = ("nbd", os.environ["LAB_URL"], "--socket", socket)
    with serving(*words, log=socket.with_suffix(".log"), namespace=pod.name) as running:
        yield running


def connections(within: list[str]) -> int:
    """How many connections to LIO the namespace has, seen from the initiator's side."""
    port = os.environ["LAB_PORT"]
    told = run(*within, "ss", "-Htn", "state", "established", f"( dport = :{port} )")
    return len(told.splitlines())


def sessions() -> int:
    """How many sessions the kernel's initiator has."""
    return len([*Path("/sys/class/iscsi_session").glob("session*")])


def node() -> list[str]:
    """iscsiadm's words for LIO's target."""
    url = parse_url(os.environ["LAB_URL"])
    return ["iscsiadm", "-m", "node", "-T", url.iqn, "-p", f"{url.host}:{url.port}"]


def test_one_iscsid_for_each_machine(tmp_path: Path) -> None:
    """A second iscsid does not start. One in a namespace of its own does, and ends at the first
    login, because it does not reach the kernel. Of ours there is one in the pod and one beside it,
    at once."""
    second = ended(*DAEMON)
    assert second.returncode != 0 and "bind" in second.stderr, second

    log = tmp_path / "iscsid.log"
    with running_pod() as pod:
        run(*node(), "-o", "new", "-I", "default")
        try:
            alone = ended(*pod.within, *node(), "--login")
            assert "can not connect to iSCSI daemon" in alone.stderr, alone  # the machine's
            with daemon(pod.within, log) as own:
                refused = ended(*pod.within, *node(), "--login")
                assert refused.returncode != 0 and sessions() == 0, refused
                assert own.wait(SLOW_S) != 0 and "sendmsg" in log.read_text()
        finally:
            run(*node(), "-o", "delete")

        words = ("nbd", os.environ["LAB_URL"], "--socket", tmp_path / "beside")
        with server(pod, tmp_path / "pod"), serving(*words, log=tmp_path / "log"):
            assert (connections(pod.within), connections([])) == (1, 1)
            for name in ("pod", "beside"):
                assert int(run("nbdinfo", "--size", f"nbd+unix:///?socket={tmp_path / name}"))


def test_whose_the_connection_is(tmp_path: Path) -> None:
    """The kernel's initiator has it in the machine's namespace, whatever the pod may reach, and it
    outlives the pod. Ours is the pod's, and ends with its process."""
    url = parse_url(os.environ["LAB_URL"])
    login = kernel.logged_in(url.host, NO_CHAP, "default", url.port, url.iqn, str(url.lun))

    def read(device: Path) -> None:
        run("dd", f"if={device}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct")

    with ExitStack() as session:
        with running_pod() as pod:
            device = session.enter_context(login)
            assert (connections(pod.within), connections([])) == (0, 1)
            pod.ip("link", "set", "eth0", "down")  # as a policy that forbids the target
            read(device)
        read(device)
        assert (connections([]), sessions()) == (1, 1)
    assert (connections([]), sessions()) == (0, 0)

    with running_pod() as pod:
        with server(pod, tmp_path / "pod"):
            assert (connections(pod.within), connections([])) == (1, 0)
        until_blocking(lambda: connections(pod.within) == 0)
