"""What a LUN answers (to us), and what an initiator asks of a LUN (of ours)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from iserblk.disk.lun.geometry import Geometry
from iserblk.errors import ScsiError
from iserblk.gateway.statuses import status_error
from iserblk.scsi import (
    alua,
    capacity,
    cdb,
    inquiry,
    lba,
    log,
    luns,
    mode,
    reservations,
    sense,
    third_party,
)
from iserblk.scsi.status import CHECK_CONDITION, GOOD, RESERVATION_CONFLICT
from iserblk.target.ports import AccessStates, TargetPorts
from iserblk.target.scsi.commands import COMMANDS
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.reservations import Reservations
from iserblk.target.seam import DATA_OUT, NO_DATA, Nexus
from tests.fuzz.engine import Case, Row, decoder
from tests.target.fake_store import FakeStore

_DESIGNATORS = inquiry.encode_identifiers(
    [
        inquiry.Designator(0, 3, 1, bytes.fromhex("3000000012345678")),
        inquiry.Designator(0, 8, 3, inquiry.name_string("iqn.2026-11.example:disk")),
        inquiry.Designator(1, 4, 1, bytes((0, 0, 0, 1))),
    ]
)
_LIMITS = inquiry.encode_block_limits(inquiry.BlockLimits(*range(len(inquiry.BlockLimits._fields))))
_PROVISIONING = inquiry.encode_provisioning(
    inquiry.Provisioning(*[True] * len(inquiry.Provisioning._fields))
)
_STATUS = lba.encode_lba_status([(0, 8, 0), (8, 8, 1), (16, 1 << 20, 2)])
_SELECT6 = mode.encode_sense6(0, mode.short_descriptor(2048, 512), mode.caching_page(False))
_SELECT10 = mode.encode_sense10(0, mode.long_descriptor(2048, 512), mode.provisioning_page(0))
_PAGES = mode.caching_page(True) + mode.control_page()
_CAPACITY = capacity.Capacity(1 << 20, 512, 4096)
_GEOMETRY = Geometry(block=512, long_cdbs=True)


def _sense(data: bytes) -> None:
    found = sense.decode(data)
    assert str(found) and found.is_ready_soon in (True, False)


def _extents(case: Case) -> None:
    data = case.data
    offset, length = case.chance.randrange(64) * 512, case.chance.randrange(1, 64) * 512
    extents = _GEOMETRY.extents_untrusted(memoryview(data), offset, length, 1 << 20)
    position = offset
    for start, size, _ in extents:
        assert start == position and size > 0
        position += size
    assert position <= offset + length


_CDBS = tuple(
    bytes(byte & mask for byte, mask in zip(range(1, 17), each.usage[1:], strict=False))
    for each in COMMANDS.values()
)
_SAMPLE_CDBS = tuple(
    bytes((each.usage[0],)) + (rest if each.action is None else each.usage[1:2] + rest[1:])
    for each, rest in zip(COMMANDS.values(), _CDBS, strict=True)
)
_UNITS = {
    0: LogicalUnit(FakeStore(32 * 512), serial="A"),
    1: LogicalUnit(FakeStore(32 * 4096), serial="B", block=4096, read_only=True),
}
_SERVER = DeviceServer(_UNITS, "iqn.2026-11.example:disk")
_NEXUS = Nexus("iqn.2026-11.example:host", b"\x80abcde")
_MOST_DATA = 1 << 16


def _command(case: Case) -> None:
    """A CDB, and a parameter list for it if it wants one."""
    task = _SERVER.begin(_NEXUS, case.chance.choice((0, 0, 0, 1, 7)), case.data)
    assert (task.length > 0) == (task.direction != NO_DATA) and task.length <= 16 << 20
    if not task.status and task.length <= _MOST_DATA:
        buffer = memoryview(bytearray(task.length))
        if task.direction & DATA_OUT:
            data = case.chance.randbytes(min(64, task.length))
            buffer[: len(data)] = data
        assert _SERVER.run(task, buffer if task.length else None, False)
    # (RESERVE(6) and persistent reservations exclude each other.)
    assert task.status in (GOOD, CHECK_CONDITION, RESERVATION_CONFLICT)


def _unmap(case: Case) -> None:
    data = case.data
    task = _SERVER.begin(_NEXUS, 0, cdb.unmap(len(data) & 0xFFFF))
    if not task.status:
        assert _SERVER.run(task, memoryview(bytearray(data[: task.length].ljust(task.length))))


_PORT_GROUPS = alua.encode_report(
    [alua.PortGroup(1, 0, True, 0x0F, 1, (1, 2)), alua.PortGroup(2, alua.STANDBY, ports=(3,))]
)
_PORT_PAGE = inquiry.encode_identifiers(list(alua.port_designators(1, 2)))
_HOST = reservations.TransportId("iqn.2026-11.example:host", bytes(range(6)))
_REGISTRATION = reservations.FullStatus(7, True, 6, False, 1, _HOST)
_COPY = third_party.encode_copy_list(
    third_party.CopyList(
        1,
        [third_party.Cscd(third_party.IDENTIFICATION, designator=bytes(8))],
        [third_party.Segment(third_party.BLOCK_TO_BLOCK, 0, 0, 0, 8, 0, 64)],
    )
)
_SPECIFIED = reservations.encode_parameters(
    reservations.OutParameters(0, 8, reservations.SPEC_I_PT, (_HOST, _HOST))
)
_MOVED = reservations.encode_move_parameters(reservations.MoveParameters(7, 8, 3, 1, _HOST))
_SAVED = [
    json.dumps(
        {
            "version": 1,
            "type": kind,
            "holder": holder,
            "registrations": [
                {"initiator": _HOST.name, "isid": f"80000000000{port}", "port": port, "key": "0x8"}
                for port in range(count)
            ],
        }
    ).encode()
    for kind, holder, count in ((0, None, 1), (3, 1, 2), (7, None, 3))
]
_OUT = reservations.OutParameters(7, 8, reservations.APTPL)


def _luns(data: bytes) -> None:
    assert 8 <= luns.length_of_report(data) <= 8 + 0xFFFFFFFF
    assert len(luns.decode_report_luns(data)) <= len(data) // 8


def _port_groups(data: bytes) -> None:
    groups = alua.decode_report(data)
    assert alua.length_of_report(data) >= 4
    alua.state_here(groups, alua.PortIdentity(1, None))


_UNMAP = lba.unmap_parameters([(0, 8), (8, 8), (31, 1)])

# -- parameter lists, as the target carries them out -----------------------------------------------

_BLOCKS = 64


class _Place:
    """Two LUNs behind two portal groups, and a host at each. The first may have registered with key
    8 at LUN 0."""

    def __init__(self, registered: bool) -> None:
        ports = TargetPorts((1, 2))
        states = {1: alua.ACTIVE_OPTIMIZED, 2: alua.ACTIVE_NON_OPTIMIZED}
        ports.configure(AccessStates(states, frozenset(states)))
        self.hosts = [
            Nexus(f"iqn.2026-11.example:host{tag}", b"\x80abcde", port=port)
            for tag, port in ports.by_tag.items()
        ]
        self.stores = [FakeStore(_BLOCKS * 512) for _ in range(2)]
        self.server = DeviceServer(
            {lun: LogicalUnit(store, serial=f"L{lun}") for lun, store in enumerate(self.stores)},
            "iqn.2026-11.example:disk",
            ports,
        )
        if registered:
            assert not self.say(0, *_REGISTER)

    def say(self, host: int, make: Callable[[int], bytes], data: bytes) -> int:
        """The status. The lengths in the CDB are right: so the list itself is looked at."""
        most = 0xFF if make is cdb.mode_select6 else 0xFFFF
        task = self.server.begin(self.hosts[host], 0, make(len(data) & most))
        if not task.status and task.length:
            buffer = memoryview(bytearray(data[: task.length].ljust(task.length, b"\0")))
            assert self.server.run(task, buffer, False)
        return task.status


def _cscd(lun: int) -> third_party.Cscd:
    names = LogicalUnit(FakeStore(512), serial=f"L{lun}").names
    name = next(each for each in names if each[1] == inquiry.TYPE_NAA)
    return third_party.Cscd(third_party.IDENTIFICATION, *name, 512)


def _copy_list(*segments: third_party.Segment) -> bytes:
    return third_party.encode_copy_list(
        third_party.CopyList(7, [_cscd(0), _cscd(1)], list(segments))
    )


_REGISTER = (
    partial(reservations.reserve_out, reservations.REGISTER, 0),
    reservations.encode_parameters(reservations.OutParameters(0, 8)),
)
_LISTS: tuple[tuple[Callable[[int], bytes], bytes], ...] = (
    _REGISTER,
    (third_party.extended_copy, _copy_list(third_party.Segment(2, 0, 1, 0, 8, 0, 16))),
    (
        third_party.extended_copy,
        _copy_list(third_party.Segment(2, 2, 0, 0, 8, 4, 0), third_party.Segment(2, 0, 1, 0)),
    ),
    (alua.set_target_port_groups, alua.encode_set({1: alua.ACTIVE_OPTIMIZED, 2: alua.STANDBY})),
    (cdb.unmap, _UNMAP),
    (cdb.mode_select6, mode.encode_sense6(0, mode.short_descriptor(_BLOCKS, 512), _PAGES)),
    (cdb.mode_select10, mode.encode_sense10(0, mode.long_descriptor(_BLOCKS, 512), _PAGES)),
    (partial(reservations.reserve_out, reservations.REGISTER_AND_IGNORE, 0), _SPECIFIED),
    *(
        (
            partial(reservations.reserve_out, action, reservations.WRITE_EXCLUSIVE),
            reservations.encode_parameters(reservations.OutParameters(8, 8)),
        )
        for action in (
            reservations.RESERVE,
            reservations.RELEASE,
            reservations.PREEMPT,
            reservations.PREEMPT_AND_ABORT,
            reservations.CLEAR,
        )
    ),
    (partial(reservations.reserve_out, reservations.REGISTER_AND_MOVE, 0), _MOVED),
)


def _parameter_lists(case: Case) -> None:
    """Of one host and the other. The LUNs keep their sizes."""
    chance = case.chance
    place = _Place(chance.random() < 0.7)
    for _ in range(3):
        make, sample = chance.choice(_LISTS)
        status = place.say(int(chance.random() * 2), make, case.mutated(sample))
        assert status in (GOOD, CHECK_CONDITION, RESERVATION_CONFLICT)
    assert all(len(store.content) == _BLOCKS * 512 for store in place.stores)


def _restored(data: bytes) -> None:
    """What is taken over from a state file can be told, and be saved as it was."""
    found = Reservations()
    found.restore(data)
    for action in range(4):
        found.answer(action)
    again = Reservations()
    again.restore(found.snapshot() or b"")
    assert again.snapshot() == found.snapshot()


def _gateway(data: bytes) -> None:
    """What a remote target answers, as ours tells it."""
    found = sense.decode(data)
    told = status_error(ScsiError("no", CHECK_CONDITION, found))
    if told.status == CHECK_CONDITION:
        assert sense.decode(told.sense).key == found.key


ROWS = (
    decoder("luns", _luns, luns.encode_report_luns([0, 1, 255, 256, 16383])),
    decoder("lun", luns.decode, *(luns.encode(each) for each in (0, 255, 256, 16383)), allowed=()),
    decoder("capacity10", capacity.decode10, capacity.encode10(1 << 20, 512)),
    decoder("capacity16", capacity.decode16, capacity.encode16(_CAPACITY)),
    decoder("inquiry", inquiry.decode_standard, inquiry.encode_standard(0, "V", "P", "R")),
    decoder(
        "vpd 00", inquiry.decode_supported_pages, inquiry.encode_supported_pages([0, 0x80, 0xB0])
    ),
    decoder("vpd 80", inquiry.decode_serial, inquiry.encode_serial("SERIAL")),
    decoder("vpd 83", lambda data: list(inquiry.decode_designators(data)), _DESIGNATORS),
    decoder("vpd 83 names", inquiry.decode_identifiers, _DESIGNATORS),
    decoder("vpd b0", inquiry.decode_block_limits, _LIMITS),
    decoder("vpd b1", inquiry.decode_characteristics, inquiry.encode_characteristics()),
    decoder("vpd b2", inquiry.decode_provisioning, _PROVISIONING),
    decoder("lba status", lambda data: list(lba.decode_lba_status(data)), _STATUS),
    decoder("unmap list", lba.decode_unmap_parameters, _UNMAP),
    decoder("mode 6", mode.decode_sense6, mode.encode_sense6(0x90, bytes(8), _PAGES)),
    decoder(
        "log page",
        lambda data: list(log.decode_parameters(data)),
        log.encode_provisioning([(1, 5, 2), (2, 6, 1)]),
    ),
    decoder("mode select 6", lambda data: mode.decode_select(data, False), _SELECT6),
    decoder("mode select 10", lambda data: mode.decode_select(data, True), _SELECT10),
    decoder(
        "sense",
        _sense,
        sense.encode_fixed(sense.ILLEGAL_REQUEST, 0x24, 0, field=3, bit=1),
        sense.encode_descriptor(sense.MEDIUM_ERROR, 0x11, 0, 1 << 33),
        allowed=(),
    ),
    decoder("port groups", _port_groups, _PORT_GROUPS),
    decoder("set port groups", alua.decode_set, alua.encode_set({1: 0, 2: alua.STANDBY})),
    decoder("port identity", alua.decode_port_identity, _PORT_PAGE, _DESIGNATORS),
    decoder("PR OUT", reservations.decode_parameters, reservations.encode_parameters(_OUT)),
    decoder(
        "copy status",
        third_party.decode_copy_status,
        third_party.encode_copy_status(third_party.CopyStatus(1, 2, 1 << 20)),
    ),
    decoder("copy list", third_party.decode_copy_list, _COPY),
    decoder("PR state file", _restored, *_SAVED, allowed=(ValueError,)),
    decoder("PR SPEC_I_PT", reservations.decode_parameters, _SPECIFIED),
    decoder("PR move", reservations.decode_move_parameters, _MOVED),
    decoder("PR keys", reservations.decode_keys, reservations.encode_keys(3, [1, 2, 3])),
    decoder(
        "PR reservation",
        reservations.decode_reservation,
        reservations.encode_reservation(3, reservations.Reservation(7, 6)),
    ),
    decoder(
        "PR capabilities",
        reservations.decode_capabilities,
        reservations.encode_capabilities(reservations.APTPL),
    ),
    decoder(
        "PR full status",
        reservations.decode_full_status,
        reservations.encode_full_status(3, [_REGISTRATION, _REGISTRATION]),
    ),
    decoder(
        "TransportID",
        reservations.decode_transport_id,
        reservations.encode_transport_id(_HOST),
    ),
    Row("extents", _extents, (_STATUS,)),
    Row("command", _command, _SAMPLE_CDBS, ()),
    Row("unmap", _unmap, (_UNMAP,), ()),
    Row("parameter lists", _parameter_lists, tuple(sample for _, sample in _LISTS), (), 3),
    decoder(
        "sense through a gateway",
        _gateway,
        sense.encode_fixed(sense.MEDIUM_ERROR, 0x11, 0, 77),
        sense.encode_descriptor(sense.MEDIUM_ERROR, 0x11, 0, 1 << 33),
        allowed=(),
    ),
)
