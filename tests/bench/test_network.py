"""The network between the bench's targets and clients."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchlib import network, proc
from benchlib.network import TARGET_ADDRESS, Network
from benchlib.sections import SECTIONS
from benchlib.servers import Absent, Server, run
from benchlib.subjects import Bench

LISTEN = """
import socket
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()[0].recv(1)
"""
SEGMENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
"""
# What Ctrl-C in a terminal does while `ip` runs: it reaches `ip` and the bench.
INTERRUPTED_IP = 'kill -INT $$ $PPID; exec ip "$@"'


def namespaces() -> set[str]:
    """Those of this process: others may measure meanwhile."""
    found = Path("/run/netns").glob(f"iserblk-bench-{os.getpid()}-*")
    return {path.name for path in found}


@pytest.fixture
def stack() -> ExitStack:
    if os.geteuid():
        pytest.skip("network namespaces need root")
    return ExitStack()


@pytest.mark.parametrize(("mtu", "segment"), [(1500, 1448), (9000, 8948)])
def test_segments_are_those_of_the_mtu(
    stack: ExitStack, tmp_path: Path, mtu: int, segment: int
) -> None:
    before = namespaces()
    with stack:
        try:
            net = Network(stack, mtu)
        except Absent as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        assert len(namespaces() - before) == 2
        listen = [*net.target, "python3", "-c", LISTEN]
        server = stack.enter_context(Server("listen", listen, tmp_path))
        port = server.wait_until(lambda: server.said().strip())
        assert ("0.0.0.0", int(port)) in proc.listening(server.pids[0])
        said = run("client", [*net.client, "python3", "-c", SEGMENT, TARGET_ADDRESS, port])
        assert int(said) == segment
    assert namespaces() == before


def test_two_networks_do_not_meet(stack: ExitStack) -> None:
    with stack:
        try:
            nets = [Network(stack, 1500) for _ in range(2)]
        except Absent as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        links = [run("ip", [*net.client, "ip", "-brief", "link"]) for net in nets]
        assert all("veth1" in each for each in links)
        assert nets[0].client != nets[1].client


def test_half_a_network_is_removed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    made = network.ip_command

    def fails(*arguments: str) -> None:
        if "address" in arguments:
            raise Absent("ip: no more of that")
        made(*arguments)

    monkeypatch.setattr(network, "ip_command", fails)
    with stack, pytest.raises(Absent):
        Network(stack, 1500)
    monkeypatch.undo()
    assert namespaces() == before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background. As in the bench
    there is another thread, which gets the signals that this one does not take."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    end.set()
    other.join()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("moment", ["add", "delete"])
def test_ctrl_c_leaves_no_namespace(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with ExitStack() as trial:
        try:
            Network(trial, 1500)
        except Absent as reason:
            pytest.skip(f"no network namespaces here: {reason}")
    before = namespaces()
    made = network.ip_command
    interrupted = []  # type: ignore[var-annotated]

    def interrupts(*arguments: str) -> None:
        if arguments[:2] == ("netns", moment) and not interrupted:
            interrupted.append(arguments[2])
            run("ip", ["sh", "-c", INTERRUPTED_IP, "sh", *arguments])
        else:
            made(*arguments)

    monkeypatch.setattr(network, "ip_command", interrupts)
    try:
        with pytest.raises(KeyboardInterrupt), stack:
            Network(stack, 1500)
        assert interrupted
        assert namespaces() == before
    finally:
        for name in namespaces() - before:
            made("netns", "delete", name)


def test_without_root_its_rows_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    section = next(each for each in SECTIONS if each.mtu)
    with ExitStack() as stack:
        bench = Bench(stack, tmp_path, tmp_path / "a", tmp_path / "b", mtu=section.mtu)
        with pytest.raises(Absent, match="needs root, to make network namespaces"):
            bench.at_client(["true"])


def test_without_a_network_commands_stay_as_they_are(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(stack, tmp_path, tmp_path / "a", tmp_path / "b")
        assert bench.at_client(["true", "x"]) == ["true", "x"]
        assert bench.address == "127.0.0.1"
