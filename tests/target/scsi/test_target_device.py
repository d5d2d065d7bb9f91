"""The device server: routing, unit attentions, and what it says about itself."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from iserblk.scsi import capacity, cdb, inquiry, luns, sense
from iserblk.target.scsi import device
from iserblk.target.scsi.device import DeviceServer
from tests.target.scsi.units import SIZE, TEST_UNIT_READY
from tests.target.scsi_client import (
    GOOD,
    IQN,
    LUN_RESET,
    NO_SUCH_LUN,
    POWER_ON,
    Client,
    make_unit,
)

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


# -- identity --------------------------------------------------------------------------------------


# -- modes -----------------------------------------------------------------------------------------


# -- commands and their fields ---------------------------------------------------------------------


# -- REPORT SUPPORTED OPERATION CODES --------------------------------------------------------------


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


# -- access ----------------------------------------------------------------------------------------

LUNS_CHANGED = (sense.UNIT_ATTENTION, sense.REPORTED_LUNS_CHANGED)
HOST = "iqn.2026-11.example:host"


def test_luns_that_an_initiator_has_no_access_to_are_not_there(server: DeviceServer) -> None:
    """For it they are as any other LUN that does not exist; for others they are there."""
    server.set_access(lambda name, lun: lun == 0 or name == "iqn.2026-11.example:other")
    one, other = Client(server), Client(server, name="iqn.2026-11.example:OTHER")
    assert luns.decode_report_luns(one.data(cdb.report_luns(64))) == [0]
    assert luns.decode_report_luns(other.data(cdb.report_luns(64))) == [0, 5]
    one.lun = other.lun = 5
    unknown = b"\xff" + bytes(15)
    for command in (TEST_UNIT_READY, cdb.inquiry(96, 0x83), cdb.report_luns(64), unknown):
        assert one.code(command) == NO_SUCH_LUN
    assert one.data(cdb.inquiry(96))[0] == inquiry.NO_DEVICE
    found = sense.decode(one.data(cdb.request_sense()))
    assert (found.key, found.code) == NO_SUCH_LUN
    assert not server.has_lun(one.nexus, 5) and server.has_lun(other.nexus, 5)
    assert list(server.luns(one.nexus)) == [0]
    assert other.code(TEST_UNIT_READY) == POWER_ON
    assert other.data(cdb.inquiry(96))[0] == inquiry.DISK


def test_access_that_changes_is_told(server: DeviceServer) -> None:
    one, other = Client(server), Client(server, name="iqn.2026-11.example:other")
    server.set_access(lambda name, lun: lun == 0 or name != HOST)
    assert one.ended_tasks == [5] and other.ended_tasks == []
    assert one.code(TEST_UNIT_READY) == LUNS_CHANGED
    assert one.code(TEST_UNIT_READY) == other.code(TEST_UNIT_READY) == GOOD
    server.set_access(lambda name, lun: True)
    assert one.code(TEST_UNIT_READY) == LUNS_CHANGED
    one.lun = 5
    assert one.code(TEST_UNIT_READY) == POWER_ON, "a LUN that is new"
    assert one.code(TEST_UNIT_READY) == LUNS_CHANGED
    assert one.code(TEST_UNIT_READY) == GOOD
    assert other.code(TEST_UNIT_READY) == GOOD
    server.set_access(lambda name, lun: True)
    assert one.code(TEST_UNIT_READY) == GOOD, "nothing has changed"


def test_report_luns_ends_the_unit_attention_at_all_luns(server: DeviceServer) -> None:
    """SPC-4, REPORT LUNS."""
    one = Client(server)
    one.lun = 5
    assert one.code(TEST_UNIT_READY) == POWER_ON
    server.set_access(lambda name, lun: lun == 5)
    server.set_access(lambda name, lun: True)
    assert luns.decode_report_luns(one.data(cdb.report_luns(64))) == [0, 5]
    assert one.code(TEST_UNIT_READY) == GOOD
    one.lun = 0
    assert one.code(TEST_UNIT_READY) == POWER_ON
    assert one.code(TEST_UNIT_READY) == GOOD


# -- LUNs that come and go -------------------------------------------------------------------------


def test_a_lun_that_is_added(fd: int, server: DeviceServer) -> None:
    one = Client(server)
    server.add_luns({7: make_unit(fd, SIZE)})
    assert one.code(TEST_UNIT_READY) == LUNS_CHANGED
    assert luns.decode_report_luns(one.data(cdb.report_luns(64))) == [0, 5, 7]
    one.lun = 7
    assert one.code(TEST_UNIT_READY) == POWER_ON
    assert one.code(TEST_UNIT_READY) == GOOD
    assert one.data(cdb.inquiry(255, 0x83))[1] == 0x83
    late = Client(server, lun=7, name="iqn.2026-11.example:late")
    assert late.code(TEST_UNIT_READY) == GOOD
    assert server.reset_lun(7)
    assert one.code(TEST_UNIT_READY) == late.code(TEST_UNIT_READY) == LUN_RESET


def test_a_lun_that_is_removed(fd: int, server: DeviceServer) -> None:
    one, other = Client(server), Client(server)
    one.running = 2
    ended: list[int] = []
    assert server.remove_luns([5], lambda: ended.append(1)) == 2
    assert one.ended_tasks.count(5) and other.ended_tasks.count(5)
    assert one.code(TEST_UNIT_READY) == other.code(TEST_UNIT_READY) == LUNS_CHANGED
    assert luns.decode_report_luns(one.data(cdb.report_luns(64))) == [0]
    one.lun = 5
    assert one.code(TEST_UNIT_READY) == NO_SUCH_LUN
    assert not server.reset_lun(5) and not server.has_lun(one.nexus, 5)
    server.add_luns({5: make_unit(fd, SIZE)})
    assert one.code(TEST_UNIT_READY) == POWER_ON, "another LUN, under the same number"
    server.detach(one.nexus)
    server.detach(other.nexus)


def test_nothing_is_left_of_a_lun_that_was_hidden_and_is_removed(server: DeviceServer) -> None:
    """Not even the nexus, with all that belongs to its session."""
    server.set_access(lambda name, lun: lun == 0)
    one = Client(server)
    session = weakref.ref(one)  # the nexus has a method of it
    server.remove_luns([5], lambda: None)
    server.detach(one.nexus)
    del one
    gc.collect()
    assert session() is None


def test_access_and_luns_that_come(fd: int, server: DeviceServer) -> None:
    server.set_access(lambda name, lun: lun != 7)
    one = Client(server)
    server.add_luns({7: make_unit(fd, SIZE), 8: make_unit(fd, SIZE)})
    assert one.code(TEST_UNIT_READY) == LUNS_CHANGED
    assert luns.decode_report_luns(one.data(cdb.report_luns(64))) == [0, 5, 8]
