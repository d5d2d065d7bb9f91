"""iSER over software iWARP on the kernel's SCTP, between two network namespaces."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trio

from iserblk.disk.aio import open_disks
from iserblk.errors import ConnectFailed, IserblkError
from iserblk.rcap.iwarp import sctp, sctp_association
from tests.cli.commands import COMMAND, environment
from tests.support import logs
from tests.support.blockwork import everything
from tests.support.interop import Record
from tests.support.namespaces import Host, captured, decoded, link, make_host, need
from tests.support.programs import run
from tests.support.target_elsewhere import our_target

NET = "192.0.2"
CLIENT, TARGET = f"{NET}.1", f"{NET}.2"
DECODER = str(Path(__file__).with_name("ddp_sctp.lua"))
OPTIONS = {"rcap": "iwarp-sctp"}
# RDMAP opcodes (RFC 5040 section 4.1).
WRITE, READ_REQUEST, READ_RESPONSE, SEND_SE, SEND_SE_INVALIDATE = 0, 1, 2, 5, 6


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def two_hosts(stack: ExitStack, mtu: int) -> tuple[Host, Host]:
    client, target = make_host(stack, "client"), make_host(stack, "target")
    link(client, target, NET, mtu)
    return client, target


def disk_file(tmp_path: Path, mebibytes: int = 80) -> Path:
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(mebibytes << 20)
    return file


# shows: SYSTEM-15
@pytest.mark.parametrize(
    "mtu",
    [
        pytest.param(1500, marks=pytest.mark.long),  # the emulated machine works at each packet
        9000,
        pytest.param(65535, marks=pytest.mark.long),
    ],
)
def test_all_block_operations(stack: ExitStack, tmp_path: Path, mtu: int, record: Record) -> None:
    # proves: ISER-GEN-2.1.1-1, ISER-GEN-2.3-1, ISER-GEN-8.1.3-1
    client, target = two_hosts(stack, mtu)
    url = stack.enter_context(
        our_target(target, TARGET, [disk_file(tmp_path)], listen=",3,transport=sctp")
    )
    outcome = client.call(lambda: trio.run(everything, url + "/0", OPTIONS))
    about = outcome.connection
    assert about["provider"] == "iwarp-sctp"
    assert about["session_enhanced"] is True
    # 20 of IPv4, 12 and 16 of SCTP, 2 of the DDP-SSN, 32 for bundled chunks.
    assert int(str(about["mulpdu"])) <= mtu - 82
    record(
        ours="both ends",
        peer="the kernel's SCTP",
        transport=f"iWARP over SCTP, MTU {mtu}",
        outcome=outcome,
    )


# shows: SYSTEM-15
def test_what_is_on_the_network(stack: ExitStack, tmp_path: Path) -> None:
    """The messages are those of RFC 5043, as a decoder shows them that was not written here."""
    need("tcpdump", "tshark")
    client, target = two_hosts(stack, 1500)
    url = stack.enter_context(
        our_target(target, TARGET, [disk_file(tmp_path, 8)], listen=",3,transport=sctp")
    )
    data = random.Random(5043).randbytes(300_000)

    async def work() -> None:
        async with open_disks([url + "/0"], OPTIONS) as disks:
            disk = disks.disks[disks.default]
            await disk.write(memoryview(data), 4096)
            await disk.flush()
            buffer = bytearray(len(data))
            await disk.read_into(memoryview(buffer), 4096)
            assert buffer == data

    capture = tmp_path / "capture"
    with captured(target, NET, capture):
        client.call(lambda: trio.run(work))
    decoder = ("-X", f"lua_script:{DECODER}")
    begins = decoded(
        capture,
        ["ip.src", "sctp.adaptation_layer_indication"],
        *("-Y", "sctp.chunk_type == 1 || sctp.chunk_type == 2"),
    )
    assert begins == [[CLIENT, "0x00000001"], [TARGET, "0x00000001"]]
    packets = decoded(
        capture,
        [
            *("ip.src", "sctp.data_payload_proto_id", "sctp.data_u_bit", "sctp.data_b_bit"),
            *("sctp.data_e_bit", "sctp.data_sid", "ddp_sctp.ssn", "ddp_sctp.function"),
            *("iwarp_rdma.opcode", "sctp.chunk_length", "sctp.data_tsn"),
        ],
        *decoder,
        # What is sent again, because the machine was slow to acknowledge it, is not decoded again.
        *("-Y", "sctp.chunk_type == 0 && !sctp.retransmission"),
    )
    sent: dict[str, dict[int, int]] = {CLIENT: {}, TARGET: {}}  # TSN → DDP-SSN
    functions: dict[str, list[int]] = {CLIENT: [], TARGET: []}
    opcodes: dict[str, set[int]] = {CLIENT: set(), TARGET: set()}
    for source, ppids, u, b, e, streams, numbers, codes, rdmap, lengths, tsns in packets:
        # Nothing is fragmented, and all is unordered, on the only stream.
        assert set((u + "," + b + "," + e).split(",")) <= {"1", "True"}
        assert {int(stream, 16) for stream in streams.split(",")} == {0}
        # Not the packet's length: what is captured may be split later, by the device.
        assert all(int(length) <= 1500 - 20 - 12 for length in lengths.split(","))
        assert set(ppids.split(",")) <= {"16", "17"}
        for tsn, number in zip(tsns.split(","), numbers.split(","), strict=True):
            sent[source][int(tsn)] = int(number)
        functions[source] += [int(code) for code in codes.split(",") if code]
        opcodes[source] |= {int(opcode, 16) for opcode in rdmap.split(",") if opcode}
    assert {ppid for packet in packets for ppid in packet[1].split(",")} == {"16", "17"}
    begun = {source: codes.pop(0) for source, codes in functions.items()}
    assert begun == {CLIENT: sctp.ENHANCED_INITIATE, TARGET: sctp.ENHANCED_ACCEPT}
    # At least one side ends the session (RFC 5043 section 6.2), each at most once.
    endings = [code for codes in functions.values() for code in codes]
    assert endings in ([sctp.TERMINATE], [sctp.TERMINATE] * 2)
    assert all(len(codes) <= 1 for codes in functions.values())
    for numbers_of in sent.values():
        assert sorted(numbers_of.values()) == list(range(len(numbers_of)))
    assert opcodes[CLIENT] >= {READ_RESPONSE, SEND_SE}
    assert opcodes[TARGET] >= {WRITE, READ_REQUEST, SEND_SE_INVALIDATE}


# shows: SYSTEM-15
def test_data_is_right_where_packets_are_lost(stack: ExitStack, tmp_path: Path) -> None:
    """Lost packets are sent again, and come behind others: the DDP-SSN puts them in order."""
    client, target = two_hosts(stack, 1500)
    for host in (client, target):
        host.ip("link", "set", "dev", f"to-{NET}", "txqueuelen", "1000")
        run(*host.within, "tc", "qdisc", "add", "dev", f"to-{NET}", "root", "netem",
            "loss", "0.5%", "delay", "1ms", "reorder", "25%", "50%")  # fmt: skip
    file = disk_file(tmp_path, 16)
    url = stack.enter_context(our_target(target, TARGET, [file], listen=",3,transport=sctp"))
    data = random.Random(15).randbytes(4 << 20)

    async def work() -> None:
        async with open_disks([url + "/0"], OPTIONS) as disks:
            disk = disks.disks[disks.default]
            await disk.write(memoryview(data), 0)
            await disk.flush()
            buffer = bytearray(len(data))
            await disk.read_into(memoryview(buffer), 0)
            assert buffer == data

    client.call(lambda: trio.run(work))
    with open(file, "rb") as whole:
        assert whole.read(len(data)) == data


def test_nothing_listens_there(stack: ExitStack, tmp_path: Path) -> None:
    """A target without transport=sctp: one line that says what is missing."""
    client, target = two_hosts(stack, 1500)
    url = stack.enter_context(our_target(target, TARGET, [disk_file(tmp_path, 8)]))

    async def work() -> None:
        async with open_disks([url + "/0"], OPTIONS):
            pass

    with pytest.raises(ConnectFailed, match="transport=sctp"):
        client.call(lambda: trio.run(work))


def test_a_portal_that_speaks_something_else_on_sctp(stack: ExitStack) -> None:
    """It takes associations, and announces no DDP (RFC 5043 section 11.1)."""
    client, target = two_hosts(stack, 1500)

    def listen() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP)
        sock.bind((TARGET, 3260))
        sock.listen()
        return sock

    with target.call(listen):

        async def work() -> None:
            async with open_disks([f"iser://{TARGET}/iqn.2026-11.example:x/0"], OPTIONS):
                pass

        with pytest.raises(IserblkError, match="Adaptation Indication"):
            client.call(lambda: trio.run(work))


class Stranger:
    """An association of a peer that keeps to no rule. ``announced``: it has announced DDP."""

    def __init__(self, announced: bool = True) -> None:
        if announced:
            self.sock = sctp_association.open_socket(socket.AF_INET)
        else:
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP)
        self.sock.settimeout(60)
        self.sock.connect((TARGET, 3260))

    def send(self, message: bytes, ppid: int = sctp.PPID_SEGMENT, flags: int = 1) -> None:
        """``flags``: SCTP_UNORDERED, or none."""
        about = struct.pack("=HHIIi", 0, flags, socket.htonl(ppid), 0, 0)
        self.sock.sendmsg([message], [(socket.IPPROTO_SCTP, 2, about)])

    def begin(self) -> None:
        """Begin a DDP Stream Session, as it has to be."""
        function, private_data = sctp.SessionInitiator(private_data=b"\x80\0\0\0").request
        self.send(sctp.pack_control(0, function, private_data), sctp.PPID_CONTROL)

    def early(self) -> None:
        """Send messages that overtake one which never comes, until the other end has enough."""
        self.begin()
        number = 2
        with suppress(OSError):
            while True:
                self.send(sctp.SSN.pack(number) + bytes(1400))
                number += 1

    def abort(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def garbage(seed: int) -> bytes:
    chance = random.Random(seed)
    return chance.randbytes(chance.randrange(2, 1400))


def attack() -> list[Stranger]:
    """What strangers do; those in the result are still there."""
    stay: list[Stranger] = [Stranger() for _ in range(20)]
    stay += [Stranger(announced=False) for _ in range(20)]
    for number in range(20):
        beginning = Stranger(announced=number % 4 != 3)
        with suppress(OSError):
            if number % 2:
                beginning.begin()
            for seed in range(number, number + 5):
                ppid = (sctp.PPID_SEGMENT, sctp.PPID_CONTROL, 0, 99)[seed % 4]
                beginning.send(garbage(seed), ppid, seed // 4 % 2)
        stay.append(beginning)
    for number in range(10):
        gone = Stranger()
        with suppress(OSError):
            if number % 2:
                gone.begin()
            gone.send(sctp.SSN.pack(1) + garbage(number))
        gone.abort()
    for private_data in (b"", bytes(3), bytes(513), bytes(60000)):
        for function in (*range(9), 0xFFFF):
            asking = Stranger()
            with suppress(OSError):
                asking.send(sctp.pack_control(0, function, private_data), sctp.PPID_CONTROL)
            stay.append(asking)
    stay.append(Stranger())
    stay[-1].early()
    return stay


# In an emulated guest of a busy machine the attack may take longer than a target may be silent.
@pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES)
def test_strangers_do_not_disturb(stack: ExitStack, tmp_path: Path) -> None:
    """Associations without DDP, without a session, with garbage, with messages that overtake for
    ever: each ends by itself, or waits for the end of its login's time; others notice nothing."""
    client, target = two_hosts(stack, 9000)
    url = stack.enter_context(
        our_target(target, TARGET, [disk_file(tmp_path, 8)], listen=",3,transport=sctp")
    )
    data = random.Random(43).randbytes(300_000)

    async def work() -> None:
        async with open_disks([url + "/0"], OPTIONS) as disks:
            disk = disks.disks[disks.default]
            await disk.write(memoryview(data), 4096)
            await disk.flush()
            strangers = await trio.to_thread.run_sync(attack)
            buffer = bytearray(len(data))
            await disk.read_into(memoryview(buffer), 4096)
            assert buffer == data
            async with open_disks([url + "/0"], OPTIONS) as others:
                other = others.disks[others.default]
                await other.read_into(memoryview(buffer), 4096)
            assert buffer == data
            for stranger in strangers:
                stranger.sock.close()

    client.call(lambda: trio.run(work))


@pytest.mark.long
def test_doctor_asks_the_portal(stack: ExitStack, tmp_path: Path) -> None:
    client, target = two_hosts(stack, 1500)
    url = stack.enter_context(
        our_target(target, TARGET, [disk_file(tmp_path, 8)], listen=",3,transport=sctp")
    )
    said = run(
        *("env", f"PYTHONPATH={environment()['PYTHONPATH']}", *client.within),
        *(*COMMAND, "doctor", url, "--rcap", "iwarp-sctp"),
    )
    assert "speaks iWARP over SCTP" in said
    assert "iwarp-sctp: asked for with rcap" in said


def test_the_kernel_has_sctp() -> None:
    assert sctp_association.available() is None
