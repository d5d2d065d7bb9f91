"""Portal groups of the target, and their ALUA states."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import alua, cdb, inquiry, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi import status as sam
from iserblk.target.ports import (
    ON_TCP,
    ONLY_PORT,
    STATES,
    AccessStates,
    Listen,
    TargetPorts,
    parse_listen,
    parse_states,
    read_states,
    transports_of,
)
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, INVALID_FIELD, IQN, Client

REPORT = alua.report_target_port_groups(1024)
READ = bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0))


def server(*tags: int) -> DeviceServer:
    unit = LogicalUnit(FakeStore(1 << 20), serial="S", block=512)
    return DeviceServer({0: unit}, IQN, TargetPorts(tags))


def clients(device: DeviceServer) -> list[Client]:
    return [Client(device, port=port) for port in device.ports.by_tag.values()]


def test_one_port_has_no_alua() -> None:
    """A target with one port reports no ALUA, but answers REPORT TARGET PORT GROUPS."""
    client = Client(DeviceServer({0: LogicalUnit(FakeStore(1 << 20), serial="S")}, IQN))
    assert inquiry.decode_standard(client.data(cdb.inquiry(96))).tpgs == alua.TPGS_NONE
    (group,) = alua.decode_report(client.data(REPORT))
    assert (group.group, group.state, group.ports) == (1, alua.ACTIVE_OPTIMIZED, (1,))


def test_every_port_knows_its_group() -> None:
    device = server(7, 3)
    for client, tag, relative in zip(clients(device), (7, 3), (1, 2), strict=True):
        assert inquiry.decode_standard(client.data(cdb.inquiry(96))).tpgs == alua.TPGS_IMPLICIT
        page = client.data(cdb.inquiry(255, inquiry.DEVICE_IDENTIFICATION))
        identity = alua.decode_port_identity(page)
        assert identity == (relative, tag)
        groups = alua.decode_report(client.data(REPORT))
        assert [each.group for each in groups] == [7, 3]
        here = alua.state_here(groups, identity)  # type: ignore[arg-type]
        assert here is not None and here.group == tag


def test_the_lun_is_the_same_through_all_ports() -> None:
    one, two = clients(server(1, 2))
    pages = [each.data(cdb.inquiry(255, inquiry.DEVICE_IDENTIFICATION)) for each in (one, two)]
    assert pages[0] != pages[1]
    assert inquiry.decode_identifiers(pages[0]) == inquiry.decode_identifiers(pages[1])


@pytest.mark.parametrize(
    ("word", "code"),
    [("standby", 0x040B), ("unavailable", 0x040C), ("offline", 0x0412), ("transitioning", 0x040A)],
)
def test_a_port_that_carries_out_nothing(word: str, code: int) -> None:
    """Every nexus gets a unit attention first. Then the other port goes on; this port answers only
    the commands that tell an initiator why."""
    device = server(1, 2)
    one, two = clients(device)
    device.set_access_states(AccessStates({1: STATES[word]}))
    for each in (one, two):
        assert each.code(READ) == (sense.UNIT_ATTENTION, alua.STATE_CHANGED)
    assert two.code(READ) == GOOD
    for refused in (READ, bytes(6), cdb.read_capacity16(32)):
        answer = one.run(refused)
        assert answer.code == (sense.NOT_READY, code)
        assert alua.state_of_sense(answer.sense) == STATES[word]
    for answered in (cdb.inquiry(96), cdb.report_luns(64), cdb.mode_sense6(8, 192)):
        assert one.code(answered) == GOOD
    assert [each.state for each in alua.decode_report(one.data(REPORT))] == [STATES[word], 0]
    device.set_access_states(AccessStates({1: alua.ACTIVE_NON_OPTIMIZED}))
    assert one.code(READ) == (sense.UNIT_ATTENTION, alua.STATE_CHANGED)
    assert one.code(READ) == GOOD


def test_no_change_is_not_told() -> None:
    device = server(1, 2)
    one, _ = clients(device)
    device.set_access_states(AccessStates({1: alua.ACTIVE_OPTIMIZED}))
    assert one.code(READ) == GOOD


# -- SET TARGET PORT GROUPS ------------------------------------------------------------------------

UNKNOWN = (sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE)
IN_LIST = (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST)
LIST_LENGTH = (sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)
CHANGED = (sense.UNIT_ATTENTION, alua.STATE_CHANGED)
IN_STANDBY = (sense.NOT_READY, alua.IN_STANDBY)
STANDBY = AccessStates({1: 0, 2: alua.STANDBY}, frozenset((1, 2)))


def explicit(given: AccessStates, luns: int = 1) -> tuple[Client, Client]:
    """A nexus through each of two groups, to LUN 0."""
    units = {
        each: LogicalUnit(FakeStore(1 << 20), serial=f"S{each}", block=512) for each in range(luns)
    }
    device = DeviceServer(units, IQN, TargetPorts((1, 2)))
    device.set_access_states(given)
    one, two = clients(device)
    return one, two


def ask_for(client: Client, states: dict[int, int]) -> tuple[int, int]:
    data = alua.encode_set(states)
    return client.code(alua.set_target_port_groups(len(data)), data)


def states_of(client: Client) -> list[tuple[int, int]]:
    return [(each.state, each.status) for each in alua.decode_report(client.data(REPORT))]


def ready(port: int, given: AccessStates) -> tuple[Client, Client]:
    one, two = explicit(given)
    return (one, two) if port == 1 else (two, one)


def test_states_are_set_by_command() -> None:
    """Also through a port in standby, which does what it was set to at once; the other nexus is
    told, and the one that asked is not."""
    two, one = ready(2, STANDBY)
    assert two.code(READ) == IN_STANDBY
    assert ask_for(two, {1: alua.STANDBY, 2: alua.ACTIVE_OPTIMIZED}) == GOOD
    assert two.code(READ) == GOOD
    assert one.code(READ) == CHANGED
    assert one.code(READ) == IN_STANDBY
    assert states_of(one) == [(alua.STANDBY, 1), (alua.ACTIVE_OPTIMIZED, 1)]
    assert ask_for(two, {2: alua.ACTIVE_OPTIMIZED}) == GOOD  # which changes nothing
    assert one.code(READ) == IN_STANDBY


def test_other_luns_are_told_as_well() -> None:
    """The states are those of all LUNs: also the nexus that asked hears of the other LUNs."""
    one, two = explicit(STANDBY, luns=2)
    others = [Client(one.server, 1, port=each.nexus.port, isid=b"\x80fghij") for each in (one, two)]
    one.lun = 1
    assert one.code(bytes(6)) == (sense.UNIT_ATTENTION, sense.POWER_ON_OR_RESET)
    one.lun = 0
    assert ask_for(one, {1: 1}) == GOOD
    assert one.code(READ) == GOOD
    one.lun = 1
    assert one.code(READ) == CHANGED
    assert [each.code(READ) for each in others] == [CHANGED, CHANGED]


@pytest.mark.parametrize(
    ("given", "tpgs"),
    [
        (AccessStates({2: alua.STANDBY}), alua.TPGS_IMPLICIT),
        (AccessStates({2: alua.STANDBY}, frozenset((2,))), alua.TPGS_BOTH),
        (AccessStates({2: alua.STANDBY}, frozenset((2,)), True), alua.TPGS_EXPLICIT),
    ],
)
def test_initiators_are_told_whether_they_may(given: AccessStates, tpgs: int) -> None:
    """In INQUIRY data and among the supported commands; where they may not, the command is
    unknown."""
    one, _ = explicit(given)
    assert inquiry.decode_standard(one.data(cdb.inquiry(96))).tpgs == tpgs
    may = bool(tpgs & alua.TPGS_EXPLICIT)
    (_, support) = one.data(bytes((0xA3, 0x0C, 2, 0xA4, 0, 0x0A, 0, 0, 0, 64, 0, 0)))[:2]
    assert support & 7 == (3 if may else 1)
    listed = one.data(bytes((0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0)))[4:]
    assert (0xA4 in listed[::8]) == may
    assert ask_for(one, {2: 0}) == (GOOD if may else UNKNOWN)


def test_a_change_of_what_they_may_is_told() -> None:
    one, two = explicit(AccessStates({2: alua.STANDBY}))
    one.server.set_access_states(AccessStates({2: alua.STANDBY}, frozenset((2,))))
    for each in (one, two):
        assert each.code(bytes(6)) == (sense.UNIT_ATTENTION, sense.INQUIRY_DATA_CHANGED)
    assert ask_for(one, {2: 0}) == GOOD


def hidden() -> tuple[Client, Client]:
    """A nexus with access to both LUNs, and a stranger at LUN 0 that has no access to LUN 1; their
    unit attentions are told. Both groups are settable."""
    all_of_them, _ = explicit(STANDBY, luns=2)
    server = all_of_them.server
    stranger = Client(server, name="iqn.2026-11.example:stranger", port=all_of_them.nexus.port)
    server.set_access(lambda name, lun: lun == 0 or name != stranger.nexus.name.initiator.name)
    return all_of_them, stranger


def test_states_of_luns_that_are_hidden_are_not_set() -> None:
    """States are those of all LUNs: as of a cold reset, nothing of it reaches other initiators."""
    other, stranger = hidden()
    before = states_of(other)
    for told in (sense.INQUIRY_DATA_CHANGED, sense.REPORTED_LUNS_CHANGED):
        assert stranger.code(READ) == (sense.UNIT_ATTENTION, told)
    assert ask_for(stranger, {1: alua.UNAVAILABLE, 2: alua.UNAVAILABLE}) == UNKNOWN
    assert states_of(other) == before and other.code(READ) == GOOD
    assert stranger.code(READ) == GOOD and ask_for(stranger, {}) == UNKNOWN
    assert inquiry.decode_standard(stranger.data(cdb.inquiry(96))).tpgs == alua.TPGS_IMPLICIT
    assert inquiry.decode_standard(other.data(cdb.inquiry(96))).tpgs == alua.TPGS_BOTH
    listed = stranger.data(bytes((0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0)))[4:]
    assert 0xA4 not in listed[::8]
    assert ask_for(other, {2: 0}) == GOOD, "which sees all LUNs"


def test_access_that_is_taken_away_behind_the_command() -> None:
    """Its parameter list came later."""
    one, _ = explicit(STANDBY, luns=2)
    before = states_of(one)
    data = alua.encode_set({1: alua.UNAVAILABLE})
    task = one.server.begin(one.nexus, 0, alua.set_target_port_groups(len(data)))
    assert not task.status and task.length == len(data)
    one.server.set_access(lambda _name, lun: lun == 0)
    assert one.server.run(task, memoryview(bytearray(data)), True)
    assert sense.decode(task.sense).key == sense.ILLEGAL_REQUEST
    one.server.set_access(None)
    for told in (sense.INQUIRY_DATA_CHANGED, sense.REPORTED_LUNS_CHANGED):
        assert one.code(bytes(6)) == (sense.UNIT_ATTENTION, told)
    assert states_of(one) == before


def test_what_a_change_of_access_does_to_it_is_told() -> None:
    other, stranger = hidden()
    server = stranger.server
    while stranger.code(READ) != GOOD:
        pass
    server.set_access(None)
    for told in (sense.INQUIRY_DATA_CHANGED, sense.REPORTED_LUNS_CHANGED):
        assert stranger.code(READ) == (sense.UNIT_ATTENTION, told)
    assert other.code(READ) == GOOD, "nothing has changed for it"
    assert ask_for(stranger, {1: 0}) == GOOD
    server.set_access(lambda _name, lun: lun == 0)
    assert server.remove_luns([1], lambda: None) == 0
    while stranger.code(READ) != GOOD:
        pass
    assert ask_for(stranger, {1: 0}) == GOOD, "no LUN is hidden any more"


def test_what_cannot_be_set(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing has changed then, also where another group of the list might."""
    one, two = explicit(AccessStates({1: 0, 2: alua.STANDBY}, frozenset((2,))))
    before = states_of(one)

    def refused(data: bytes, length: int | None = None) -> tuple[int, int]:
        return one.code(alua.set_target_port_groups(length or len(data)), data)

    for states, at in (
        ({2: 0, 1: alua.STANDBY}, 10),  # the second group is fixed
        ({2: 0, 9: 0}, 10),
        ({2: alua.TRANSITIONING}, 4),
        ({2: 0, 1: alua.LBA_DEPENDENT}, 8),
        ({2: 7}, 4),
    ):
        data = alua.encode_set(states)
        answer = one.run(alua.set_target_port_groups(len(data)), data)
        assert (answer.code, answer.sense.field) == (IN_LIST, at)
    assert refused(alua.encode_set({2: 0}) + alua.encode_set({2: 1})[4:]) == IN_LIST  # twice
    assert "access state of portal group 1 is not settable" in caplog.text
    for length in (1, 3, 5, 7, 10):
        assert refused(bytes(length)) == LIST_LENGTH
    assert one.code(alua.set_target_port_groups(1 << 20)) == LIST_LENGTH
    assert one.code(alua.set_target_port_groups(0)) == GOOD
    assert refused(bytes(4)) == GOOD
    assert states_of(one) == before
    assert two.code(READ) == IN_STANDBY
    # A fixed group may be named with the state that it has, as hosts do that name all groups.
    assert ask_for(one, {1: 0, 2: 1}) == GOOD


