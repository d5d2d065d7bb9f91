"""The fault proxy between two plain sockets, and between our initiator and our target."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from iserblk.errors import CommandError, TransportError
from tests.support import logs
from tests.support.faces import one_disk, read, write
from tests.support.faults.behaviours import (
    FIN,
    RST,
    Behaviour,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Hold,
    Reorder,
    Sips,
)
from tests.support.faults.proxy import FaultProxy, nothing
from tests.support.target import TargetProcess, running_target
from tests.support.transports import TRANSPORTS, by
from tests.support.until import until_blocking

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.LOST_POWER, logs.RECONNECTED)

PATIENCE_S = 200.0  # only a test that fails ever waits that long


class Pair:
    """A client and a server, joined through the proxy."""

    def __init__(
        self, plan: Callable[..., tuple[Sequence[Behaviour], Sequence[Behaviour]]]
    ) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = FaultProxy(self.listener.getsockname(), plan, "raw")
        self.sockets: list[socket.socket] = []

    def join(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(("127.0.0.1", self.proxy.port), PATIENCE_S)
        server, _ = self.listener.accept()
        server.settimeout(PATIENCE_S)
        self.sockets += [client, server]
        return client, server

    def close(self) -> None:
        for sock in [*self.sockets, self.listener]:
            sock.close()
        self.proxy.close()


@pytest.fixture
def paired() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(
        plan: Callable[[int], tuple[Sequence[Behaviour], Sequence[Behaviour]]] = nothing,
    ) -> Pair:
        made.append(Pair(plan))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def everything(sock: socket.socket) -> bytes:
    """All bytes up to the end of the stream."""
    whole = b""
    while data := sock.recv(65536):
        whole += data
    return whole


def test_without_faults_nothing_changes(paired: Callable[..., Pair]) -> None:
    client, server = paired().join()
    sent = random.Random(1).randbytes(3 << 20)
    server.setblocking(False)
    client.setblocking(False)
    got, at = bytearray(), 0
    deadline = time.monotonic() + PATIENCE_S
    while len(got) < len(sent) and time.monotonic() < deadline:
        if at < len(sent):
            with contextlib.suppress(BlockingIOError):
                at += client.send(sent[at : at + 65536])
        readable, _, _ = select.select([server], [client] if at < len(sent) else [], [], PATIENCE_S)
        if readable:
            got += server.recv(1 << 20)
    assert got == sent
    server.setblocking(True)
    server.sendall(b"back")
    client.settimeout(PATIENCE_S)
    assert client.recv(10) == b"back"


def test_half_close_leaves_the_other_direction_open(paired: Callable[..., Pair]) -> None:
    client, server = paired(lambda _: ([Cut(10, FIN)], [])).join()
    client.sendall(b"0123456789abcdef")
    assert everything(server) == b"0123456789"
    server.sendall(b"still here")
    assert client.recv(100) == b"still here"


def test_reset_reaches_both_ends(paired: Callable[..., Pair]) -> None:
    client, server = paired(lambda _: ([Cut(10, RST)], [])).join()
    client.sendall(b"0123456789abcdef")
    for sock in (client, server):
        with pytest.raises(ConnectionResetError):
            while sock.recv(100):
                pass


def test_black_hole_says_nothing(paired: Callable[..., Pair]) -> None:
    client, server = paired(lambda _: ([Cut(4, "black hole")], [])).join()
    client.sendall(b"01234567")
    assert server.recv(100) == b"0123"
    server.settimeout(0.1)
    client.sendall(b"more")
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.sendall(b"the other way")
    assert client.recv(100) == b"the other way"


def test_delay(paired: Callable[..., Pair]) -> None:
    client, server = paired(lambda _: ([Delay(0.1)], [])).join()
    start = time.monotonic()
    client.sendall(b"late")
    assert server.recv(10) == b"late" and time.monotonic() - start >= 0.1


def test_every_connection_has_its_own_plan(paired: Callable[..., Pair]) -> None:
    pair = paired(lambda number: ([Cut(number + 1)], []))
    for number in range(3):
        client, server = pair.join()
        client.sendall(b"abcdef")
        assert everything(server) == b"abcdef"[: number + 1]


def test_refused_and_admitted_again(paired: Callable[..., Pair]) -> None:
    pair = paired()
    pair.join()
    pair.proxy.refuse()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # a connection may still be in the queue
        try:
            socket.create_connection(("127.0.0.1", pair.proxy.port), PATIENCE_S).close()
        except ConnectionRefusedError:
            break
    else:
        pytest.fail("never refused")
    pair.proxy.admit()
    pair.join()
    pair.proxy.refuse(by_reset=True)
    with (
        pytest.raises(ConnectionResetError),  # while connecting, or afterwards
        socket.create_connection(("127.0.0.1", pair.proxy.port), PATIENCE_S) as client,
    ):
        client.settimeout(PATIENCE_S)
        client.recv(1)


def test_what_is_held_arrives_after_its_sender_has_gone(paired: Callable[..., Pair]) -> None:
    hold = Hold(lambda unit: unit.data.startswith(b"old"))
    client, server = (pair := paired(lambda number: ([hold] if number == 0 else [], []))).join()
    client.sendall(b"first")
    assert server.recv(100) == b"first"
    client.sendall(b"old write")
    until_blocking(lambda: hold.holding)
    client.close()
    second, newer = pair.join()
    second.sendall(b"newer")
    assert newer.recv(100) == b"newer"
    assert pair.proxy.release(hold) == len(b"old write")
    assert everything(server) == b"old write"


def test_the_target_does_not_hear_of_a_client_that_was_abandoned(
    paired: Callable[..., Pair],
) -> None:
    client, server = (pair := paired()).join()
    client.sendall(b"first")
    assert server.recv(100) == b"first"
    assert pair.proxy.abandon() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.sendall(b"to nobody")


# -- our initiator and our target ------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size=16M"], place / "target.log") as running:
        yield running


def proxied(
    target: TargetProcess,
    plan: Callable[[int], tuple[Sequence[Behaviour], Sequence[Behaviour]]] = nothing,
) -> FaultProxy:
    return FaultProxy(("127.0.0.1", target.port), plan)


def url_of(proxy: FaultProxy, target: TargetProcess, transport: str, options: str = "") -> str:
    return by(transport, proxy.through(f"{target.url}/0"), options)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("digests", ["", "header_digest=crc32c&data_digest=crc32c"])
async def test_units_are_known_by_kind(target: TargetProcess, transport: str, digests: str) -> None:
    if transport != "iscsi" and digests:
        digests = "mpa-crc=no"
    data = random.Random(5).randbytes(300_000 // 512 * 512)
    with proxied(target, lambda n: ([Sips(7000, n)], [Sips(7000, n)])) as proxy:
        async with one_disk("async", url_of(proxy, target, transport, digests)) as disk:
            await write(disk, data, 4096)
            assert await read(disk, 4096, len(data)) == data
        sent = proxy.seen()
        assert sum(unit.is_write_command for unit in sent) >= 1
        assert sum(unit.is_write_data for unit in sent) >= 1
        assert 0x12 in {unit.cdb[0] for unit in sent if unit.cdb}  # INQUIRY


FAULTS: dict[str, Callable[[int], Behaviour]] = {
    "cut": lambda at: Cut(at, FIN),
    "reset": lambda at: Cut(at, RST),
    "corrupt": lambda at: Corrupt(nth=at // 500, seed=at),
    "drop": lambda at: Drop(nth=at // 500),
    "duplicate": lambda at: Duplicate(nth=at // 500),
    "reorder": lambda at: Reorder(nth=at // 500),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_fault_is_an_error_or_nothing_never_wrong_data(
    target: TargetProcess, transport: str, fault: str, up: bool
) -> None:
    """Checksums are on the wire: a fault is an error, or has no effect. The session may end."""
    crc = "header_digest=crc32c&data_digest=crc32c&" if transport == "iscsi" else ""
    for at in (3000, 40_000):
        made = FAULTS[fault](at)

        def plan(number: int, made: Behaviour = made) -> tuple[list[Behaviour], list[Behaviour]]:
            if number:
                return [], []
            return ([made], []) if up else ([], [made])

        with proxied(target, plan) as proxy:
            options = f"{crc}io-timeout=1"
            try:
                url = url_of(proxy, target, transport, options)
                async with one_disk("async", url) as disk:
                    for number in range(8):
                        data = random.Random(at + number).randbytes(16384)
                        await write(disk, data, number * 16384)
                        assert await read(disk, number * 16384, 16384) == data
            except (TransportError, CommandError):
                pass


def test_the_log_of_the_target_names_no_bug(target: TargetProcess) -> None:
    """All tests of this module left only documented errors in the target's log. Runs last."""
    assert "Traceback" not in Path(target.log).read_text()
