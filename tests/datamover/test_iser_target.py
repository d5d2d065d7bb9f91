"""The datamover of a target, message by message: the Hello, and the 12-byte header."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
from crc32c import crc32c

from iserblk.datamover.hello import RFC_5046, RFC_7145, Form, Hello
from iserblk.datamover.iser_target import IserTarget, ZeroBasedTarget
from iserblk.datamover.seam import ROUNDS, PduSlot, TargetSlot
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, Message, memory_pair
from iserblk.rcap.iwarp import mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from tests.support.golden import golden
from tests.support.restless import ENDLESS, Restless

AGREED = SessionParameters(rdma_extensions=True, iser_hello_required=True)
NOT_SAID = replace(AGREED, iser_hello_required=None)
RECEIVES = 6


class Heard:
    """The layer above. ``pdus``: BHSs, with where they began in their message."""

    def __init__(self, dm: IserTarget, slots: list[TargetSlot]) -> None:
        self.dm = dm
        self.slots = slots
        self.pdus: list[tuple[bytes, int]] = []
        self.sent: list[PduSlot] = []
        self.filled: list[PduSlot] = []

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        self.pdus.append((bytes(message[at : at + 48]), at))
        self.dm.map_task(self.slots[0])

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        self.filled.append(slot)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        """Nothing here asks for one."""

    def discarded_notify(self, head: memoryview) -> None:
        raise AssertionError("over iSER nothing is discarded")

    def sent_notify(self, slot: PduSlot) -> None:
        self.sent.append(slot)


class End:
    """The datamover, and its far end played by the test. ``left``: what the datamover has sent,
    from the last Login Response on."""

    def __init__(self, form: Form, parameters: SessionParameters, ord: int = 4) -> None:
        self.form = form
        self.theirs, ours = memory_pair(ird=64, ord=ord)
        self.pair: MemoryQueuePair = ours
        self.left: list[Message] = []
        ours.intercept = self._left
        kind = IserTarget if form is RFC_7145 else ZeroBasedTarget
        self.dm = kind(ours, True)
        self.slots = [TargetSlot(index) for index in range(4)]
        self.up = Heard(self.dm, self.slots)
        self.dm.user = self.up
        self.dm.allocate_connection_resources(self.slots, 512, RECEIVES)
        self.theirs.post_receive(100)
        self.dm.notice_key_values(parameters)
        self.slots[3].bhs[:] = bytes((bhs.LOGIN_RESPONSE, 0x80)).ljust(48, b"\0")
        self.dm.enable_datamover(self.slots[3])

    def _left(self, message: Message) -> bool:
        self.left.append(message)
        return True

    @property
    def receives(self) -> int:
        return self.pair.posted - self.pair.consumed

    def answer(self, index: int, opcode: int) -> None:
        slot = self.slots[index]
        slot.bhs[:] = bytes((opcode, 0x80)).ljust(48, b"\0")
        self.dm.send_control(slot)

    def say(self, message: bytes, opcode: int = seam.SEND_SE, stag: int = 0) -> None:
        request = seam.WorkRequest(opcode)
        request.data = memoryview(message)
        request.stag = stag
        self.theirs.post([request])

    def take(self) -> None:
        self.dm.progress(0.0)
        self.dm.flush()

    def hello(self, **fields: int) -> bytes:
        version = self.form.version
        values = {"max_version": version, "min_version": version, "ird": 4, **fields}
        return Hello(**values).pack(self.form.length)

    def pdu(self, opcode: int = bhs.NOP_OUT) -> bytes:
        head = b"\x10".ljust(self.form.length, b"\0")
        return head + bytes((opcode, 0x80)).ljust(48, b"\0")

    def opcodes(self) -> list[int]:
        """Opcodes of the iSER headers that have left."""
        return [each.data[0] >> 4 for each in self.left]


Make = Callable[..., End]


@pytest.fixture(params=[RFC_7145, RFC_5046], ids=["28", "12"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[End] = []

    def one(parameters: SessionParameters = AGREED, ord: int = 4) -> End:
        made.append(End(request.param, parameters, ord))
        return made[-1]

    yield one
    for end in made:
        end.dm.connection_terminate()
        end.theirs.close()


@pytest.mark.parametrize("parameters", [AGREED, NOT_SAID], ids=["agreed", "not-said"])
def test_a_hello_is_answered(make: Make, parameters: SessionParameters) -> None:
    """The HelloReply is a SendSE with nothing but the header, whether the key was declared or the
    initiator is an old one. The layer above hears of nothing, and no receive is used up.

    proves: ISER-5.1.2-15, ISER-5.1.3-2, ISER-5.1.3-6, ISER-9.4-1, ISER-9.4-2, ISER-A.2-1
    proves: ISER-6.7-3, ISER-7145-5.1.3-5, ISER-7145-6.10-2
    """
    end = make(parameters)
    before = end.receives
    assert before == RECEIVES + (not end.dm.greeted)  # one more for a Hello that must come
    end.say(golden(f"iser/hello-{end.form.length}"))
    end.take()
    login, reply = end.left
    assert login.data[0] == 0x10 and reply.kind == seam.SEND_SE
    assert reply.data == golden(f"iser/hello-reply-{end.form.length}")
    assert end.dm.greeted and not end.up.pdus
    assert end.receives == before >= RECEIVES


@pytest.mark.parametrize(("ord", "ird", "agreed"), [(9, 4, 4), (4, 9, 4), (4, 4, 4), (4, 1, 1)])
def test_reads_are_the_minimum(make: Make, ord: int, ird: int, agreed: int) -> None:
    """Before the Hello the iSER-ORD is the ORD of the connection; then no more Reads leave than
    were agreed on.

    proves: ISER-5.1.2-5, ISER-5.1.3-4, ISER-5.1.3-5, ISER-5.1.3-6, ISER-8.2-1
    """
    end = make(ord=ord)
    assert end.pair.ord == ord
    end.say(end.hello(ird=ird))
    end.take()
    assert int.from_bytes(end.left[-1].data[2:4], "big") == end.pair.ord == agreed
    stag, _ = end.theirs.advertise(memoryview(bytearray(8)), seam.REMOTE_READ)
    reads = [seam.WorkRequest(seam.RDMA_READ, each) for each in end.slots * 3]
    for each in reads:
        each.data, each.stag = memoryview(bytearray(8)), stag
    end.pair.post(reads)
    assert [each.kind for each in end.left].count(seam.RDMA_READ) == agreed


def test_an_initiator_that_takes_no_reads(make: Make) -> None:
    end = make()
    end.say(end.hello(ird=0))
    end.take()
    assert end.left[-1].data[0] == 0x30 and end.pair.ord == 0
    end.say(b"\x18".ljust(4, b"\0") + bytes((0, 0, 1, 0)) + end.pdu(bhs.SCSI_COMMAND)[8:])
    end.take()
    with pytest.raises(RemoteProtocolError, match="IRD 0"):
        end.dm.get_data(end.slots[0], memoryview(bytearray(8)), 0)


def test_nothing_leaves_between_login_and_reply(make: Make) -> None:
    """A ping, say. proves: ISER-5.1.3-2, ISER-GEN-8.1.6.3-3, ISER-IB00-3.1.6.3-5
    proves: ISER-GEN-2.1.7-1, ISER-IB00-2.1.8-1"""
    end = make()
    end.answer(0, bhs.NOP_IN)
    end.take()
    assert end.opcodes() == [1] and end.left[0].data[end.form.length] == bhs.LOGIN_RESPONSE
    assert not end.dm.greeted
    end.say(end.hello())
    end.take()
    assert end.opcodes() == [1, 3, 1] and end.left[2].data[end.form.length] == bhs.NOP_IN
    end.take()
    assert end.up.sent == [end.slots[3], end.slots[0]]


def test_what_comes_right_behind_the_hello_is_heard(make: Make) -> None:
    end = make()
    end.say(end.hello())
    end.say(end.pdu())
    end.take()
    assert end.opcodes() == [1, 3]
    assert [at for _, at in end.up.pdus] == [end.form.length]


def test_a_hello_that_was_agreed_on_comes_first(make: Make) -> None:
    """proves: ISER-10.1.3.4-1, ISER-5.1.3-1"""
    end = make()
    end.say(end.pdu(bhs.SCSI_COMMAND))
    with pytest.raises(RemoteProtocolError, match="first message is no Hello"):
        end.take()
    assert not end.up.pdus and end.opcodes() == [1]


def test_rfc_5046_demands_a_hello_without_a_key() -> None:
    """proves: ISER-10.1.3.4-1"""
    end = End(RFC_5046, NOT_SAID)
    assert not end.dm.greeted
    end.say(end.pdu())
    with pytest.raises(RemoteProtocolError, match="first message is no Hello"):
        end.take()


def test_without_the_key_there_may_be_none() -> None:
    """As today's initiators do; then a later one is an error. proves: ISER-RC-9"""
    end = End(RFC_7145, NOT_SAID)
    assert end.dm.greeted
    end.say(end.pdu())
    end.say(end.pdu())
    end.take()
    assert len(end.up.pdus) == 2 and end.dm.user is end.up
    end.say(end.hello())
    with pytest.raises(RemoteProtocolError, match="unexpected Hello"):
        end.take()
    assert end.opcodes() == [1]