def test_what_was_set_stays_until_the_file_says_something_else() -> None:
    one, two = explicit(STANDBY)
    assert ask_for(one, {2: 0}) == GOOD
    assert two.code(READ) == CHANGED
    one.server.set_access_states(STANDBY)  # read again, and nothing new
    assert two.code(READ) == GOOD
    one.server.set_access_states(AccessStates({1: 0, 2: alua.UNAVAILABLE}, STANDBY.settable))
    assert two.code(READ) == CHANGED
    assert two.code(READ) == (sense.NOT_READY, alua.IS_UNAVAILABLE)
    assert ask_for(two, {2: 0}) == GOOD
    # What is no longer settable is as the file says.
    one.server.set_access_states(AccessStates({1: 0, 2: alua.UNAVAILABLE}))
    for told in (alua.STATE_CHANGED, sense.INQUIRY_DATA_CHANGED):
        assert one.code(bytes(6)) == (sense.UNIT_ATTENTION, told)
    assert states_of(one) == [(0, 0), (alua.UNAVAILABLE, 2)]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_reservation_of_another_forbids_it(persistent: bool) -> None:
    one, two = explicit(STANDBY)
    if persistent:
        for action, parameters in (
            (pr.REGISTER, pr.OutParameters(0, 7)),
            (pr.RESERVE, pr.OutParameters(7, 0)),
        ):
            data = pr.encode_parameters(parameters)
            assert one.code(pr.reserve_out(action, pr.TYPES[0], len(data)), data) == GOOD
    else:
        assert one.code(bytes((0x16, 0, 0, 0, 0, 0))) == GOOD
    data = alua.encode_set({2: 0})
    answer = two.server.begin(two.nexus, 0, alua.set_target_port_groups(len(data)))
    assert answer.status == sam.RESERVATION_CONFLICT
    assert ask_for(one, {2: 0}) == GOOD


