"""Portal groups of the target, and their ALUA states."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import alua, cdb, inquiry, sense
from iserblk.target.ports import (
    ON_TCP,
    ONLY_PORT,
    STATES,
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
    device.set_access_states({1: STATES[word]})
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
    device.set_access_states({1: alua.ACTIVE_NON_OPTIMIZED})
    assert one.code(READ) == (sense.UNIT_ATTENTION, alua.STATE_CHANGED)
    assert one.code(READ) == GOOD


def test_no_change_is_not_told() -> None:
    device = server(1, 2)
    one, _ = clients(device)
    device.set_access_states({1: alua.ACTIVE_OPTIMIZED})
    assert one.code(READ) == GOOD


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
    assert parse_states("# groups\n\n1 standby\n 20\toptimized \n") == {1: 2, 20: 0}
    for wrong, words in (
        ("1", "line 1: write GROUP STATE"),
        ("\nx standby", "line 2"),
        ("1 asleep", "'asleep' is no state; write one of: optimized"),
    ):
        with pytest.raises(BadArgument, match=words):
            parse_states(wrong)
    with pytest.raises(BadArgument, match="No such file"):
        read_states(tmp_path / "missing")
    with pytest.raises(BadArgument, match="there is no portal group 9; the groups are: 1, 2"):
        server(1, 2).set_access_states({1: 2, 9: 0})
