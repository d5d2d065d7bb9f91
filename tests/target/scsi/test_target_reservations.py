"""Persistent reservations at the device server: what each nexus may do, and which are told.

The expectations are SPC-4's and SBC-3's tables of commands that are allowed in the presence of a
reservation, written down as they stand there.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from iserblk.scsi import cdb, log, opcodes, sense, third_party
from iserblk.scsi import reservations as pr
from iserblk.scsi import status as sam
from iserblk.scsi.reservations import MoveParameters, OutParameters, Reservation, TransportId
from iserblk.target.scsi import primary
from iserblk.target.scsi.commands import COMMANDS
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.reservations import MAXIMUM_REGISTRATIONS
from iserblk.target.store.statefile import StateFile
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, INITIATOR, INVALID_FIELD, IQN, POWER_ON, Client

CONFLICT = sam.RESERVATION_CONFLICT
A, B, C = 0xA, 0xB, 0xC
WE, EA, WE_RO, EA_RO, WE_AR, EA_AR = pr.TYPES
RESERVATIONS_PREEMPTED = (sense.UNIT_ATTENTION, sense.RESERVATIONS_PREEMPTED)
RESERVATIONS_RELEASED = (sense.UNIT_ATTENTION, sense.RESERVATIONS_RELEASED)
REGISTRATIONS_PREEMPTED = (sense.UNIT_ATTENTION, sense.REGISTRATIONS_PREEMPTED)
WRONG_PARAMETER = (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST)
READY = cdb.test_unit_ready()
BLOCK = bytes(512)


def make_server(store: FakeStore | None = None) -> DeviceServer:
    return DeviceServer({0: LogicalUnit(store or FakeStore(1 << 20), serial="S")}, IQN)


class Host(Client):
    """``key``: what it is registered under, as far as its own commands go."""

    def __init__(self, server: DeviceServer, name: str, key: int = 0) -> None:
        super().__init__(server, name=name)
        self.key = 0
        if key:
            assert self.register(key) == sam.GOOD

    def out(self, action: int, kind: int = 0, action_key: int = 0, flags: int = 0) -> int:
        """The status of a PERSISTENT RESERVE OUT."""
        return self.send(action, kind, OutParameters(self.key, action_key, flags))

    def send(self, action: int, kind: int, parameters: OutParameters) -> int:
        data = pr.encode_parameters(parameters)
        self.last = self.run(pr.reserve_out(action, kind, len(data)), data)
        return self.last.status

    def move(self, parameters: MoveParameters) -> int:
        data = pr.encode_move_parameters(parameters)
        self.last = self.run(pr.reserve_out(pr.REGISTER_AND_MOVE, 0, len(data)), data)
        return self.last.status

    def register(self, key: int, flags: int = 0) -> int:
        status = self.out(pr.REGISTER, 0, key, flags)
        if status == sam.GOOD:
            self.key = key
        return status

    def keys(self) -> tuple[int, list[int]]:
        return pr.decode_keys(self.data(pr.reserve_in(pr.READ_KEYS)))

    def reservation(self) -> Reservation | None:
        return pr.decode_reservation(self.data(pr.reserve_in(pr.READ_RESERVATION)))[1]

    def told(self) -> list[tuple[int, int]]:
        """The unit attentions that are pending, oldest first."""
        codes = []
        while (code := self.code(READY)) != GOOD:
            codes.append(code)
        return codes


@pytest.fixture
def server() -> DeviceServer:
    return make_server()


def three(server: DeviceServer) -> tuple[Host, Host, Host]:
    return (
        Host(server, "iqn.2026-11.example:a", A),
        Host(server, "iqn.2026-11.example:b", B),
        Host(server, "iqn.2026-11.example:c", C),
    )


# -- types x commands x nexuses --------------------------------------------------------------------

# CDB, bytes of Data-Out, class: F always allowed, R not through Exclusive Access, W never.
TABLE: dict[str, tuple[bytes, int, str]] = {
    "TEST UNIT READY": (READY, 0, "F"),
    "REQUEST SENSE": (cdb.request_sense(), 0, "F"),
    "INQUIRY": (cdb.inquiry(96), 0, "F"),
    "INQUIRY VPD": (cdb.inquiry(96, 0x83), 0, "F"),
    "REPORT LUNS": (cdb.report_luns(64), 0, "F"),
    "READ CAPACITY(10)": (cdb.read_capacity10(), 0, "F"),
    "READ CAPACITY(16)": (cdb.read_capacity16(), 0, "F"),
    "READ KEYS": (pr.reserve_in(pr.READ_KEYS), 0, "F"),
    "READ RESERVATION": (pr.reserve_in(pr.READ_RESERVATION), 0, "F"),
    "REPORT CAPABILITIES": (pr.reserve_in(pr.REPORT_CAPABILITIES), 0, "F"),
    "READ FULL STATUS": (pr.reserve_in(pr.READ_FULL_STATUS), 0, "F"),
    "START UNIT": (bytes((0x1B, 0, 0, 0, 1, 0)), 0, "F"),
    "STOP UNIT": (bytes((0x1B, 0, 0, 0, 0, 0)), 0, "W"),
    "ALLOW REMOVAL": (bytes((0x1E, 0, 0, 0, 0, 0)), 0, "F"),
    "PREVENT REMOVAL": (bytes((0x1E, 0, 0, 0, 1, 0)), 0, "W"),
    "EXTENDED COPY": (third_party.extended_copy(16), 16, "W"),
    "RECEIVE COPY RESULTS": (third_party.receive_copy_results(3), 0, "W"),
    "SEND DIAGNOSTIC": (bytes((0x1D, 0x04, 0, 0, 0, 0)), 0, "W"),
    "MODE SELECT(6)": (cdb.mode_select6(4), 4, "W"),
    "MODE SELECT(10)": (cdb.mode_select10(8), 8, "W"),
    "LOG SENSE": (log.log_sense(0x0C), 0, "F"),
    "MODE SENSE(6)": (cdb.mode_sense6(0x3F, 255), 0, "R"),
    "MODE SENSE(10)": (cdb.mode_sense10(0x3F, 255), 0, "R"),
    "REPORT SUPPORTED": (bytes((0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0)), 0, "R"),
    "GET LBA STATUS": (cdb.get_lba_status16(0, 64), 0, "R"),
    "READ(6)": (bytes((0x08, 0, 0, 0, 1, 0)), 0, "R"),
    "READ(10)": (bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0)), 0, "R"),
    "READ(12)": (bytes((0xA8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)), 0, "R"),
    "READ(16)": (bytes((0x88, *bytes(12), 1, 0, 0)), 0, "R"),
    "VERIFY(12)": (bytes((0xAF, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)), 0, "R"),
    "VERIFY(10)": (cdb.verify10(0, 1), 0, "R"),
    "VERIFY(16)": (cdb.verify16(0, 1, cdb.BYTCHK), 512, "R"),
    "PRE-FETCH(10)": (cdb.pre_fetch10(0, 1), 0, "R"),
    "PRE-FETCH(16)": (cdb.pre_fetch16(0, 1), 0, "R"),
    "WRITE(6)": (bytes((0x0A, 0, 0, 0, 1, 0)), 512, "W"),
    "WRITE(10)": (bytes((0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0)), 512, "W"),
    "WRITE(12)": (bytes((0xAA, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)), 512, "W"),
    "WRITE(16)": (bytes((0x8A, *bytes(12), 1, 0, 0)), 512, "W"),
    "WRITE AND VERIFY(10)": (bytes((0x2E, 0, 0, 0, 0, 0, 0, 0, 1, 0)), 512, "W"),
    "WRITE AND VERIFY(12)": (bytes((0xAE, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)), 512, "W"),
    "WRITE AND VERIFY(16)": (bytes((0x8E, *bytes(12), 1, 0, 0)), 512, "W"),
    "COMPARE AND WRITE": (cdb.compare_and_write(0, 1), 1024, "W"),
    "XDWRITEREAD(10)": (cdb.xdwriteread10(0, 1), 512, "W"),
    "WRITE SAME(10)": (cdb.write_same10(0, 1), 512, "W"),
    "WRITE SAME(16)": (cdb.write_same16(0, 1), 512, "W"),
    "UNMAP": (cdb.unmap(24), 24, "W"),
    "SYNCHRONIZE CACHE(10)": (cdb.synchronize_cache10(0, 0), 0, "W"),
    "SYNCHRONIZE CACHE(16)": (cdb.synchronize_cache16(0, 0), 0, "W"),
}  # fmt: skip


def test_every_command_is_in_the_table() -> None:
    tried = {command[0] for command, _, _ in TABLE.values()} | {
        opcodes.PERSISTENT_RESERVE_OUT,
        opcodes.RESERVE_6,
        opcodes.RELEASE_6,
        opcodes.MAINTENANCE_OUT,  # tests/target/test_ports.py
    }
    known = {each.usage[0]: opcodes.name(each.usage) for each in COMMANDS.values()}
    missing = [name for opcode, name in known.items() if opcode not in tried]
    assert not missing, f"TABLE does not say what a reservation does to {missing}"
    assert tried == set(known)


@pytest.mark.parametrize("kind", pr.TYPES, ids=pr.type_words)
@pytest.mark.parametrize("name", TABLE)
def test_who_may_do_what(kind: int, name: str) -> None:
    server = make_server()
    holder = Host(server, "iqn.2026-11.example:holder", A)
    registered = Host(server, "iqn.2026-11.example:registered", B)
    other = Host(server, "iqn.2026-11.example:other")
    command, length, group = TABLE[name]
    data = cdb.unmap_parameters([(0, 1)]) if name == "UNMAP" else bytes(length)

    def status(host: Host) -> int:
        task = server.begin(host.nexus, 0, command)
        return task.status or host.run(command, data).status

    for host in (holder, registered, other):
        assert status(host) == sam.GOOD, "nothing is reserved yet"
    assert holder.out(pr.RESERVE, kind) == sam.GOOD
    stopped = group == "W" or (group == "R" and kind in (EA, EA_RO, EA_AR))
    assert status(holder) == sam.GOOD
    assert status(other) == (CONFLICT if stopped else sam.GOOD)
    only_holder = kind in (WE, EA)
    assert status(registered) == (CONFLICT if stopped and only_holder else sam.GOOD)
    assert holder.out(pr.RELEASE, kind) == sam.GOOD
    registered.told()
    for host in (registered, other):
        assert status(host) == sam.GOOD


def test_a_conflict_changes_nothing_and_has_no_sense() -> None:
    store = FakeStore(1 << 20)
    a, b, _ = three(make_server(store))
    assert a.out(pr.RESERVE, EA) == sam.GOOD
    answer = b.run(bytes((0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0)))
    assert (answer.status, answer.code, answer.data) == (CONFLICT, GOOD, b"")
    assert not store.calls


# -- registering -----------------------------------------------------------------------------------


def test_register(server: DeviceServer) -> None:
    a, b = Host(server, "a"), Host(server, "b")
    assert a.keys() == (0, [])
    a.key = 7
    assert a.register(A) == CONFLICT, "not registered: the key must be 0"
    a.key = 0
    assert a.register(0) == sam.GOOD and a.keys() == (0, []), "nothing to take back"
    assert a.register(A) == sam.GOOD and a.keys() == (1, [A])
    assert b.register(A) == sam.GOOD and b.keys() == (2, [A, A]), "two nexuses, one key"
    assert b.register(B) == sam.GOOD and b.keys() == (3, [A, B])
    b.key = A
    assert b.register(C) == CONFLICT and b.keys() == (3, [A, B])
    assert b.out(pr.REGISTER_AND_IGNORE, 0, C) == sam.GOOD
    b.key = C
    assert b.keys() == (4, [A, C])
    assert a.register(0) == sam.GOOD and a.keys() == (5, [C])
    assert a.out(pr.REGISTER_AND_IGNORE, 0, 0) == sam.GOOD and a.keys() == (5, [C])
    assert b.out(pr.REGISTER_AND_IGNORE, 0, 0) == sam.GOOD and b.keys() == (6, [])


@pytest.mark.parametrize(
    "action", [pr.RESERVE, pr.RELEASE, pr.CLEAR, pr.PREEMPT, pr.PREEMPT_AND_ABORT]
)
def test_what_only_registrants_may(server: DeviceServer, action: int) -> None:
    a, b, _ = three(server)
    stranger = Host(server, "stranger")
    assert a.out(pr.RESERVE, WE) == sam.GOOD
    before = a.keys()
    assert stranger.out(action, WE, A) == CONFLICT
    b.key = C
    assert b.out(action, WE, A) == CONFLICT, "registered, under another key"
    assert a.keys() == before and a.reservation() == (A, WE, 0)


@pytest.mark.parametrize(
    ("action", "flag", "bit"),
    [
        (pr.REGISTER, pr.APTPL, 0),  # there is no file to keep it in
        (pr.REGISTER_AND_IGNORE, pr.APTPL, 0),
        (pr.REGISTER_AND_IGNORE, pr.SPEC_I_PT, 3),
    ],
)
def test_flags_that_are_refused(server: DeviceServer, action: int, flag: int, bit: int) -> None:
    a = Host(server, "a")
    assert a.out(action, 0, A, flag) == sam.CHECK_CONDITION
    assert a.last.code == WRONG_PARAMETER
    assert (a.last.sense.field, a.last.sense.field_in_cdb) == (20, False)
    assert a.keys() == (0, [])


def test_capabilities_say_so(server: DeviceServer) -> None:
    a = Host(server, "a")
    found = pr.decode_capabilities(a.data(pr.reserve_in(pr.REPORT_CAPABILITIES)))
    assert not found.persists and found.types == set(pr.TYPES)  # type: ignore[comparison-overlap]
    assert found.flags == 0x1C, "CRH, SIP_C, ATP_C"


def test_registrations_have_a_bound(server: DeviceServer) -> None:
    clients = [Host(server, f"h{n}", n + 1) for n in range(MAXIMUM_REGISTRATIONS)]
    one_more = Host(server, "late")
    assert one_more.register(1) == sam.CHECK_CONDITION
    assert one_more.last.code == (sense.ILLEGAL_REQUEST, sense.NO_ROOM_FOR_REGISTRATION)
    assert clients[0].register(999) == sam.GOOD, "another key needs no room"
    assert clients[0].register(0) == sam.GOOD
    assert one_more.register(1) == sam.GOOD


def test_full_status(server: DeviceServer) -> None:
    a, b = Host(server, "iqn.2026-11.Example:A", A), Host(server, "b")
    assert b.register(B, pr.ALL_TG_PT) == sam.GOOD
    assert a.out(pr.RESERVE, EA_RO) == sam.GOOD
    raw = a.data(pr.reserve_in(pr.READ_FULL_STATUS))
    generation, (one, other) = pr.decode_full_status(raw)
    assert generation == 2
    assert one == (A, True, EA_RO, False, 1, ("iqn.2026-11.example:a", b"\x80abcde"))
    assert other == (B, False, 0, True, 0, ("b", b"\x80abcde"))
    assert a.data(pr.reserve_in(pr.READ_FULL_STATUS, 8)) == raw[:8]
    assert a.out(pr.RELEASE, EA_RO) == a.out(pr.RESERVE, WE_AR) == sam.GOOD
    raw = a.data(pr.reserve_in(pr.READ_FULL_STATUS))
    assert all(each.holder for each in pr.decode_full_status(raw)[1])


# -- reserving, releasing --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", pr.TYPES)
def test_reserve_and_release(server: DeviceServer, kind: int) -> None:
    a, b, _ = three(server)
    everybody = kind in (WE_AR, EA_AR)
    assert a.out(pr.RESERVE, kind) == a.out(pr.RESERVE, kind) == sam.GOOD
    assert a.reservation() == (0 if everybody else A, kind, 0)
    assert a.keys()[0] == 3, "no generation is counted for reservations"
    for another in set(pr.TYPES) - {kind}:
        assert a.out(pr.RESERVE, another) == CONFLICT
        assert a.out(pr.RELEASE, another) == sam.CHECK_CONDITION
        assert a.last.code == (sense.ILLEGAL_REQUEST, sense.INVALID_RELEASE)
    assert b.out(pr.RESERVE, kind) == (sam.GOOD if everybody else CONFLICT)
    if not everybody:
        assert b.out(pr.RELEASE, kind) == sam.GOOD
        assert a.reservation() is not None, "not b's to release"
    assert a.out(pr.RELEASE, kind) == sam.GOOD
    assert a.reservation() is None and not a.told()
    told = [] if kind in (WE, EA) else [RESERVATIONS_RELEASED]
    assert b.told() == told
    assert a.out(pr.RELEASE, kind) == sam.GOOD, "there is none"


@pytest.mark.parametrize("kind", [0, 2, 4, 9, 15, 0x11, 0x23])
def test_types_and_scopes_that_are_not_there(server: DeviceServer, kind: int) -> None:
    a, b, _ = three(server)
    assert a.out(pr.RESERVE, kind) == sam.CHECK_CONDITION
    assert a.last.code == INVALID_FIELD and a.last.sense.field == 2
    assert a.out(pr.RESERVE, WE) == sam.GOOD
    before = a.keys()
    assert b.out(pr.PREEMPT, kind, A) == sam.CHECK_CONDITION
    assert b.last.code == INVALID_FIELD
    assert b.keys() == before and b.reservation() == (A, WE, 0)


@pytest.mark.parametrize("kind", pr.TYPES)
def test_a_holder_unregisters(server: DeviceServer, kind: int) -> None:
    a, b, c = three(server)
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    assert a.register(0) == sam.GOOD
    if kind in (WE_AR, EA_AR):
        assert b.reservation() == (0, kind, 0) and not b.told()
        assert b.register(0) == c.register(0) == sam.GOOD
        assert b.reservation() is None
    else:
        told = [] if kind in (WE, EA) else [RESERVATIONS_RELEASED]
        assert b.told() == c.told() == told and not a.told()
        assert b.reservation() is None


def test_a_holder_keeps_it_under_another_key(server: DeviceServer) -> None:
    a, _, _ = three(server)
    assert a.out(pr.RESERVE, EA) == a.register(0xDD) == sam.GOOD
    assert a.reservation() == (0xDD, EA, 0)


@pytest.mark.parametrize("kind", [0, *pr.TYPES])
def test_clear(server: DeviceServer, kind: int) -> None:
    a, b, c = three(server)
    stranger = Host(server, "stranger")
    if kind:
        assert a.out(pr.RESERVE, kind) == sam.GOOD
    assert b.out(pr.CLEAR) == sam.GOOD
    assert b.keys() == (4, []) and b.reservation() is None
    assert a.told() == c.told() == [RESERVATIONS_PREEMPTED]
    assert not b.told() and not stranger.told()
    assert b.out(pr.CLEAR) == CONFLICT, "not registered any more"


# -- preempting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [pr.PREEMPT, pr.PREEMPT_AND_ABORT])
@pytest.mark.parametrize("kind", [WE, EA, WE_RO, EA_RO])
@pytest.mark.parametrize("new", pr.TYPES)
def test_preempt_the_holder(server: DeviceServer, action: int, kind: int, new: int) -> None:
    a, b, c = three(server)
    twin = Host(server, "twin", A)
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    assert b.out(action, new, A) == sam.GOOD
    assert b.keys() == (5, [B, C])
    assert b.reservation() == (0 if new in (WE_AR, EA_AR) else B, new, 0)
    assert a.told() == twin.told() == [REGISTRATIONS_PREEMPTED]
    assert c.told() == ([] if new == kind else [RESERVATIONS_RELEASED])
    assert not b.told()
    aborted = [0] if action == pr.PREEMPT_AND_ABORT else []
    assert a.ended_tasks == twin.ended_tasks == aborted
    assert b.ended_tasks == c.ended_tasks == []
    write = bytes((0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0))
    assert a.run(write).status == CONFLICT
    assert b.run(write, BLOCK).status == sam.GOOD


@pytest.mark.parametrize("kind", [0, *pr.TYPES])
def test_preempt_a_registration(server: DeviceServer, kind: int) -> None:
    a, b, c = three(server)
    if kind:
        assert a.out(pr.RESERVE, kind) == sam.GOOD
    before = a.reservation()
    assert b.out(pr.PREEMPT, WE, C) == sam.GOOD
    assert b.keys() == (4, [A, B]) and b.reservation() == before
    assert c.told() == [REGISTRATIONS_PREEMPTED] and not a.told() and not b.told()
    assert b.out(pr.PREEMPT, WE, C) == CONFLICT, "no registration has that key any more"
    assert b.keys()[0] == 4
    assert b.out(pr.PREEMPT, WE, B) == sam.GOOD, "its own registration"
    assert a.keys() == (5, [A]) and not b.told()


@pytest.mark.parametrize("kind", [0, WE, EA, WE_RO, EA_RO])
def test_preempt_with_key_0(server: DeviceServer, kind: int) -> None:
    a, b, _ = three(server)
    if kind:
        assert a.out(pr.RESERVE, kind) == sam.GOOD
    assert b.out(pr.PREEMPT, WE, 0) == sam.CHECK_CONDITION
    assert b.last.code == WRONG_PARAMETER and b.last.sense.field == 8
    assert b.keys() == (3, [A, B, C])


@pytest.mark.parametrize("kind", [WE_AR, EA_AR])
@pytest.mark.parametrize("new", [WE, EA_AR])
def test_preempt_all_registrants(server: DeviceServer, kind: int, new: int) -> None:
    a, b, c = three(server)
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    assert b.out(pr.PREEMPT_AND_ABORT, new, 0) == sam.GOOD
    assert b.keys() == (4, [B])
    assert b.reservation() == (0 if new == EA_AR else B, new, 0)
    assert a.told() == c.told() == [REGISTRATIONS_PREEMPTED] and not b.told()
    assert a.ended_tasks == c.ended_tasks == [0] and not b.ended_tasks


def test_the_last_of_all_registrants_preempts_itself(server: DeviceServer) -> None:
    a = Host(server, "a", A)
    assert a.out(pr.RESERVE, EA_AR) == a.out(pr.PREEMPT, EA_AR, A) == sam.GOOD
    assert a.keys() == (2, []) and a.reservation() is None


def test_a_holder_changes_the_type_by_preempting_itself(server: DeviceServer) -> None:
    a, b, _ = three(server)
    assert a.out(pr.RESERVE, WE) == a.out(pr.PREEMPT, EA_RO, A) == sam.GOOD
    assert a.keys() == (4, [A, B, C]) and a.reservation() == (A, EA_RO, 0)
    assert b.told() == [RESERVATIONS_RELEASED] and not a.told()


def test_preempt_and_abort_waits_for_what_runs(server: DeviceServer) -> None:
    a, b, _ = three(server)
    a.running = 1
    task = server.begin(b.nexus, 0, pr.reserve_out(pr.PREEMPT_AND_ABORT, EA))
    buffer = memoryview(bytearray(pr.encode_parameters(OutParameters(B, A))))
    assert not server.run(task, buffer, True)
    assert b.keys() == (4, [B, C]), "done, but not answered"
    assert not server.run(task, buffer, True)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(server.run(task, buffer)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    a.tell_ended()
    thread.join(10)
    assert results == [True] and task.status == sam.GOOD
    assert b.keys() == (4, [B, C]), "and done once"


def test_preempt_and_abort_of_what_never_ends(
    server: DeviceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary, "PREEMPT_TIMEOUT_S", 0.01)
    a, b, _ = three(server)
    a.running = 1
    assert b.out(pr.PREEMPT_AND_ABORT, EA, A) == sam.CHECK_CONDITION
    assert b.last.code == (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)


# -- nexuses that come and go ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", pr.TYPES)
def test_it_outlives_the_session_and_a_lun_reset(server: DeviceServer, kind: int) -> None:
    a, b, c = three(server)
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    before = b.data(pr.reserve_in(pr.READ_FULL_STATUS))
    server.detach(a.nexus)
    assert server.reset_lun(0)
    assert b.told() == c.told() == [(sense.UNIT_ATTENTION, sense.LUN_RESET)]
    assert b.data(pr.reserve_in(pr.READ_FULL_STATUS)) == before
    again = Host(server, a.nexus.name.initiator.name.upper())
    again.key = A
    assert again.out(pr.RESERVE, kind) == sam.GOOD, "it is the same nexus"
    assert again.out(pr.RELEASE, kind) == sam.GOOD


def test_another_isid_is_another_nexus(server: DeviceServer) -> None:
    a = Host(server, "a", A)
    assert a.out(pr.RESERVE, EA) == sam.GOOD
    other = Client(server, name="a", isid=b"\x80fghij")
    assert other.run(bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0))).status == CONFLICT


def test_a_nexus_that_was_away_meets_power_on_alone(server: DeviceServer) -> None:
    a, b, _ = three(server)
    server.detach(a.nexus)
    assert b.out(pr.PREEMPT, EA, A) == sam.GOOD
    again = Client(server, name=a.nexus.name.initiator.name, ready=False)
    assert again.code(READY) == POWER_ON
    assert again.code(READY) == GOOD


def test_attentions_queue_up_in_order_and_each_once(server: DeviceServer) -> None:
    a, b, _ = three(server)
    late = Client(
        server, name=a.nexus.name.initiator.name, ready=False
    )  # a second session of that name
    for _ in range(2):
        assert a.out(pr.RESERVE, WE_RO) == a.out(pr.RELEASE, WE_RO) == sam.GOOD
    assert b.told() == [RESERVATIONS_RELEASED]
    assert b.out(pr.PREEMPT, WE, A) == sam.GOOD
    assert late.code(READY) == POWER_ON
    assert late.code(READY) == REGISTRATIONS_PREEMPTED
    assert late.code(READY) == GOOD


def test_each_lun_has_its_own() -> None:
    units = {n: LogicalUnit(FakeStore(1 << 20), serial=f"S{n}") for n in (0, 1)}
    server = DeviceServer(units, IQN)
    a, b = Host(server, "a", A), Host(server, "b")
    assert a.out(pr.RESERVE, EA) == sam.GOOD
    b.lun = 1
    assert b.told() == [POWER_ON]
    assert b.keys() == (0, []) and b.reservation() is None
    assert b.run(bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0))).status == sam.GOOD


# -- CDBs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 8, 23, 1 << 20, 0xFFFFFFFF])
def test_parameter_lists_of_another_length(server: DeviceServer, length: int) -> None:
    a = Host(server, INITIATOR)
    answer = a.run(pr.reserve_out(pr.REGISTER, 0, length))
    assert answer.code == (sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)


@pytest.mark.parametrize(
    "command",
    [*(pr.reserve_in(each) for each in range(4, 32)), *(pr.reserve_out(n) for n in range(8, 32))],
    ids=lambda each: each[:2].hex(),
)
def test_service_actions_that_are_not_there(server: DeviceServer, command: bytes) -> None:
    answer = Host(server, INITIATOR).run(command)
    assert answer.code == INVALID_FIELD and answer.sense.field == 1


@pytest.mark.parametrize(("opcode", "count"), [(0x5E, 4), (0x5F, 8)])
def test_they_are_reported_as_supported(server: DeviceServer, opcode: int, count: int) -> None:
    a = Host(server, INITIATOR)
    for action in range(32):
        answer = a.data(bytes((0xA3, 0x0C, 2, opcode, 0, action, 0, 0, 0, 64, 0, 0)))
        assert answer[1] == (3 if action < count else 1)
        if action < count:
            assert answer[4:6] == bytes((opcode, action))


# -- RESERVE(6) and RELEASE(6) ---------------------------------------------------------------------

RESERVE6 = bytes((0x16, 0, 0, 0, 0, 0))
RELEASE6 = bytes((0x17, 0, 0, 0, 0, 0))
# SPC-2, table of commands allowed in the presence of a reservation of another initiator; the three
# that need no LUN are allowed everywhere.
NOT_STOPPED = (
    "REQUEST SENSE",
    "INQUIRY",
    "INQUIRY VPD",
    "REPORT LUNS",
    "LOG SENSE",
    "ALLOW REMOVAL",
)


def two(server: DeviceServer) -> tuple[Host, Host]:
    return Host(server, "iqn.2026-11.example:a"), Host(server, "iqn.2026-11.example:b")


@pytest.mark.parametrize("name", TABLE)
def test_what_reserve_6_stops(server: DeviceServer, name: str) -> None:
    a, b = two(server)
    command, length, _ = TABLE[name]
    data = cdb.unmap_parameters([(0, 1)]) if name == "UNMAP" else bytes(length)

    def status(host: Host) -> int:
        task = server.begin(host.nexus, 0, command)
        return task.status or host.run(command, data).status

    assert a.run(RESERVE6).status == sam.GOOD
    assert status(b) == (sam.GOOD if name in NOT_STOPPED else CONFLICT)
    persistent = command[0] == opcodes.PERSISTENT_RESERVE_IN
    assert status(a) == (CONFLICT if persistent else sam.GOOD)
    assert a.run(RELEASE6).status == sam.GOOD
    assert status(b) == status(a) == sam.GOOD


def test_reserve_6_is_of_one_nexus(server: DeviceServer) -> None:
    a, b = two(server)
    assert a.run(RESERVE6).status == a.run(RESERVE6).status == sam.GOOD
    assert b.run(RESERVE6).status == CONFLICT
    assert b.run(RELEASE6).status == sam.GOOD, "not its own: nothing happens"
    assert b.run(READY).status == CONFLICT
    for host in (a, b):
        assert host.register(A) == CONFLICT, "also for the nexus that has reserved"
    assert a.run(RELEASE6).status == sam.GOOD
    assert b.run(RESERVE6).status == sam.GOOD
    assert a.run(READY).status == CONFLICT


def test_what_ends_a_reserve_6(server: DeviceServer) -> None:
    a, b = two(server)
    assert a.run(RESERVE6).status == sam.GOOD
    assert server.reset_lun(0)
    assert b.told() == [(sense.UNIT_ATTENTION, sense.LUN_RESET)]
    assert a.told() == [(sense.UNIT_ATTENTION, sense.LUN_RESET)]
    assert a.run(RESERVE6).status == sam.GOOD
    server.detach(a.nexus)
    assert b.run(READY).status == sam.GOOD
    assert b.run(RESERVE6).status == sam.GOOD
    again = Host(server, "iqn.2026-11.example:b")  # the same name: it reinstates the session
    assert again.run(RESERVE6).status == sam.GOOD
    server.detach(b.nexus)
    assert Host(server, "iqn.2026-11.example:c").run(READY).status == CONFLICT, "it is another's"


def test_reserve_6_where_initiators_are_registered(server: DeviceServer) -> None:
    """SPC-2: a conflict. SPC-3, 5.6.3: but not for the holder, nor for a registered nexus where
    the type gives access to all of them; then nothing is changed."""
    a, b, c = three(server)
    stranger = Host(server, "iqn.2026-11.example:d")
    for command in (RESERVE6, RELEASE6):
        for host in (a, b, c, stranger):
            assert host.run(command).status == CONFLICT, "no reservation, but registrations"
    for kind in pr.TYPES:
        assert a.out(pr.RESERVE, kind) == sam.GOOD
        for command in (RESERVE6, RELEASE6):
            assert a.run(command).status == sam.GOOD
            all_may = kind not in (WE, EA)
            assert b.run(command).status == (sam.GOOD if all_may else CONFLICT)
            assert stranger.run(command).status == CONFLICT
        assert a.reservation() is not None
        assert a.out(pr.RELEASE, kind) == sam.GOOD
        b.told()
        c.told()
    assert a.out(pr.CLEAR) == sam.GOOD
    assert stranger.run(RESERVE6).status == sam.GOOD


def test_third_parties_are_refused(server: DeviceServer) -> None:
    a, _ = two(server)
    answer = a.run(bytes((0x16, 0x10, 0, 0, 0, 0)))
    assert answer.code == INVALID_FIELD and answer.sense.field == 1


# -- SPEC_I_PT -------------------------------------------------------------------------------------

NAME_A, NAME_B, NAME_C = (f"iqn.2026-11.example:{letter}" for letter in "abc")
ISID = b"\x80abcde"


def registered(host: Host) -> dict[tuple[str, bytes, int], int]:
    """(name, ISID, port) → key of every registration."""
    _, found = pr.decode_full_status(host.data(pr.reserve_in(pr.READ_FULL_STATUS)))
    return {
        (each.initiator.name, each.initiator.isid, each.port): each.key
        for each in found
        if each.initiator is not None
    }


def test_other_initiators_are_registered(server: DeviceServer) -> None:
    a, b = two(server)
    others = (TransportId(NAME_B.upper(), ISID), TransportId(NAME_C, b"\x80\0\0\0\0\1"))
    assert a.send(pr.REGISTER, 0, OutParameters(0, A, pr.SPEC_I_PT, others)) == sam.GOOD
    assert registered(a) == {
        (NAME_A, ISID, 1): A,
        (NAME_B, ISID, 1): A,
        (NAME_C, b"\x80\0\0\0\0\1", 1): A,
    }
    assert a.keys()[0] == 1, "one change"
    b.key = A
    assert b.out(pr.RESERVE, WE_RO) == sam.GOOD


def test_a_name_without_isid_is_every_port_that_is_known(server: DeviceServer) -> None:
    """SPC-4, TransportID of iSCSI, format 00b."""
    a = Host(server, NAME_A)
    for isid in (b"\x80\0\0\0\0\1", b"\x80\0\0\0\0\2"):
        Client(server, name=NAME_B, isid=isid)
    names = (TransportId(NAME_B, b""),)
    assert a.send(pr.REGISTER, 0, OutParameters(0, A, pr.SPEC_I_PT, names)) == sam.GOOD
    assert {isid for name, isid, _ in registered(a) if name == NAME_B} == {
        b"\x80\0\0\0\0\1",
        b"\x80\0\0\0\0\2",
    }


@pytest.mark.parametrize("flags", [0, pr.ALL_TG_PT])
def test_initiators_that_cannot_be_specified(server: DeviceServer, flags: int) -> None:
    a, b = two(server)
    assert b.register(B) == sam.GOOD
    for others in (
        (TransportId(NAME_C, ISID), TransportId(NAME_B, ISID)),  # one is registered already
        (TransportId("iqn.2026-11.example:nobody", b""),),
    ):
        parameters = OutParameters(0, A, pr.SPEC_I_PT | flags, others)
        assert a.send(pr.REGISTER, 0, parameters) == sam.CHECK_CONDITION
        assert a.last.code == WRONG_PARAMETER and a.last.sense.field == 28
        assert registered(a) == {(NAME_B, ISID, 1): B}, "none is registered"
    parameters = OutParameters(B, A, pr.SPEC_I_PT | flags, (TransportId(NAME_C, ISID),))
    assert b.send(pr.REGISTER, 0, parameters) == sam.CHECK_CONDITION, "registered already"
    assert (b.last.code, b.last.sense.field) == (WRONG_PARAMETER, 20)


_UNUSABLE = [
    "x" * 224,
    "\u0430" * 112,
    "\u0130" * 110,
    "iqn.2026-11.example:\n",
    "\1" * 15900,
    "\x7f",
]


@pytest.mark.parametrize("name", _UNUSABLE, ids=ascii)
def test_names_that_no_session_could_have_are_not_registered(
    server: DeviceServer, name: str
) -> None:
    """They would be kept, and saved with APTPL, without end."""
    a, _ = two(server)
    for isid in (ISID, b""):
        for others in (
            (TransportId(name, isid),),
            (TransportId(NAME_C, ISID), TransportId(name, isid)),
        ):
            parameters = OutParameters(0, A, pr.SPEC_I_PT, others)
            assert a.send(pr.REGISTER, 0, parameters) == sam.CHECK_CONDITION
            assert (a.last.code, a.last.sense.field) == (WRONG_PARAMETER, 28)
    assert registered(a) == {}
    assert a.register(A) == sam.GOOD and a.out(pr.RESERVE, WE_RO) == sam.GOOD
    assert a.move(MoveParameters(A, B, 0, 1, TransportId(name, ISID))) == sam.CHECK_CONDITION
    assert (a.last.code, a.last.sense.field) == (WRONG_PARAMETER, 24)
    assert registered(a) == {(NAME_A, ISID, 1): A}


def test_names_that_are_no_text_are_not_registered(server: DeviceServer) -> None:
    a, _ = two(server)
    for name in (b"\xff\xfe".ljust(20, b"\0"), bytes(20)):
        identifier = b"\x05\0\0\x14" + name
        head = pr.encode_parameters(OutParameters(0, A, pr.SPEC_I_PT))[:24]
        data = head + len(identifier).to_bytes(4, "big") + identifier
        answer = a.run(pr.reserve_out(pr.REGISTER, 0, len(data)), data)
        assert (answer.code, answer.sense.field) == (WRONG_PARAMETER, 28)
    assert registered(a) == {}


def test_lists_whose_lengths_are_wrong(server: DeviceServer) -> None:
    a, _ = two(server)
    wrong = (sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)
    good = pr.encode_parameters(OutParameters(0, A, pr.SPEC_I_PT, (TransportId(NAME_B, ISID),)))
    plain = pr.encode_parameters(OutParameters(0, A))
    for data in (good[:-4], good + bytes(4), good[:24], plain + bytes(4)):
        assert a.code(pr.reserve_out(pr.REGISTER, 0, len(data)), data) == wrong
    assert a.code(pr.reserve_out(pr.REGISTER_AND_MOVE, 0, 24), bytes(24)) == wrong
    assert a.code(pr.reserve_out(pr.REGISTER, 0, 1 << 20)) == wrong
    assert registered(a) == {}


# -- REGISTER AND MOVE -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WE, EA, WE_RO, EA_RO])
@pytest.mark.parametrize("stays", [True, False])
def test_a_reservation_is_moved(server: DeviceServer, kind: int, stays: bool) -> None:
    a, b, _ = three(server)
    new = Host(server, "iqn.2026-11.example:new")
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    generation, _ = a.keys()
    flags = 0 if stays else pr.UNREG
    there = TransportId("iqn.2026-11.example:NEW", ISID)
    assert a.move(MoveParameters(A, 0xD, flags, 1, there)) == sam.GOOD
    assert b.reservation() == (0xD, kind, 0)
    assert b.keys() == (generation + 1, [*([A] if stays else []), B, C, 0xD])
    assert new.told() == b.told() == []
    new.key = 0xD
    assert new.out(pr.RELEASE, kind) == sam.GOOD


def test_a_move_to_an_initiator_that_is_registered(server: DeviceServer) -> None:
    a, b, _ = three(server)
    assert a.out(pr.RESERVE, WE) == sam.GOOD
    assert a.move(MoveParameters(A, 0xD, 0, 1, TransportId(NAME_B, ISID))) == sam.GOOD
    assert registered(a)[NAME_B, ISID, 1] == 0xD, "under the new key"
    assert a.out(pr.RELEASE, WE) == sam.GOOD and b.reservation() == (0xD, WE, 0)


def test_moves_that_are_refused(server: DeviceServer) -> None:
    a, b, _ = three(server)
    stranger = Host(server, "iqn.2026-11.example:d")
    there = TransportId(NAME_C, ISID)
    assert a.move(MoveParameters(A, 0xD, 0, 1, there)) == CONFLICT, "there is no reservation"
    assert a.out(pr.RESERVE, WE_RO) == sam.GOOD
    before = registered(a), a.reservation()
    assert b.move(MoveParameters(B, 0xD, 0, 1, there)) == CONFLICT, "not the holder"
    assert stranger.move(MoveParameters(0, 0xD, 0, 1, there)) == CONFLICT, "not registered"
    assert a.move(MoveParameters(B, 0xD, 0, 1, there)) == CONFLICT, "another key"
    for parameters, field in (
        (MoveParameters(A, 0, 0, 1, there), 8),
        (MoveParameters(A, 0xD, pr.APTPL, 1, there), 17),
        (MoveParameters(A, 0xD, 0, 2, there), 18),
        (MoveParameters(A, 0xD, 0, 1, TransportId(NAME_A, ISID)), 24),
        (MoveParameters(A, 0xD, 0, 1, TransportId(NAME_C, b"")), 24),
    ):
        assert a.move(parameters) == sam.CHECK_CONDITION
        assert (a.last.code, a.last.sense.field) == (WRONG_PARAMETER, field)
    assert (registered(a), a.reservation()) == before
    assert a.out(pr.RELEASE, WE_RO) == sam.GOOD
    assert a.out(pr.RESERVE, WE_AR) == sam.GOOD
    assert a.move(MoveParameters(A, 0xD, 0, 1, there)) == CONFLICT, "all registrants hold it"


# -- APTPL -----------------------------------------------------------------------------------------


def started(path: Path) -> DeviceServer:
    """A target that has just been started."""
    unit = LogicalUnit(FakeStore(1 << 20), serial="S", state=StateFile.beside(str(path)))
    return DeviceServer({0: unit}, IQN)


def state_of(host: Host) -> tuple[object, ...]:
    return registered(host), host.reservation()


@pytest.mark.parametrize("kind", pr.TYPES, ids=pr.type_words)
def test_reservations_survive_the_target(tmp_path: Path, kind: int) -> None:
    a, *_ = three(started(tmp_path / "lun"))
    assert a.register(A, pr.APTPL) == sam.GOOD
    assert a.out(pr.RESERVE, kind) == sam.GOOD
    kept = state_of(a)
    server = started(tmp_path / "lun")
    again, stranger = Host(server, NAME_A), Host(server, "iqn.2026-11.example:d")
    again.key = A
    assert state_of(again) == kept
    assert again.keys() == (0, [A, B, C]), "PRGENERATION counts from 0 again"
    found = pr.decode_capabilities(again.data(pr.reserve_in(pr.REPORT_CAPABILITIES)))
    assert found.persists and found.more & 0x01, "PTPL_C and PTPL_A"
    assert stranger.run(bytes((0x2A, *bytes(7), 1, 0))).status == CONFLICT
    assert again.out(pr.RELEASE, kind) == sam.GOOD
    assert state_of(Host(started(tmp_path / "lun"), NAME_A)) == (kept[0], None)


def test_each_change_is_kept(tmp_path: Path) -> None:
    """Also those of commands without APTPL: the last registration decides for all."""
    path = tmp_path / "lun"

    def kept() -> tuple[object, ...]:
        return state_of(Host(started(path), "iqn.2026-11.example:looks"))

    a, b, _ = three(started(path))
    assert kept() == ({}, None), "without APTPL nothing is kept"
    assert b.out(pr.REGISTER_AND_IGNORE, 0, B, pr.APTPL) == sam.GOOD
    assert kept() == state_of(a)
    assert a.out(pr.RESERVE, EA_RO) == sam.GOOD
    assert kept() == state_of(a)
    assert b.out(pr.PREEMPT, EA_RO, A) == sam.GOOD
    assert kept() == state_of(b) != ({}, None)
    there = TransportId(NAME_C, ISID)
    assert b.move(MoveParameters(B, C, pr.APTPL | pr.UNREG, 1, there)) == sam.GOOD
    assert kept() == ({(NAME_C, ISID, 1): C}, (C, EA_RO, 0))
    assert a.told() == [REGISTRATIONS_PREEMPTED]
    a.key = 0
    assert a.out(pr.REGISTER, 0, A, 0) == sam.GOOD, "the last one: nothing is kept any more"
    assert kept() == ({}, None)
    assert not list(tmp_path.glob("lun.*"))
    assert a.out(pr.REGISTER_AND_IGNORE, 0, A, pr.APTPL) == sam.GOOD
    a.key = A
    assert kept() == state_of(a)
    assert a.out(pr.CLEAR) == sam.GOOD
    assert kept() == ({}, None)


@pytest.mark.logs("the state of a LUN cannot be saved")
def test_what_cannot_be_saved_is_no_success(tmp_path: Path) -> None:
    place = tmp_path / "directory"
    place.mkdir()
    a, _ = two(started(place / "lun"))
    place.rename(tmp_path / "elsewhere")
    for _ in range(2):  # also when it is tried again, and nothing changes in memory
        assert a.out(pr.REGISTER_AND_IGNORE, 0, A, pr.APTPL) == sam.CHECK_CONDITION
        assert a.last.code == (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
    (tmp_path / "elsewhere").rename(place)
    assert a.out(pr.REGISTER_AND_IGNORE, 0, A, pr.APTPL) == sam.GOOD
    assert registered(Host(started(place / "lun"), NAME_B)) == {(NAME_A, ISID, 1): A}


@pytest.mark.logs("the state of a LUN cannot be saved: .* the next start would not read it")
def test_what_no_start_would_read_is_never_written(tmp_path: Path) -> None:
    a, _ = two(started(tmp_path / "lun"))
    assert a.register(A, pr.APTPL) == sam.GOOD
    odd = Host(a.server, "iqn.2026-11.example:" + "x" * 300)  # no login takes such a name
    assert odd.out(pr.REGISTER, 0, B, pr.APTPL) == sam.CHECK_CONDITION
    assert odd.last.code == (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
    assert registered(Host(started(tmp_path / "lun"), NAME_B)) == {(NAME_A, ISID, 1): A}


@pytest.mark.parametrize("name", [NAME_A[:20] + "\u0430" * 101, '"' * 223, "x" * 223])
def test_the_longest_state_can_be_read_again(tmp_path: Path, name: str) -> None:
    """As many registrations as there may be, with names that take most bytes as JSON."""
    assert len(name.encode()) > 220
    server = started(tmp_path / "lun")
    hosts = [Client(server, name=name, isid=b"\x80" + bytes((0, 0, 0, 0, i))) for i in range(256)]
    data = pr.encode_parameters(OutParameters(0, 2**64 - 1, pr.APTPL))
    for each in hosts:
        assert each.run(pr.reserve_out(pr.REGISTER_AND_IGNORE, 0, len(data)), data).status == 0
    keys = hosts[0].data(pr.reserve_in(pr.READ_KEYS))
    again = Client(started(tmp_path / "lun"))
    assert pr.decode_keys(again.data(pr.reserve_in(pr.READ_KEYS)))[1] == pr.decode_keys(keys)[1]


_ENTRY = {"initiator": NAME_A, "isid": ISID.hex(), "port": 1, "key": "0xa"}


def saved(**changed: object) -> bytes:
    """A state file with a registration of a, and something else in it."""
    entry = _ENTRY | {key: value for key, value in changed.items() if key in _ENTRY}
    whole: dict[str, object] = {"version": 1, "type": 0, "holder": None, "registrations": [entry]}
    whole |= {key: value for key, value in changed.items() if key not in _ENTRY}
    return json.dumps(whole).encode()


def test_a_state_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "lun.reservations").write_bytes(saved(initiator=NAME_A.upper()))
    assert registered(Host(started(tmp_path / "lun"), NAME_B)) == {(NAME_A, ISID, 1): A}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff",
        b'{"version": 2}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        saved() + b" " * (1 << 20),
        saved()[:-20],
        saved(version=2),
        saved(version=True),
        saved(type=1),
        saved(type=1, holder=3),
        saved(type=1, holder=-1),
        saved(type=1, holder=False),
        saved(type=1, holder="0"),
        saved(type=7, holder=0),
        saved(type=2, holder=0),
        saved(type=2),
        saved(type=9),
        saved(type=-7),
        saved(type=float("inf")),
        saved(type=float("nan")),
        saved(type=0.0),
        saved(type="0"),
        saved(registrations=[]),
        saved(registrations={}),
        saved(registrations=None),
        saved(registrations=[5]),
        saved(registrations=[{"initiator": 5}]),
        saved(registrations=[_ENTRY, _ENTRY]),
        saved(registrations=[_ENTRY | {"port": each} for each in range(257)]),
        saved(key="0x1ffffffffffffffff"),
        saved(key="-0x5"),
        saved(key="0x0"),
        saved(key="0x1_0"),
        saved(key=10),
        saved(port=70000),
        saved(port=-3),
        saved(port=1.0),
        saved(port="1"),
        saved(isid="8061"),
        saved(isid="80 61 62 63 64 65"),
        saved(isid=None),
        saved(initiator=""),
        saved(initiator="\ud800"),
        saved(initiator="iqn.2026-11.example:\n"),
        saved(initiator="x" * 224),
        saved(initiator="\u0430" * 112),
        saved(initiator=5),
    ],
    ids=lambda content: content[:60].decode(errors="replace") + str(len(content)),
)
def test_a_damaged_state_file_costs_the_reservations_of_its_lun(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so; the LUN is served, and the next change takes the place of what was there."""
    path = tmp_path / "lun.reservations"
    path.write_bytes(content)
    server = started(tmp_path / "lun")
    assert "lun.reservations: these are no reservations" in caplog.text
    assert "lost" in caplog.text and len(caplog.text) < 600
    a = Host(server, NAME_A)
    assert state_of(a) == ({}, None) and a.keys() == (0, [])
    assert path.read_bytes() == content, "for a look at it"
    assert a.register(A, pr.APTPL) == sam.GOOD
    caplog.clear()
    assert registered(Host(started(tmp_path / "lun"), NAME_B)) == {(NAME_A, ISID, 1): A}
    assert not caplog.text


@pytest.mark.logs("these are no reservations")
def test_a_damaged_state_file_goes_with_a_change_that_is_not_kept(tmp_path: Path) -> None:
    for content in (b"{", bytes(2 << 20)):
        (tmp_path / "lun.reservations").write_bytes(content)
        assert Host(started(tmp_path / "lun"), NAME_A).register(A) == sam.GOOD
        assert not list(tmp_path.iterdir())