def test_the_extended_format_is_refused() -> None:
    """Initiators then ask again for the format that every target has."""
    one, _ = clients(server(1, 2))
    assert one.code(bytes((0xA3, 0x2A, *REPORT[2:]))) == INVALID_FIELD


def test_addresses() -> None:
    """All portals of all groups, each once; the portal of the connection comes first."""
    ports = TargetPorts([1, 2, 1])
    assert list(ports.by_tag) == [1, 2]
    ports.by_tag[1].addresses += ["10.0.0.1:3260", "10.0.0.2:3260"]
    ports.by_tag[2].addresses += ["[::1]:3260"]
    assert ports.target_addresses("10.0.0.2:3260", ports.by_tag[1]) == [
        "10.0.0.2:3260,1",
        "10.0.0.1:3260,1",
        "[::1]:3260,2",
    ]
    assert ONLY_PORT.ports.target_addresses("10.0.0.9:1", ONLY_PORT) == ["10.0.0.9:1,1"]


def test_where_to_listen() -> None:
    assert parse_listen("127.0.0.1:0") == Listen("127.0.0.1:0")
    assert parse_listen("[::1]:3260,65535") == Listen("[::1]:3260", 65535)
    assert parse_listen("h:1,group=4,transport=tcp") == Listen("h:1", 4, frozenset(("tcp",)))
    assert parse_listen("h:1,2,transport=tcp+iwarp") == Listen("h:1", 2, ON_TCP)
    for wrong, words in (
        *((each, "a portal group is a number") for each in ("h:1,", "h:1,x", "h:1,65536")),
        ("h:1,99999999999", "a portal group is a number"),
        ("h:1,1,2", "group is given twice"),
        ("h:1,1,group=1", "group is given twice"),
        ("h:1,colour=red", "'colour' is neither group nor transport"),
        ("h:1,transport=", "the transports are iwarp, tcp, verbs"),
        ("h:1,transport=tcp+", "the transports are iwarp, tcp, verbs"),
        ("h:1,transport=tcp,transport=tcp", "transport is given twice"),
    ):
        with pytest.raises(BadArgument, match=words):
            parse_listen(wrong)