def test_a_second_hello(make: Make) -> None:
    end = make()
    end.say(end.hello())
    end.say(end.hello())
    with pytest.raises(RemoteProtocolError, match="unexpected Hello"):
        end.take()
    assert end.opcodes() == [1, 3]


def test_a_hello_after_a_no(make: Make) -> None:
    """proves: ISER-7145-5.1.2-1, ISER-7145-5.1.3-2"""
    end = make(replace(AGREED, iser_hello_required=False))
    end.say(end.hello())
    with pytest.raises(RemoteProtocolError, match="unexpected Hello"):
        end.take()


def test_a_hello_in_a_discovery_session(make: Make) -> None:
    end = make(replace(NOT_SAID, rdma_extensions=False))
    assert end.dm.greeted
    end.say(end.hello())
    with pytest.raises(RemoteProtocolError, match="unexpected Hello"):
        end.take()


@pytest.mark.parametrize(
    ("fields", "ord", "words"),
    [
        ({"max_version": 15, "min_version": 11}, 4, "versions 11 to 15"),
        ({"max_version": 0, "min_version": 0}, 4, "versions 0 to 0"),
        ({}, 0, "4 RDMA Reads at a time; we .* make 0"),
    ],
    ids=["newer", "older", "no-reads"],
)
def test_what_is_rejected(make: Make, fields: dict[str, int], ord: int, words: str) -> None:
    """The reply has REJ, and leaves before the connection ends.

    proves: ISER-5.1.3-8, ISER-5.1.3-9, ISER-10.1.3.2-1, ISER-10.1.3.2-2, ISER-10.1.3.2-3
    """
    end = make(ord=ord)
    end.say(end.hello(**fields))
    with pytest.raises(RemoteProtocolError, match=words):
        end.take()
    assert end.left[-1].data[0] == 0x31 and len(end.left[-1].data) == end.form.length
    assert not end.dm.greeted
    end.dm.connection_terminate()
    (reply,) = [each for each in end.theirs.progress(0.0) if each.data and each.data[0] == 0x31]
    assert reply.opcode == seam.RECEIVE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hello: hello[:-1], "bytes, not"),
        (lambda hello: hello[:1], "bytes, not"),
        (lambda hello: hello + bytes(1), "bytes, not"),
        (lambda hello: hello + bytes(48), "bytes, not"),
        (lambda hello: hello[:1] + b"\x19" + hello[2:], "versions 9 to 1"),
        (lambda hello: b"\x30" + hello[1:], "unexpected Hello or HelloReply"),
        (lambda hello: b"\x00" + hello[1:], "reserved"),
    ],
    ids=["short", "one-byte", "long", "with-a-pdu", "versions", "a-reply", "reserved"],
)
@pytest.mark.parametrize("parameters", [AGREED, NOT_SAID], ids=["agreed", "not-said"])
def test_bad_hellos(
    make: Make, parameters: SessionParameters, change: Callable[[bytes], bytes], words: str
) -> None:
    """Format errors: no reply leaves. proves: ISER-9.3-1, ISER-10.1.3.3-1"""
    end = make(parameters)
    end.say(change(end.hello()))
    with pytest.raises(RemoteProtocolError, match=words):
        end.take()
    assert end.opcodes() == [1]


