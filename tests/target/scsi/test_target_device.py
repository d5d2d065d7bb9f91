"""The device server: routing, unit attentions, and what it says about itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import capacity, cdb, inquiry, luns, mode, opcodes, sense
from iserblk.target.scsi import device
from iserblk.target.scsi.commands import COMMANDS, Command
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.store import FileStore
from tests.scsi.modes import as_sense6
from tests.target.scsi_client import (
    GOOD,
    INVALID_FIELD,
    IQN,
    LUN_RESET,
    NO_SUCH_LUN,
    POWER_ON,
    UNKNOWN_COMMAND,
    Client,
    make_unit,
)

SIZE = 1 << 20
TEST_UNIT_READY = cdb.test_unit_ready()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lun")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def server(fd: int) -> DeviceServer:
    return DeviceServer({0: make_unit(fd, SIZE), 5: make_unit(fd, SIZE, 4096)}, IQN)


@pytest.fixture
def client(server: DeviceServer) -> Client:
    return Client(server)


# -- unit attentions -------------------------------------------------------------------------------


def test_power_on_is_told_once_per_nexus_and_lun(server: DeviceServer) -> None:
    one, other = Client(server, ready=False), Client(server, ready=False)
    assert one.code(TEST_UNIT_READY) == POWER_ON
    assert one.code(TEST_UNIT_READY) == GOOD
    one.lun = 5
    assert one.code(TEST_UNIT_READY) == POWER_ON
    assert other.code(TEST_UNIT_READY) == POWER_ON
    assert other.code(TEST_UNIT_READY) == GOOD


@pytest.mark.parametrize("command", [cdb.inquiry(96), cdb.inquiry(96, 0x83), cdb.report_luns(64)])
def test_commands_that_a_unit_attention_does_not_stop(server: DeviceServer, command: bytes) -> None:
    client = Client(server, ready=False)
    assert client.code(command) == GOOD
    assert client.code(TEST_UNIT_READY) == POWER_ON


def test_request_sense_tells_the_unit_attention_as_data(server: DeviceServer) -> None:
    client = Client(server, ready=False)
    found = sense.decode(client.data(cdb.request_sense()))
    assert (found.key, found.code) == POWER_ON
    found = sense.decode(client.data(cdb.request_sense(descriptor=True)))
    assert (found.response, found.key, found.code) == (sense.DESCRIPTOR, 0, 0)
    assert client.code(TEST_UNIT_READY) == GOOD


@pytest.mark.parametrize(("descriptor", "short"), [(False, 0), (False, 13), (True, 0), (True, 3)])
def test_a_unit_attention_that_request_sense_has_no_room_for_is_not_over(
    server: DeviceServer, descriptor: bool, short: int
) -> None:
    client = Client(server, ready=False)
    assert len(client.data(cdb.request_sense(short, descriptor))) == short
    found = sense.decode(client.data(cdb.request_sense(short + 1, descriptor)))
    if short:
        assert (found.key, found.code) == POWER_ON
        assert client.code(TEST_UNIT_READY) == GOOD
    else:
        assert client.code(TEST_UNIT_READY) == POWER_ON


def test_lun_reset_is_told_to_every_nexus(server: DeviceServer) -> None:
    one, other = Client(server), Client(server)
    fresh = Client(server, ready=False)
    assert server.reset_lun(0)
    assert one.code(TEST_UNIT_READY) == LUN_RESET
    assert one.code(TEST_UNIT_READY) == GOOD
    assert other.code(TEST_UNIT_READY) == LUN_RESET
    # Power on says more than a reset, and remains.
    assert fresh.code(TEST_UNIT_READY) == POWER_ON
    assert fresh.code(TEST_UNIT_READY) == GOOD
    one.lun = 5
    assert one.code(TEST_UNIT_READY) == POWER_ON, "the other LUN was not reset"
    assert not server.reset_lun(1)
    assert not server.reset_lun(luns.NONE)


def test_a_detached_nexus_leaves_nothing(server: DeviceServer) -> None:
    client = Client(server, ready=False)
    server.detach(client.nexus)
    server.detach(client.nexus)
    assert server.reset_lun(0)
    assert client.code(TEST_UNIT_READY) == GOOD
    server.attach(client.nexus)
    assert client.code(TEST_UNIT_READY) == POWER_ON


# -- LUNs that are not there -----------------------------------------------------------------------


@pytest.mark.parametrize("lun", [1, 4, 16383, luns.NONE])
def test_unknown_lun(server: DeviceServer, lun: int) -> None:
    client = Client(server)
    client.lun = lun
    assert client.code(TEST_UNIT_READY) == NO_SUCH_LUN
    assert client.code(cdb.inquiry(96, 0x83)) == NO_SUCH_LUN
    assert client.code(cdb.report_luns(64)) == NO_SUCH_LUN
    assert client.code(b"\xff" + bytes(15)) == NO_SUCH_LUN
    assert client.data(cdb.inquiry(96))[0] == inquiry.NO_DEVICE
    found = sense.decode(client.data(cdb.request_sense()))
    assert (found.key, found.code) == NO_SUCH_LUN


def test_lun_0_answers_for_the_target_even_when_absent(fd: int) -> None:
    client = Client(DeviceServer({3: make_unit(fd, SIZE)}, IQN), ready=False)
    standard = inquiry.decode_standard(client.data(cdb.inquiry(96)))
    assert (standard.qualifier, standard.device_type) == (3, 0x1F)
    assert luns.decode_report_luns(client.data(cdb.report_luns(64))) == [3]
    assert client.code(TEST_UNIT_READY) == NO_SUCH_LUN


def test_report_luns(client: Client) -> None:
    assert luns.decode_report_luns(client.data(cdb.report_luns(1024))) == [0, 5]
    client.lun = 5
    assert luns.decode_report_luns(client.data(cdb.report_luns(16))) == [0]
    well_known, bad = bytearray(cdb.report_luns(64)), bytearray(cdb.report_luns(64))
    well_known[2], bad[2] = 1, 3
    assert luns.decode_report_luns(client.data(bytes(well_known))) == []
    assert client.code(bytes(bad)) == INVALID_FIELD


# -- identity --------------------------------------------------------------------------------------


def test_standard_inquiry(client: Client) -> None:
    answer = client.data(cdb.inquiry(255))
    assert len(answer) == 96
    assert inquiry.decode_standard(answer) == (0, inquiry.DISK, 6, "ISERBLK", "FILE", "0001", 0)
    for allocation in (0, 1, 5, 36, 95):
        assert client.data(cdb.inquiry(allocation)) == answer[:allocation]


def test_vital_product_data(client: Client) -> None:
    pages = inquiry.decode_supported_pages(client.data(cdb.inquiry(255, 0)))
    assert pages == (0x00, 0x80, 0x83, 0xB0, 0xB1, 0xB2)
    for page in pages:
        answer = client.data(cdb.inquiry(255, page))
        assert answer[1] == page and len(answer) == 4 + int.from_bytes(answer[2:4], "big")
        assert client.data(cdb.inquiry(7, page)) == answer[:7]
    assert inquiry.decode_serial(client.data(cdb.inquiry(255, 0x80))) == "SN-1"
    names = inquiry.decode_identifiers(client.data(cdb.inquiry(255, 0x83)))
    assert [name.partition(".")[0] for name in names] == ["naa", "t10"]
    assert names[1] == "t10.ISERBLK SN-1"
    designators = inquiry.decode_designators(client.data(cdb.inquiry(255, 0x83)))
    assert inquiry.name_string(IQN) in [each.data for each in designators]
    assert not inquiry.decode_characteristics(client.data(cdb.inquiry(255, 0xB1))).rotational
    assert all(inquiry.decode_provisioning(client.data(cdb.inquiry(255, 0xB2))))
    for absent in (0x86, 0xB9, 0xFF):
        assert client.code(cdb.inquiry(255, absent)) == INVALID_FIELD
    assert client.run(b"\x12\x00\x80\x00\xff\x00").sense.field == 2, "a page without EVPD"


def test_identity_follows_from_the_serial_alone(fd: int) -> None:
    def names(serial: str) -> tuple[str, ...]:
        unit = LogicalUnit(FileStore(fd, SIZE), serial=serial)
        return inquiry.decode_identifiers(unit.vpd_pages(IQN)[0x83])

    assert names("A") == names("A")
    assert not set(names("A")) & set(names("B"))


@pytest.mark.parametrize("serial", ["", "x" * 65, "ä", "a\nb"])
def test_serials_that_cannot_be(fd: int, serial: str) -> None:
    with pytest.raises(BadArgument, match="serial"):
        LogicalUnit(FileStore(fd, SIZE), serial=serial)


@pytest.mark.parametrize(("lun", "block"), [(0, 512), (5, 4096)])
def test_capacity_and_limits(client: Client, lun: int, block: int) -> None:
    client.lun = lun
    client.code(TEST_UNIT_READY)
    found = capacity.decode16(client.data(cdb.read_capacity16()))
    assert found == (SIZE // block, block, 4096, True, True)
    assert capacity.decode10(client.data(cdb.read_capacity10()))[:2] == (SIZE // block, block)
    assert len(client.data(cdb.read_capacity16(12))) == 12
    limits = inquiry.decode_block_limits(client.data(cdb.inquiry(255, 0xB0)))
    assert limits.unmap_granularity == 4096 // block
    assert limits.max_transfer_length * block == 16 << 20


def test_a_capacity_beyond_ten_byte_cdbs(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    size = (1 << 32) * 512
    os.ftruncate(fd, size)
    client = Client(DeviceServer({0: make_unit(fd, size)}, IQN))
    assert client.data(cdb.read_capacity10()) == b"\xff" * 4 + b"\0\0\x02\0"
    assert capacity.decode16(client.data(cdb.read_capacity16())).blocks == 1 << 32
    os.close(fd)


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("write_cache", [False, True])
def test_modes(fd: int, read_only: bool, write_cache: bool) -> None:
    unit = make_unit(fd, SIZE, read_only=read_only, write_cache=write_cache)
    client = Client(DeviceServer({0: unit}, IQN))
    expected = mode.Modes(read_only, write_cache, True)
    for page in (mode.CACHING, mode.ALL):
        for descriptors in (False, True):
            six = client.data(cdb.mode_sense6(page, 255, descriptors))
            ten = client.data(cdb.mode_sense10(page, 255, descriptors))
            assert mode.decode_sense6(six) == mode.decode_sense6(as_sense6(ten)) == expected
            assert six[3] == (8 if descriptors else 0)
            assert client.data(cdb.mode_sense6(page, 3, descriptors)) == six[:3]
    long = bytearray(cdb.mode_sense10(mode.CACHING, 255, True))
    long[1] = 0x10  # LLBAA
    assert client.data(bytes(long))[4:8] == b"\x01\0\0\x10"


def test_mode_pages_and_controls(client: Client) -> None:
    def ask(page: int, control: int = 0, subpage: int = 0) -> bytes:
        return bytes((0x1A, 0x08, control << 6 | page, subpage, 255, 0))

    current = client.data(ask(mode.CACHING))
    assert client.data(ask(mode.CACHING, mode.PC_DEFAULT)) == current
    changeable = client.data(ask(mode.CACHING, mode.PC_CHANGEABLE))
    assert changeable[4:6] == b"\x08\x12" and not any(changeable[6:])
    saved = client.run(ask(mode.CACHING, mode.PC_SAVED))
    assert saved.code == (sense.ILLEGAL_REQUEST, sense.SAVING_NOT_SUPPORTED)
    assert client.data(ask(mode.ALL, subpage=0xFF)) == client.data(ask(mode.ALL))
    assert len(client.data(ask(mode.CONTROL))) == 4 + 12
    assert client.code(ask(0x01)) == INVALID_FIELD
    assert client.run(ask(mode.CACHING, subpage=1)).sense.field == 3
    assert client.code(ask(mode.CACHING, subpage=0xFF)) == INVALID_FIELD


# -- commands and their fields ---------------------------------------------------------------------


KNOWN = {each.usage[0] for each in COMMANDS.values()}


@pytest.mark.parametrize("opcode", sorted(set(range(256)) - KNOWN))
def test_unknown_commands(client: Client, opcode: int) -> None:
    answer = client.run(bytes((opcode,)) + bytes(15))
    assert answer.code == UNKNOWN_COMMAND
    assert answer.sense.field == 0 and answer.sense.field_in_cdb


def test_unknown_service_actions_and_empty_cdbs(client: Client) -> None:
    assert client.code(b"\x9e\x11" + bytes(14)) == UNKNOWN_COMMAND
    assert client.code(b"\xa3\x0d" + bytes(14)) == UNKNOWN_COMMAND
    assert client.code(b"\x9e") == UNKNOWN_COMMAND
    assert client.code(b"") == UNKNOWN_COMMAND


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda each: opcodes.name(each.usage))
def test_every_bit_that_means_nothing_is_refused(client: Client, command: Command) -> None:
    usage = command.usage
    plain = bytes((usage[0], usage[1] & 0x1F if usage[0] in opcodes.WITH_ACTIONS else 0))
    plain = plain.ljust(len(usage), b"\0")
    for at in range(1, len(usage)):
        for bit in range(8):
            if usage[at] >> bit & 1 or (at == 1 and usage[0] in opcodes.WITH_ACTIONS and bit < 5):
                continue
            wrong = bytearray(plain)
            wrong[at] |= 1 << bit
            answer = client.run(bytes(wrong))
            assert answer.code == INVALID_FIELD, (at, bit)
            assert (answer.sense.field, answer.sense.field_in_cdb) == (at, True)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda each: opcodes.name(each.usage))
def test_a_cdb_cut_short_is_refused(client: Client, command: Command) -> None:
    usage = command.usage
    for length in range(2, len(usage)):
        assert client.code(usage[:length]) == INVALID_FIELD


def test_commands_that_do_nothing_here(client: Client) -> None:
    for prevent in range(4):
        assert (
            client.code(bytes((opcodes.PREVENT_ALLOW_MEDIUM_REMOVAL, 0, 0, 0, prevent, 0))) == GOOD
        )
    for start in (0x00, 0x01, 0x04, 0x05):
        assert client.code(bytes((opcodes.START_STOP_UNIT, 1, 0, 0, start, 0))) == GOOD
    assert client.code(TEST_UNIT_READY) == GOOD, "a stop stops nobody else"


# -- REPORT SUPPORTED OPERATION CODES --------------------------------------------------------------


def supported(option: int, opcode: int = 0, action: int = 0, allocation: int = 4096) -> bytes:
    return (
        bytes((0xA3, 0x0C, option, opcode))
        + action.to_bytes(2, "big")
        + allocation.to_bytes(4, "big")
        + bytes(2)
    )


@pytest.mark.parametrize(("rctd", "step"), [(0, 8), (0x80, 20)])
def test_all_supported_commands(client: Client, rctd: int, step: int) -> None:
    answer = client.data(supported(rctd))
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4 == step * len(COMMANDS)
    found = set()
    for at in range(4, len(answer), step):
        opcode, action = answer[at], int.from_bytes(answer[at + 2 : at + 4], "big")
        has_action, has_timeouts = answer[at + 5] & 1, answer[at + 5] >> 1
        assert has_timeouts == bool(rctd)
        length = int.from_bytes(answer[at + 6 : at + 8], "big")
        key = opcode << 8 | action if has_action else opcode
        assert COMMANDS[key].length == length
        found.add(key)
    assert found == set(COMMANDS)
    assert client.data(supported(rctd, allocation=6)) == answer[:6]


def test_one_supported_command(client: Client) -> None:
    read = client.data(supported(1, opcodes.READ_10))
    assert read == b"\0\x03\0\x0a" + COMMANDS[opcodes.READ_10].usage
    timeouts = client.data(supported(0x81, opcodes.READ_10))
    assert timeouts == b"\0\x83" + read[2:] + b"\0\x0a" + bytes(10)
    action = client.data(supported(2, 0x9E, 0x10))
    assert action[:4] == b"\0\x03\0\x10" and action[4:6] == b"\x9e\x10"
    assert client.data(supported(3, 0x9E, 0x12)) != action
    assert client.data(supported(3, opcodes.READ_10)) == read
    for unknown in (
        supported(1, 0xFF),
        supported(2, 0x9E, 0x1F),
        supported(3, 0xFF),
        supported(3, opcodes.READ_10, 1),
        supported(2, 0x5E, 0x0100),  # more than a service action has room for
        supported(3, 0x5E, 0x0101),
    ):
        assert client.data(unknown) == b"\0\x01\0\0"
    for wrong in (
        supported(1, 0x9E),
        supported(2, opcodes.READ_10),
        supported(4),
        supported(7),
    ):
        assert client.run(wrong).sense.field == 2


def test_closing_the_server_closes_every_unit(tmp_path: os.PathLike[str]) -> None:
    fds = [os.open(tmp_path, os.O_TMPFILE | os.O_RDWR) for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, SIZE)
    DeviceServer({n: make_unit(fd, SIZE) for n, fd in enumerate(fds)}, IQN).close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# -- files that grow -------------------------------------------------------------------------------


def test_file_that_grows(fd: int, server: DeviceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every nexus is told once; what is not a whole block does not count."""
    monkeypatch.setattr(device, "LOOK_S", 0.0)
    one, other = Client(server), Client(server)
    os.ftruncate(fd, SIZE + 511)
    assert one.code(TEST_UNIT_READY) == GOOD
    os.ftruncate(fd, SIZE + 4096)
    late = Client(server, ready=False)
    assert late.code(TEST_UNIT_READY) == POWER_ON  # which says all that a new size could add
    assert late.code(TEST_UNIT_READY) == GOOD
    for client in (one, other):
        assert client.code(TEST_UNIT_READY) == (sense.UNIT_ATTENTION, sense.CAPACITY_CHANGED)
        assert client.code(TEST_UNIT_READY) == GOOD
        found = capacity.decode16(client.data(cdb.read_capacity16(32)))
        assert found.blocks == (SIZE + 4096) // 512
    os.ftruncate(fd, SIZE)
    assert one.code(TEST_UNIT_READY) == GOOD  # nothing is ever cut off