def test_transports_belong_to_groups() -> None:
    """A portal that names none has those of its group, whichever comes first."""
    listens = [parse_listen(each) for each in ("a:1,1", "b:1,1,transport=tcp", "c:1,2")]
    found = transports_of(listens, ON_TCP)
    assert found == {1: frozenset(("tcp",)), 2: ON_TCP}
    ports = TargetPorts([1, 2], found)
    assert [each.transports for each in ports.by_tag.values()] == [{"tcp"}, {"tcp", "iwarp"}]
    with pytest.raises(BadArgument, match="d:1: group 1 has portals of other transports"):
        transports_of([*listens, parse_listen("d:1,1,transport=iwarp")], ON_TCP)


def test_states_of_a_file(tmp_path: Path) -> None:
    assert parse_states("# groups\n\n1 standby\n 20\toptimized \n") == AccessStates({1: 2, 20: 0})
    assert parse_states("1 standby settable\n2 offline") == AccessStates(
        {1: 2, 2: 14}, frozenset((1,))
    )
    assert parse_states("explicit\n1 standby settable") == AccessStates(
        {1: 2}, frozenset((1,)), True
    )
    for wrong, words in (
        ("1", "line 1: write GROUP STATE"),
        ("\nx standby", "line 2"),
        ("1 asleep", "'asleep' is no state; write one of: optimized"),
        ("1 standby now", "'now': behind the state there may be settable"),
        ("1 standby settable 2", "line 1: write GROUP STATE"),
        ("1 standby\nexplicit", "line 2: explicit needs a group that is settable"),
    ):
        with pytest.raises(BadArgument, match=words):
            parse_states(wrong)
    with pytest.raises(BadArgument, match="No such file"):
        read_states(tmp_path / "missing")
    with pytest.raises(BadArgument, match="there is no portal group 9; the groups are: 1, 2"):
        server(1, 2).set_access_states(AccessStates({1: 2, 9: 0}))