def test_a_hello_invalidates_nothing(make: Make) -> None:
    end = make()
    stag, _ = end.pair.advertise(memoryview(bytearray(8)), seam.REMOTE_WRITE)
    end.say(end.hello(), seam.SEND_SE_INVALIDATE, stag)
    with pytest.raises(RemoteProtocolError, match="unexpected"):
        end.take()


def test_a_reply_in_its_fpdu() -> None:
    """The first message of its queue, in a SendSE. proves: ISER-A.2-1"""
    theirs, ours = socket.socketpair()
    agreed = mpa.MpaParameters(2, True, True, False, 4, 4, 4, 4, mpa.RTR_NONE, b"")
    hello, reply = golden("iser/hello-fpdu-28"), golden("iser/hello-reply-fpdu-28")
    with theirs:
        pair = IwarpQueuePair(ours, agreed, initiator=False)
        dm = IserTarget(pair, True)
        dm.user = Heard(dm, [])
        dm.allocate_connection_resources([], 0, 1)
        dm.notice_key_values(AGREED)
        dm.enable_behind_stream()
        theirs.sendall(hello + crc32c(hello).to_bytes(4, "little"))
        dm.progress(0.0)
        assert theirs.recv(1000) == reply + crc32c(reply).to_bytes(4, "little")
        dm.connection_terminate()


