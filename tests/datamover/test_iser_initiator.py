"""The datamover of an initiator, message by message: the Hello, and the 12-byte header."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
from crc32c import crc32c

from iserblk.datamover.hello import RFC_5046, RFC_7145, Form, Hello, HelloReply
from iserblk.datamover.iser_initiator import IserInitiator, ZeroBasedInitiator
from iserblk.datamover.seam import ROUNDS, PduSlot
from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, Message, memory_pair
from iserblk.rcap.iwarp import mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.scsi.tasks import NO_DATA, READ, WRITE
from tests.support.golden import golden
from tests.support.restless import ENDLESS, Restless

AGREED = SessionParameters(rdma_extensions=True, iser_hello_required=True)
RECEIVES = 9  # those of the slots, and of unexpected PDUs
BASE = 0x7F0000001000


class Heard:
    """The layer above. ``pdus``: BHSs, with where they began in their message."""

    def __init__(self) -> None:
        self.pdus: list[tuple[bytes, int]] = []

    def sent_notify(self, slot: PduSlot) -> None:
        """There are no Data-Outs here."""

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        self.pdus.append((bytes(message[at : at + 48]), at))


class End:
    """The datamover, and its far end played by the test. ``left``: what the datamover has sent."""

    def __init__(self, form: Form, parameters: SessionParameters, ird: int = 4) -> None:
        self.form = form
        ours, self.theirs = memory_pair(ird=ird, ord=64)
        self.pair: MemoryQueuePair = ours
        self.left: list[Message] = []
        ours.intercept = self._left
        kind = IserInitiator if form is RFC_7145 else ZeroBasedInitiator
        self.dm = kind(ours, 512)
        self.up = Heard()
        self.dm.user = self.up
        self.slots = [PduSlot(index) for index in range(4)]
        self.dm.allocate_connection_resources(self.slots, RECEIVES - 4)
        self.dm.notice_key_values(parameters)
        self.dm.enable_datamover()
        self.dm.flush()
        self.theirs.post_receive(100)

    def _left(self, message: Message) -> bool:
        self.left.append(message)
        return True

    @property
    def receives(self) -> int:
        return self.pair.posted - self.pair.consumed

    def say(self, message: bytes, opcode: int = seam.SEND_SE, stag: int = 0) -> None:
        request = seam.WorkRequest(opcode)
        request.data = memoryview(message)
        request.stag = stag
        self.theirs.post([request])

    def take(self) -> int:
        return self.dm.progress(0.0)

    def pdu(self, opcode: int = bhs.NOP_IN) -> bytes:
        head = b"\x10".ljust(self.form.length, b"\0")
        return head + bytes((opcode, 0x80)).ljust(48, b"\0")


Make = Callable[..., End]


@pytest.fixture(params=[RFC_7145, RFC_5046], ids=["28", "12"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[End] = []

    def one(parameters: SessionParameters = AGREED, ird: int = 4) -> End:
        made.append(End(request.param, parameters, ird))
        return made[-1]

    yield one
    for end in made:
        end.dm.connection_terminate()
        end.theirs.close()


def test_a_hello_is_the_first_message(make: Make) -> None:
    """It declares the IRD of the connection, in a SendSE that has nothing but the header.

    proves: ISER-5.1.1-7, ISER-5.1.1-8, ISER-5.1.1-16, ISER-5.1.3-1, ISER-5.1.3-3, ISER-9.3-1
    proves: ISER-9.3-2, ISER-A.1-1, ISER-7145-6.10-2
    """
    end = make()
    (message,) = end.left
    assert message.kind == seam.SEND_SE
    assert message.data == golden(f"iser/hello-{end.form.length}")
    assert not end.dm.greeted and end.dm.describe()["hello"]


@pytest.mark.parametrize("ord", [4, 3, 1])
def test_the_reply_settles_the_reads(make: Make, ord: int) -> None:
    """The IRD goes down to what the target makes use of. The layer above hears of nothing, and no
    receive is used up.

    proves: ISER-5.1.3-7, ISER-8.2-1, ISER-6.7-3, ISER-9.4-2
    """
    end = make()
    assert end.receives == RECEIVES + 1
    reply = bytearray(golden(f"iser/hello-reply-{end.form.length}"))
    reply[3] = ord
    end.say(bytes(reply))
    end.take()
    assert end.dm.greeted and not end.up.pdus and end.dm.user is end.up
    assert end.pair.ird == ord and end.dm.describe()["ird"] == ord
    assert end.receives >= RECEIVES


def test_what_comes_right_behind_the_reply_is_heard(make: Make) -> None:
    end = make()
    end.say(golden(f"iser/hello-reply-{end.form.length}"))
    end.say(end.pdu())
    end.take()
    assert [at for _, at in end.up.pdus] == [end.form.length]
    end.say(end.pdu())
    end.take()
    assert len(end.up.pdus) == 2


@pytest.mark.parametrize("word", [None, False])
def test_no_hello_that_was_not_agreed_on(word: bool | None) -> None:
    """proves: ISER-7145-5.1.3-1, ISER-7145-6.10-3"""
    end = End(RFC_7145, replace(AGREED, iser_hello_required=word))
    assert not end.left and end.dm.greeted and not end.dm.describe()["hello"]
    assert end.receives == RECEIVES


def test_rfc_5046_has_no_key_and_always_a_hello() -> None:
    """proves: ISER-5.1.1-16, ISER-7145-A-1"""
    end = End(RFC_5046, replace(AGREED, iser_hello_required=None))
    assert [each.data for each in end.left] == [golden("iser/hello-12")]


def test_no_hello_in_a_discovery_session(make: Make) -> None:
    """Its connection is never iSER: RDMAExtensions is not agreed to."""
    end = make(replace(AGREED, rdma_extensions=False))
    assert not end.left and end.dm.greeted


def test_another_first_message_is_a_protocol_error(make: Make) -> None:
    """proves: ISER-10.1.3.4-2"""
    end = make()
    end.say(end.pdu())
    with pytest.raises(RemoteProtocolError, match="no HelloReply"):
        end.take()
    assert not end.up.pdus


def test_a_rejection_ends_the_connection(make: Make) -> None:
    """proves: ISER-9.4-7, ISER-10.1.3.2-3"""
    end = make()
    version = end.form.version
    end.say(HelloReply(True, version, version, 0).pack(end.form.length))
    with pytest.raises(RemoteProtocolError, match="rejects this connection"):
        end.take()
    assert not end.dm.greeted


def _reply(form: Form, **fields: int) -> bytes:
    values = {"max_version": form.version, "version": form.version, "ord": 4, **fields}
    return HelloReply(False, **values).pack(form.length)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (lambda form: _reply(form)[:-1], "bytes, not"),
        (lambda form: _reply(form) + bytes(48), "bytes, not"),
        (lambda form: _reply(form, version=form.version + 1, max_version=15), "of version"),
        (lambda form: _reply(form, max_version=0), "above 0"),
        (lambda form: _reply(form, ord=5), "wants 5"),
        (lambda form: _reply(form, ord=0), "did not say REJ"),
        (lambda form: Hello(form.version, form.version, 4).pack(form.length), "opcode 2"),
    ],
    ids=["short", "long", "version", "versions", "ord", "no-reads", "a-hello"],
)
def test_bad_replies(make: Make, message: Callable[[Form], bytes], words: str) -> None:
    """proves: ISER-9.4-1, ISER-10.1.3.3-1"""
    end = make()
    end.say(message(end.form))
    with pytest.raises(RemoteProtocolError, match=words):
        end.take()
    assert end.pair.ird == 4


@pytest.mark.parametrize("asked", [True, False])
def test_a_reply_comes_once_and_only_where_it_is_awaited(make: Make, asked: bool) -> None:
    end = make(replace(AGREED, iser_hello_required=asked))
    reply = golden(f"iser/hello-reply-{end.form.length}")
    if asked:
        end.say(reply)
        end.take()
    end.say(reply)
    with pytest.raises(RemoteProtocolError, match="unexpected Hello or HelloReply"):
        end.take()


def test_a_reply_invalidates_nothing(make: Make) -> None:
    end = make()
    stag, _ = end.pair.advertise(memoryview(bytearray(8)), seam.REMOTE_WRITE)
    reply = golden(f"iser/hello-reply-{end.form.length}")
    end.say(reply, seam.SEND_SE_INVALIDATE, stag)
    with pytest.raises(RemoteProtocolError, match="unexpected"):
        end.take()


def test_a_target_that_goes_away_instead(make: Make) -> None:
    end = make()
    end.theirs.close()
    with pytest.raises(ConnectionLost):
        end.take()


def test_a_hello_in_its_fpdu() -> None:
    """The first message of its queue, in a SendSE. proves: ISER-A.1-1"""
    ours, theirs = socket.socketpair()
    agreed = mpa.MpaParameters(2, True, True, False, 4, 4, 4, 4, mpa.RTR_NONE, b"")
    with theirs:
        pair = IwarpQueuePair(ours, agreed, initiator=True)
        dm = IserInitiator(pair, 512)
        dm.user = Heard()
        dm.allocate_connection_resources([], 1)
        dm.notice_key_values(AGREED)
        dm.enable_datamover()
        dm.flush()
        fpdu = golden("iser/hello-fpdu-28")
        assert theirs.recv(1000) == fpdu + crc32c(fpdu).to_bytes(4, "little")
        dm.connection_terminate()


def test_receives_for_slots_that_are_added() -> None:
    end = End(RFC_7145, SessionParameters())
    before = end.receives
    end.dm.add_resources([PduSlot(4), PduSlot(5)], 2)
    assert end.receives == before + 2


# -- the 12-byte header --------------------------------------------------------------------------


def _command(direction: int, itt: int, cmd_sn: int) -> bytes:
    read = direction == READ
    return pdu.ScsiCommand(
        flags=bhs.FLAG_FINAL | (bhs.FLAG_READ if read else bhs.FLAG_WRITE) | 1,
        lun=bytes((0, 3, 0, 0, 0, 0, 0, 0)),
        itt=itt,
        edtl=8,
        cmd_sn=cmd_sn,
        exp_stat_sn=1,
        cdb=bytes((0x28 if read else 0x2A, 0, 0, 0, 0, 0, 0, 0, 1)).ljust(16, b"\0"),
    ).pack()


@pytest.mark.parametrize(
    ("direction", "name", "at"), [(READ, "read-command-12", 8), (WRITE, "write-command-12", 4)]
)
def test_commands_are_as_rfc_5046_has_them(direction: int, name: str, at: int) -> None:
    """proves: ISER-7145-A-1, ISER-9.2-1"""
    end = End(RFC_5046, AGREED)
    expected = golden(f"iser/{name}")
    slot = end.slots[0]
    slot.bhs[:] = _command(direction, 7 if direction == READ else 8, 5 if direction == READ else 6)
    slot.direction, slot.data = direction, memoryview(bytearray(8))
    end.dm.send_control(slot)
    end.dm.flush()
    sent = end.left[-1].data
    stag = slot.stag.to_bytes(4, "big")
    assert sent == expected[:at] + stag + expected[at + 4 :]


def test_a_pdu_without_data_names_no_stag() -> None:
    end = End(RFC_5046, AGREED)
    slot = end.slots[0]
    slot.header.view[:] = b"\xff" * len(slot.header.view)
    slot.bhs[:] = pdu.NopOut(itt=1, cmd_sn=5, exp_stat_sn=1).pack()
    slot.direction = NO_DATA
    end.dm.send_control(slot)
    end.dm.flush()
    assert end.left[-1].data == b"\x10".ljust(12, b"\0") + bytes(slot.bhs)


def test_stags_with_a_base_cannot_be_told() -> None:
    """Those of an RDMA device. proves: ISER-2.4.1-1"""

    class Based:
        def __init__(self, pair: MemoryQueuePair) -> None:
            self._pair = pair

        def __getattr__(self, name: str) -> object:
            return getattr(self._pair, name)

        def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
            return self._pair.advertise(buffer, rights)[0], BASE

    end = End(RFC_5046, AGREED)
    end.dm.qp = Based(end.pair)  # type: ignore[assignment]
    slot = end.slots[0]
    slot.direction, slot.data = READ, memoryview(bytearray(8))
    with pytest.raises(LocalProtocolError, match="zero-based"):
        end.dm.send_control(slot)


@pytest.mark.parametrize("lasts", [3, ENDLESS])
def test_what_a_target_that_always_has_more_may_take(make: Make, lasts: int) -> None:
    """As for a target: a few rounds."""
    end = make(replace(AGREED, iser_hello_required=False))
    busy = Restless(end.pair, lasts)
    end.dm.qp = cast("seam.QueuePair", busy)
    told: list[int] = []
    end.dm.on_unfinished = lambda: told.append(busy.turns)
    end.say(end.pdu())
    assert end.take() == 1
    assert told == ([] if lasts == 3 else [ROUNDS]) and busy.turns == min(lasts, ROUNDS)
    end.say(end.pdu())
    assert end.take() == 1
