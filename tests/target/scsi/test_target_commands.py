"""Which commands there are, and which bits of their CDBs mean something."""

from __future__ import annotations

import pytest

from iserblk.scsi import opcodes
from iserblk.target.scsi.commands import COMMANDS, Command
from tests.target.scsi.units import KNOWN, TEST_UNIT_READY, supported
from tests.target.scsi_client import (
    GOOD,
    INVALID_FIELD,
    UNKNOWN_COMMAND,
    Client,
)


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
    assert client.code(TEST_UNIT_READY) == GOOD, "a stop stops no other command"


@pytest.mark.parametrize(("rctd", "step"), [(0, 8), (0x80, 20)])
def test_all_supported_commands(client: Client, rctd: int, step: int) -> None:
    """All of the table; SET TARGET PORT GROUPS only where a group is settable
    (tests/target/test_ports.py)."""
    there = set(COMMANDS) - {opcodes.MAINTENANCE_OUT << 8 | opcodes.SA_SET_TARGET_PORT_GROUPS}
    answer = client.data(supported(rctd))
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4 == step * len(there)
    found = set()
    for at in range(4, len(answer), step):
        opcode, action = answer[at], int.from_bytes(answer[at + 2 : at + 4], "big")
        has_action, has_timeouts = answer[at + 5] & 1, answer[at + 5] >> 1
        assert has_timeouts == bool(rctd)
        length = int.from_bytes(answer[at + 6 : at + 8], "big")
        key = opcode << 8 | action if has_action else opcode
        assert COMMANDS[key].length == length
        found.add(key)
    assert found == there
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