# -- the 12-byte header --------------------------------------------------------------------------


def _greeted() -> End:
    end = End(RFC_5046, AGREED)
    end.say(golden("iser/hello-12"))
    end.take()
    return end


def test_a_read_of_rfc_5046() -> None:
    """RDMA Writes begin at the Tagged Offset 0, and the response names no STag in its header.

    proves: ISER-2.4.1-1, ISER-7145-A-1, ISER-9.2-1
    """
    end = _greeted()
    end.say(golden("iser/read-command-12"))
    end.take()
    slot = end.slots[0]
    assert end.up.pdus == [(golden("iser/read-command-12")[12:], 12)]
    assert (slot.read_stag, slot.write_stag) == (0x11223344, 0)
    for data, offset in ((b"abcd", 0), (b"efgh", 4)):
        end.dm.put_data(slot, memoryview(data), offset)
        end.dm.flush()
        write = end.left[-1]
        assert (write.kind, write.stag) == (seam.RDMA_WRITE, 0x11223344)
        assert (write.to, write.data) == (offset, data)
    slot.bhs[:] = pdu.ScsiResponse(itt=7, status=0, stat_sn=1, exp_cmd_sn=6, max_cmd_sn=9).pack()
    end.dm.send_control(slot, True)
    end.dm.flush()
    assert end.left[-1].data[:20] == golden("iser/response-12")
    assert (end.left[-1].kind, end.left[-1].stag) == (seam.SEND_SE_INVALIDATE, 0x11223344)


@pytest.mark.parametrize("offset", [0, 4096])
def test_a_write_of_rfc_5046(offset: int) -> None:
    """RDMA Reads begin at the Buffer Offset. proves: ISER-2.4.1-1"""
    end = _greeted()
    end.say(golden("iser/write-command-12"))
    end.take()
    slot = end.slots[0]
    assert (slot.read_stag, slot.write_stag) == (0, 0x55667788)
    end.dm.get_data(slot, memoryview(bytearray(8)), offset)
    end.dm.flush()
    request = end.left[-1]
    assert (request.kind, request.stag, request.to) == (seam.RDMA_READ, 0x55667788, offset)


def test_stags_that_are_not_valid_are_ignored() -> None:
    end = _greeted()
    message = bytearray(golden("iser/read-command-12"))
    message[0] = 0x10
    message[4:12] = b"\xff" * 8
    end.say(bytes(message))
    end.take()
    assert (end.slots[0].read_stag, end.slots[0].write_stag) == (0, 0)


def test_a_28_byte_header_is_not_understood() -> None:
    """The forms cannot be told apart: at best the BHS is nonsense. proves: ISER-7145-A-1"""
    end = _greeted()
    end.say(b"\x14".ljust(28, b"\0") + golden("iser/read-command-12")[12:])
    end.take()
    assert end.up.pdus[0][0] != golden("iser/read-command-12")[12:]


@pytest.mark.parametrize("lasts", [3, ENDLESS])
def test_what_a_peer_that_always_has_more_may_take(make: Make, lasts: int) -> None:
    """A few rounds; then the others of the loop go first, and ``progress`` is to be called again.
    What ends by itself is not told."""
    end = make(replace(AGREED, iser_hello_required=False))
    busy = Restless(end.pair, lasts)
    end.dm.qp = cast("seam.QueuePair", busy)
    told: list[int] = []
    end.dm.on_unfinished = lambda: told.append(busy.turns)
    end.say(end.pdu())
    end.take()
    assert len(end.up.pdus) == 1
    assert told == ([] if lasts == 3 else [ROUNDS]) and busy.turns == min(lasts, ROUNDS)
    end.say(end.pdu())
    end.take()
    assert len(end.up.pdus) == 2
