"""EXTENDED COPY between LUNs of the target."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from iserblk.scsi import cdb, inquiry, sense, third_party
from iserblk.scsi import reservations as pr
from iserblk.scsi import status as sam
from iserblk.scsi.reservations import OutParameters
from iserblk.scsi.third_party import CopyList, Cscd, Segment
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import DATA_OUT, ScsiTask
from iserblk.target.store.status import StatusError
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import (
    GOOD,
    INITIATOR,
    INVALID_FIELD,
    IQN,
    WRITE_PROTECTED,
    Answer,
    Client,
)

SIZE = 4 << 20
BLOCK = 512
NOT_REACHABLE = (sense.COPY_ABORTED, sense.COPY_TARGET_NOT_REACHABLE)
NO_TARGET = (sense.COPY_ABORTED, sense.UNREACHABLE_COPY_TARGET)
DEVICE_FAILURE = (sense.COPY_ABORTED, sense.THIRD_PARTY_DEVICE_FAILURE)
OUT_OF_RANGE = (sense.COPY_ABORTED, sense.NO_ADDITIONAL_SENSE)
WRONG_LENGTH = (sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)


class Place:
    """LUN 0 and 1 with blocks of 512 bytes, LUN 2 with 4096. The client sends to LUN 1."""

    def __init__(self, **options: Any) -> None:
        self.stores = [FakeStore(SIZE) for _ in range(3)]
        self.units = {
            lun: LogicalUnit(store, serial=f"S{lun}", block=4096 if lun == 2 else 512, **options)
            for lun, store in enumerate(self.stores)
        }
        self.server = DeviceServer(self.units, IQN)
        self.client = Client(self.server, lun=1)
        self.cscds = [self.cscd(lun) for lun in range(3)]
        for at in range(0, SIZE, BLOCK):
            self.stores[0].content[at : at + BLOCK] = (at // BLOCK).to_bytes(4, "big") * 128

    def cscd(self, lun: int) -> Cscd:
        """The descriptor that an initiator makes of VPD page 83h."""
        client = Client(self.server, lun=lun)
        page = client.data(cdb.inquiry(255, inquiry.DEVICE_IDENTIFICATION))
        found = next(
            each for each in inquiry.decode_designators(page) if each.kind == inquiry.TYPE_NAA
        )
        block = 4096 if lun == 2 else 512
        return Cscd(0xE4, 0, found.kind, found.code_set, found.data, block)

    def copy(self, *segments: Segment, cscds: list[Cscd] | None = None) -> Answer:
        return self.send(CopyList(0, self.cscds if cscds is None else cscds, list(segments)))

    def send(self, copy: CopyList) -> Answer:
        data = third_party.encode_copy_list(copy)
        return self.client.run(third_party.extended_copy(len(data)), data)


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_copy_to_another_lun(place: Place) -> None:
    source, destination, _ = place.stores
    first, second = Segment(2, 0, 0, 1, 16, 8, 100), Segment(2, 0, 0, 1, 1, 0, 0)
    assert place.copy(first, second).code == GOOD
    expected = bytearray(SIZE)
    expected[100 * BLOCK : 116 * BLOCK] = source.content[8 * BLOCK : 24 * BLOCK]
    expected[:BLOCK] = source.content[:BLOCK]
    assert destination.content == expected
    assert place.client.code(cdb.synchronize_cache10(0, 0)) == GOOD
    assert destination.calls[-1] == ("flush",)


def test_the_name_by_which_a_lun_is_found(place: Place) -> None:
    """Any of its designators; the T10 vendor ID as well as NAA."""
    t10 = Cscd(0xE4, 0, inquiry.TYPE_T10, inquiry.ASCII, b"ISERBLK S0", 512)
    cscds = [t10, place.cscds[1]]
    assert place.copy(Segment(2, 0, 0, 1, 8, 8, 0), cscds=cscds).code == GOOD
    assert place.stores[1].content[: 8 * BLOCK] == place.stores[0].content[8 * BLOCK : 16 * BLOCK]


@pytest.mark.parametrize(("start", "to"), [(0, 1), (1, 0), (5, 5), (0, 3000)])
def test_a_copy_within_a_lun_whose_ranges_overlap(place: Place, start: int, to: int) -> None:
    """More than a step of the copy: no block is overwritten before it was read."""
    place.client.lun = 0
    place.client.code(bytes(6))
    store = place.stores[0]
    before, blocks = bytes(store.content), 5000
    assert place.copy(Segment(2, 0, 0, 0, blocks, start, to)).code == GOOD
    end = (to + blocks) * BLOCK
    assert store.content[to * BLOCK : end] == before[start * BLOCK : (start + blocks) * BLOCK]
    assert (
        store.content[: to * BLOCK] == before[: to * BLOCK] and store.content[end:] == before[end:]
    )


@pytest.mark.logs("EXTENDED COPY: a part of it may have been carried out: away$")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StatusError(errno.EBUSY, "away", sam.BUSY), DEVICE_FAILURE),
        (
            StatusError(
                errno.EREMOTEIO,
                "broken",
                sam.CHECK_CONDITION,
                sense.encode_fixed(sense.MEDIUM_ERROR, 0x0C, 0),
            ),
            (sense.MEDIUM_ERROR, sense.WRITE_ERROR),
        ),
    ],
    ids=["BUSY", "MEDIUM ERROR"],
)
def test_a_copy_that_may_be_half_done_is_not_to_be_repeated_blindly(
    monkeypatch: pytest.MonkeyPatch, error: StatusError, told: tuple[int, int]
) -> None:
    """The LUN is one of another target. Hosts repeat what ends with BUSY; this copy would then copy
    its own blocks."""
    place = Place()
    store = place.stores[0]
    place.client.lun = 0
    place.client.code(bytes(6))
    write = store.write

    def once(data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if store.calls:
            raise error
        return write(data, offset, durable, nowait)

    monkeypatch.setattr(store, "write", once)
    assert place.copy(Segment(2, 0, 0, 0, 5000, 0, 1)).code == told
    assert [call[0] for call in store.calls] == ["write"]


def test_blocks_of_different_sizes(place: Place) -> None:
    """NUMBER OF BLOCKS is of the destination's size with DC, else of the source's."""
    source, _, large = place.stores
    place.client.lun = 2
    place.client.code(bytes(6))
    assert place.copy(Segment(2, 0, 0, 2, 16, 8, 3)).code == GOOD
    assert large.content[3 * 4096 : 5 * 4096] == source.content[8 * BLOCK : 24 * BLOCK]
    assert place.copy(Segment(2, third_party.DC, 0, 2, 1, 8, 0)).code == GOOD
    assert large.content[:4096] == source.content[4096:8192]
    answer = place.copy(Segment(2, 0, 0, 2, 15, 8, 3))
    assert answer.code == (sense.COPY_ABORTED, sense.UNEXPECTED_INEXACT_SEGMENT)


def test_without_a_write_cache_it_is_durable() -> None:
    place = Place(write_cache=False)
    assert place.copy(Segment(2, 0, 0, 1, 8, 0, 0)).code == GOOD
    writes = [call for call in place.stores[1].calls if call[0] == "write"]
    assert writes == [("write", 0, 8 * BLOCK, True)]


def test_copies_that_are_refused_change_nothing(place: Place) -> None:
    good = Segment(2, 0, 0, 1, 1, 0, 0)
    blocks = SIZE // BLOCK
    unknown = Cscd(0xE4, 0, 3, 1, b"\x30" + bytes(7), 512)
    for segments, cscds, code in (
        ([Segment(2, 0, 0, 1, 1, blocks, 0)], None, OUT_OF_RANGE),
        ([Segment(2, 0, 0, 1, 2, 0, blocks - 1)], None, OUT_OF_RANGE),
        ([Segment(2, 0, 0, 1, 0, 0, blocks)], None, OUT_OF_RANGE),
        ([Segment(2, 0, 3, 1, 1, 0, 0)], None, NO_TARGET),
        ([Segment(2, 0, 0, 0xFFFF, 1, 0, 0)], None, NO_TARGET),
        ([Segment(2, 0, 0, 0, 1, 0, 0)], None, NOT_REACHABLE),  # to a LUN that was not asked
        ([Segment(2, 0, 1, 2, 8, 0, 0)], None, NOT_REACHABLE),
        ([], [unknown], NOT_REACHABLE),
        ([], [place.cscds[0]._replace(block=4096)], NOT_REACHABLE),
        (
            [],
            [Cscd(0xE0)],
            (sense.ILLEGAL_REQUEST, sense.UNSUPPORTED_TARGET_DESCRIPTOR),
        ),
        (
            [Segment(0x04)],
            None,
            (sense.ILLEGAL_REQUEST, sense.UNSUPPORTED_SEGMENT_DESCRIPTOR),
        ),
        ([], place.cscds * 6, (sense.ILLEGAL_REQUEST, sense.TOO_MANY_TARGET_DESCRIPTORS)),
        ([good] * 257, [], (sense.ILLEGAL_REQUEST, sense.TOO_MANY_SEGMENT_DESCRIPTORS)),
    ):
        # A good segment before the bad one: all are checked first.
        before = [good] if cscds is None else []
        assert place.copy(*before, *segments, cscds=cscds).code == code
        assert not any(call[0] == "write" for call in place.stores[1].calls)
    data = bytearray(third_party.encode_copy_list(CopyList(0, place.cscds, [good])) + b"data")
    data[15] = 4
    answer = place.client.run(third_party.extended_copy(len(data)), bytes(data))
    assert answer.code == (sense.ILLEGAL_REQUEST, sense.INLINE_DATA_LENGTH_EXCEEDED)


def test_lengths(place: Place) -> None:
    run = place.client.code
    assert run(third_party.extended_copy(0)) == GOOD
    assert run(third_party.extended_copy(15)) == WRONG_LENGTH
    assert run(third_party.extended_copy(1 << 20)) == WRONG_LENGTH
    assert run(third_party.extended_copy(16), bytes(3) + b"\x20" + bytes(12)) == WRONG_LENGTH
    assert run(third_party.extended_copy(16), bytes(16)) == GOOD, "nothing to copy"


def test_a_read_only_destination() -> None:
    place = Place(read_only=True)
    data = third_party.encode_copy_list(CopyList(0, place.cscds, []))
    assert place.client.code(third_party.extended_copy(len(data))) == WRITE_PROTECTED


@pytest.mark.logs("EXTENDED COPY: .*bad block")
def test_a_source_that_cannot_be_read(place: Place) -> None:
    place.stores[0].failure = OSError(5, "bad block")
    answer = place.copy(Segment(2, 0, 0, 1, 1, 0, 0))
    assert answer.code == (sense.COPY_ABORTED, sense.THIRD_PARTY_DEVICE_FAILURE)
    assert not place.stores[1].calls


def test_a_source_that_is_reserved_for_another(place: Place) -> None:
    """As a READ of it would be; a reservation that lets others read lets them copy."""
    other = Client(place.server, name="iqn.2026-11.example:other")
    for kind, expected in (
        (pr.WRITE_EXCLUSIVE, sam.GOOD),
        (pr.EXCLUSIVE_ACCESS, sam.RESERVATION_CONFLICT),
    ):
        for action, parameters in (
            (pr.REGISTER_AND_IGNORE, OutParameters(0, 0xA)),
            (pr.RESERVE, OutParameters(0xA)),
        ):
            data = pr.encode_parameters(parameters)
            assert other.run(pr.reserve_out(action, kind), data).status == sam.GOOD
        assert place.copy(Segment(2, 0, 0, 1, 1, 0, 0)).status == expected
        data = pr.encode_parameters(OutParameters(0xA))
        assert other.run(pr.reserve_out(pr.RELEASE, kind), data).status == sam.GOOD


def test_a_source_that_the_initiator_has_no_access_to(place: Place) -> None:
    place.server.set_access(lambda _name, lun: lun != 0)
    assert place.client.code(cdb.report_luns(64)) == GOOD
    assert place.copy(Segment(2, 0, 0, 1, 1, 0, 0)).code == NOT_REACHABLE


@pytest.mark.logs("EXTENDED COPY: .*no access to its source any more")
def test_a_source_that_is_taken_away_meanwhile(place: Place) -> None:
    """By other rules of access: the step that has begun is the last one. Another initiator's copy
    goes on."""
    steps = 0
    store = place.stores[0]
    read_into = store.read_into

    def take_away(buffer: memoryview, offset: int, nowait: bool) -> bool:
        nonlocal steps
        steps += 1
        place.server.set_access(lambda name, lun: lun != 0 or name != INITIATOR)
        return read_into(buffer, offset, nowait)

    store.read_into = take_away  # type: ignore[method-assign]
    segment = Segment(2, 0, 0, 1, 3 << 11, 0, 0)  # three steps
    assert place.copy(segment).code == NOT_REACHABLE
    assert steps == 1 and bytes(place.stores[1].content[1 << 20 :]) == bytes(SIZE - (1 << 20))
    place.client = Client(place.server, lun=1, name="iqn.2026-11.example:other")
    assert place.copy(segment).code == GOOD and steps == 4


@pytest.mark.logs("EXTENDED COPY: .*removed")
def test_a_source_that_is_removed_meanwhile(place: Place) -> None:
    """Just behind the look whether it is there. Its file is closed then; the descriptor may already
    be that of another file."""
    place.units[0].server = LogicalUnit(FakeStore(SIZE), serial="alone").server  # that of no target
    data = memoryview(
        third_party.encode_copy_list(CopyList(0, place.cscds, [Segment(2, 0, 0, 1, 1, 0, 0)]))
    )
    task = place.server.begin(place.client.nexus, 1, third_party.extended_copy(len(data)))
    assert task.direction == DATA_OUT and not place.server.run(task, data, True)
    assert not place.server.remove_luns([0], lambda: None)
    place.units[0].close()
    assert place.server.run(task, data)
    found = sense.decode(task.sense)
    assert (found.key, found.code) == (sense.COPY_ABORTED, sense.THIRD_PARTY_DEVICE_FAILURE)


def test_a_copy_that_is_not_wanted_any_more(place: Place) -> None:
    data = memoryview(
        third_party.encode_copy_list(CopyList(0, place.cscds, [Segment(2, 0, 0, 1, 1, 0, 0)]))
    )
    task = place.server.begin(place.client.nexus, 1, third_party.extended_copy(len(data)))
    assert not place.server.run(task, data, True)
    task.cancelled = True
    assert place.server.run(task, data) and task.status == sam.TASK_ABORTED
    assert not place.stores[1].calls


def test_what_hosts_ask_first(place: Place) -> None:
    """3PC in the standard data, the operating parameters, VPD page 8Fh; no other service action."""
    assert place.client.data(cdb.inquiry(96))[5] == 0x08
    parameters = place.client.data(third_party.receive_copy_results(3))
    assert parameters[8:12] == bytes.fromhex("0010 0100") and parameters[-2:] == b"\x02\xe4"
    assert place.client.data(third_party.receive_copy_results(3, allocation=10)) == parameters[:10]
    page = place.client.data(cdb.inquiry(255, third_party.VPD_PAGE))
    assert page[1] == 0x8F and len(page) == 4 + int.from_bytes(page[2:4], "big")
    assert place.client.run(third_party.receive_copy_results(3, allocation=0)).status == sam.GOOD
    wrong = bytearray(third_party.receive_copy_results(3))
    wrong[9] = 1
    assert place.client.code(bytes(wrong)) == INVALID_FIELD


# -- COPY STATUS -----------------------------------------------------------------------------------

STATUS = third_party.receive_copy_results(third_party.COPY_STATUS, 7)
FOUND = Segment(2, 0, 0, 1, 16, 8, 100)


def listed(place: Place, *segments: Segment, list_id: int = 7, usage: int = 0) -> Answer:
    return place.send(CopyList(list_id, place.cscds, list(segments), usage=usage))


def test_the_status_of_a_copy_is_told_once(place: Place) -> None:
    assert place.client.code(STATUS) == INVALID_FIELD
    assert listed(place, FOUND, Segment(2, 0, 0, 1, 1, 0, 0)).code == GOOD
    other = third_party.receive_copy_results(third_party.COPY_STATUS, 8)
    assert place.client.code(other) == INVALID_FIELD
    status = third_party.decode_copy_status(place.client.data(STATUS))
    assert status == (third_party.COMPLETED, 2, 17 * BLOCK)
    assert place.client.code(STATUS) == INVALID_FIELD


def test_a_copy_without_an_identifier_has_no_status(place: Place) -> None:
    assert listed(place, FOUND, list_id=0, usage=third_party.NO_LIST_ID).code == GOOD
    none = third_party.receive_copy_results(third_party.COPY_STATUS, 0)
    assert place.client.code(none) == INVALID_FIELD


@pytest.mark.logs("EXTENDED COPY: ")
def test_a_copy_that_fails_says_how_far_it_came(place: Place) -> None:
    reads = place.stores[0].read_into

    def read_into(buffer: memoryview, offset: int, nowait: bool) -> bool:
        if offset == 0:
            raise OSError(5, "Input/output error")
        return reads(buffer, offset, nowait)

    place.stores[0].read_into = read_into  # type: ignore[method-assign]
    assert listed(place, FOUND, Segment(2, 0, 0, 1, 1, 0, 0)).code[0] == sense.COPY_ABORTED
    status = third_party.decode_copy_status(place.client.data(STATUS))
    assert status == (third_party.FAILED, 1, 16 * BLOCK)


def test_a_copy_that_was_refused_has_none_and_one_without_segments_has(place: Place) -> None:
    assert listed(place).code == GOOD
    assert third_party.decode_copy_status(place.client.data(STATUS)) == (
        third_party.COMPLETED,
        0,
        0,
    )
    assert listed(place, Segment(2, 0, 0, 1, 16, 1 << 40, 0)).code == OUT_OF_RANGE
    assert place.client.code(STATUS) == INVALID_FIELD


def test_while_it_runs_another_copy_of_its_number_is_refused(place: Place) -> None:
    """Another nexus may use the number; and the status says that it runs."""
    seen: list[object] = []
    reads = place.stores[0].read_into
    other = Client(place.server, lun=1, name="iqn.2026-11.example:other")

    def read_into(buffer: memoryview, offset: int, nowait: bool) -> bool:
        if not seen:
            data = place.client.data(STATUS)
            seen.append(third_party.decode_copy_status(data))
            seen.append(listed(place, FOUND).code)
            seen.append(other.code(STATUS))
        return reads(buffer, offset, nowait)

    place.stores[0].read_into = read_into  # type: ignore[method-assign]
    assert listed(place, FOUND).code == GOOD
    assert seen == [
        (third_party.IN_PROGRESS, 0, 0),
        (sense.ILLEGAL_REQUEST, sense.OPERATION_IN_PROGRESS),
        INVALID_FIELD,
    ]


def test_of_two_copies_with_one_number_that_come_together_one_is_refused(place: Place) -> None:
    """The second comes before the first has a thread. Of a task that was ended before that, the
    number is free again."""
    data = memoryview(third_party.encode_copy_list(CopyList(7, place.cscds, [FOUND])))

    def begin() -> tuple[ScsiTask, bool]:
        task = place.server.begin(place.client.nexus, 1, third_party.extended_copy(len(data)))
        return task, place.server.run(task, data, True)

    first, ended = begin()
    assert not ended, "it waits for a thread"
    assert third_party.decode_copy_status(place.client.data(STATUS))[0] == third_party.IN_PROGRESS
    second, ended = begin()
    assert ended and second.status == sam.CHECK_CONDITION
    assert sense.decode(second.sense).code == sense.OPERATION_IN_PROGRESS
    first.cancelled = True
    third, ended = begin()
    assert not ended
    assert place.server.run(first, data) and first.status == sam.TASK_ABORTED
    assert not place.stores[1].calls
    assert begin()[0].status == sam.CHECK_CONDITION, "the third has the number"
    assert place.server.run(third, data) and third.status == sam.GOOD
    status = third_party.decode_copy_status(place.client.data(STATUS))
    assert status == (third_party.COMPLETED, 1, 16 * BLOCK)


def test_a_nexus_that_is_lost_has_no_copies(place: Place) -> None:
    assert listed(place, FOUND).code == GOOD
    place.server.detach(place.client.nexus)
    place.client = Client(place.server, lun=1)
    assert place.client.code(STATUS) == INVALID_FIELD
