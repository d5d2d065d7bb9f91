"""READ, WRITE, VERIFY, COMPARE AND WRITE, XDWRITEREAD, SYNCHRONIZE CACHE, PRE-FETCH."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

from iserblk.scsi import cdb, opcodes, sense
from iserblk.scsi import status as sam
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.status import StatusError
from tests.support import logs
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import (
    GOOD,
    INVALID_FIELD,
    IQN,
    LBA_OUT_OF_RANGE,
    WRITE_PROTECTED,
    Client,
)

pytestmark = pytest.mark.logs(logs.FILE_ERRORS)

BLOCKS = 64
FUA = cdb.FUA
MISCOMPARE = (sense.MISCOMPARE, sense.MISCOMPARE_DURING_VERIFY)


def unit_of(store: FakeStore, block: int = 512, **options: Any) -> LogicalUnit:
    return LogicalUnit(store, serial="S", block=block, **options)


def client_of(store: FakeStore, block: int = 512, **options: Any) -> Client:
    return Client(DeviceServer({0: unit_of(store, block, **options)}, IQN))


@pytest.fixture(params=[512, 4096])
def block(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture
def store(block: int) -> FakeStore:
    store = FakeStore(BLOCKS * block)
    store.content[:] = os.urandom(store.size)
    return store


@pytest.fixture
def client(store: FakeStore, block: int) -> Client:
    return client_of(store, block)


def rw(opcode: int, lba: int, blocks: int, flags: int = 0) -> bytes:
    """READ or WRITE of any length of CDB."""
    if opcode in (opcodes.READ_6, opcodes.WRITE_6):
        return cdb.RW6.pack(opcode, lba >> 16, lba & 0xFFFF, blocks & 0xFF, 0)
    if opcode in (opcodes.READ_10, opcodes.WRITE_10):
        return cdb.RW10.pack(opcode, flags, lba, 0, blocks, 0)
    if opcode in (opcodes.READ_12, opcodes.WRITE_12):
        return cdb.RW12.pack(opcode, flags, lba, blocks, 0, 0)
    return cdb.RW16.pack(opcode, flags, lba, blocks, 0, 0)


READS = [opcodes.READ_6, opcodes.READ_10, opcodes.READ_12, opcodes.READ_16]
WRITES = [opcodes.WRITE_6, opcodes.WRITE_10, opcodes.WRITE_12, opcodes.WRITE_16]
NAMED: dict[str, Any] = {"ids": lambda opcode: opcodes.name(bytes((opcode,)))}


@pytest.mark.parametrize("opcode", READS, **NAMED)
def test_read(client: Client, store: FakeStore, block: int, opcode: int) -> None:
    for lba, blocks in ((0, 1), (5, 7), (BLOCKS - 1, 1), (0, BLOCKS)):
        expected = store.content[lba * block : (lba + blocks) * block]
        assert client.data(rw(opcode, lba, blocks)) == expected


@pytest.mark.parametrize("opcode", WRITES, **NAMED)
def test_write(client: Client, store: FakeStore, block: int, opcode: int) -> None:
    for lba, blocks in ((0, 1), (5, 7), (BLOCKS - 1, 1), (0, BLOCKS)):
        expected = bytearray(store.content)
        data = os.urandom(blocks * block)
        expected[lba * block : (lba + blocks) * block] = data
        store.calls.clear()
        assert client.code(rw(opcode, lba, blocks), data) == GOOD
        assert store.content == expected
        assert store.calls == [("write", lba * block, len(data), False)]


@pytest.mark.parametrize("opcode", READS + WRITES, **NAMED)
def test_addresses_past_the_end(client: Client, opcode: int) -> None:
    for lba, blocks in ((BLOCKS, 1), (BLOCKS - 1, 2), (1, BLOCKS), (0x1FFFFF, 255)):
        assert client.code(rw(opcode, lba, blocks)) == LBA_OUT_OF_RANGE
    if opcode in (opcodes.READ_16, opcodes.WRITE_16):
        assert client.code(rw(opcode, 2**64 - 1, 1)) == LBA_OUT_OF_RANGE
        assert client.code(rw(opcode, 2**64 - 1, 2**32 - 1)) == LBA_OUT_OF_RANGE


@pytest.mark.parametrize("opcode", READS[1:] + WRITES[1:], **NAMED)
def test_zero_blocks_are_legal(client: Client, store: FakeStore, opcode: int) -> None:
    answer = client.run(rw(opcode, BLOCKS - 1, 0))
    assert (answer.code, answer.data) == (GOOD, b"")
    assert not store.calls
    assert client.code(rw(opcode, BLOCKS, 0)) == LBA_OUT_OF_RANGE


def test_zero_blocks_mean_256_in_six_byte_cdbs() -> None:
    store = FakeStore(256 * 512)
    client = client_of(store)
    data = os.urandom(store.size)
    assert client.code(rw(opcodes.WRITE_6, 0, 0), data) == GOOD
    assert client.data(rw(opcodes.READ_6, 0, 0)) == data == store.content
    assert client.code(rw(opcodes.READ_6, 1, 0)) == LBA_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("opcode", "field"),
    [
        (opcodes.READ_10, 7),
        (opcodes.READ_12, 6),
        (opcodes.READ_16, 10),
        (opcodes.WRITE_10, 7),
        (opcodes.WRITE_12, 6),
        (opcodes.WRITE_16, 10),
    ],
    **NAMED,
)
def test_longer_than_the_limit(opcode: int, field: int) -> None:
    """VPD page B0h allows 32768 blocks of 512 bytes."""
    store = FakeStore(0)
    store.size = 1 << 30
    server = DeviceServer({0: unit_of(store)}, IQN)
    client = Client(server)
    assert server.begin(client.nexus, 0, rw(opcode, 0, 32768)).length == 16 << 20
    answer = client.run(rw(opcode, 0, 32769))
    assert (answer.code, answer.sense.field) == (INVALID_FIELD, field)


# -- durability ------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", WRITES[1:], **NAMED)
def test_fua_write_is_durable(client: Client, store: FakeStore, block: int, opcode: int) -> None:
    task = client.server.begin(client.nexus, 0, rw(opcode, 0, 1, FUA))
    assert task.may_block
    assert client.code(rw(opcode, 0, 1, FUA), bytes(block)) == GOOD
    assert store.calls == [("write", 0, block, True)]


@pytest.mark.parametrize("opcode", WRITES, **NAMED)
def test_every_write_is_durable_without_a_write_cache(opcode: int) -> None:
    store = FakeStore(BLOCKS * 512)
    client = client_of(store, write_cache=False)
    assert client.server.begin(client.nexus, 0, rw(opcode, 0, 1)).may_block
    assert client.code(rw(opcode, 0, 1), bytes(512)) == GOOD
    assert store.calls == [("write", 0, 512, True)]


def test_fua_read_comes_from_the_medium(client: Client, store: FakeStore) -> None:
    task = client.server.begin(client.nexus, 0, rw(opcodes.READ_16, 0, 1, FUA))
    assert task.may_block
    assert client.run(rw(opcodes.READ_16, 0, 1, FUA)).code == GOOD
    assert store.calls == [("flush",)]


def test_dpo_is_only_advice(client: Client, store: FakeStore, block: int) -> None:
    assert client.code(rw(opcodes.WRITE_10, 0, 1, cdb.DPO), bytes(block)) == GOOD
    assert client.data(rw(opcodes.READ_10, 0, 1, cdb.DPO)) == bytes(block)
    assert store.calls == [("write", 0, block, False)]


@pytest.mark.parametrize(
    "command",
    [
        cdb.synchronize_cache10(0, 0),
        cdb.synchronize_cache10(BLOCKS - 1, 1, immed=True),
        cdb.synchronize_cache16(0, BLOCKS),
        bytes((opcodes.START_STOP_UNIT, 0, 0, 0, 0, 0)),
    ],
)
def test_flushes(client: Client, store: FakeStore, command: bytes) -> None:
    assert client.server.begin(client.nexus, 0, command).may_block
    assert client.code(command) == GOOD
    assert store.calls == [("flush",)]


@pytest.mark.parametrize("options", [{"read_only": True}, {"write_cache": False}])
def test_nothing_to_flush(options: dict[str, bool]) -> None:
    store = FakeStore(BLOCKS * 512)
    client = client_of(store, **options)
    assert client.code(cdb.synchronize_cache16(0, 0)) == GOOD
    assert not store.calls


@pytest.mark.parametrize(
    "build",
    [
        cdb.synchronize_cache10,
        cdb.synchronize_cache16,
        cdb.pre_fetch10,
        cdb.pre_fetch16,
        cdb.verify10,
        cdb.verify16,
        cdb.write_same10,
        cdb.write_same16,
    ],
)
def test_ranges_past_the_end(client: Client, build: object) -> None:
    assert callable(build)
    for lba, blocks in ((BLOCKS, 0), (BLOCKS, 1), (BLOCKS - 1, 2), (1, BLOCKS)):
        assert client.code(build(lba, blocks)) == LBA_OUT_OF_RANGE


def test_pre_fetch(client: Client, store: FakeStore, block: int) -> None:
    for command in (cdb.pre_fetch10(4, 8), cdb.pre_fetch16(4, 8), cdb.pre_fetch16(4, 0)):
        assert client.run(command).status == sam.GOOD
    ahead = ("prefetch", 4 * block, 8 * block)
    assert store.calls == [ahead, ahead, ("prefetch", 4 * block, (BLOCKS - 4) * block)]


# -- VERIFY, COMPARE AND WRITE ---------------------------------------------------------------------


@pytest.mark.parametrize("build", [cdb.verify10, cdb.verify16])
def test_verify(client: Client, store: FakeStore, block: int, build: object) -> None:
    assert callable(build)
    assert client.code(build(1, 3)) == GOOD
    assert client.code(build(1, 0)) == GOOD
    assert client.code(build(1, 0, cdb.BYTCHK)) == GOOD
    data = bytearray(store.content[block : 4 * block])
    assert client.code(build(1, 3, cdb.BYTCHK), bytes(data)) == GOOD
    for wrong in (0, 1, block, 2 * block + 7, 3 * block - 1):
        changed = bytearray(data)
        changed[wrong] ^= 1
        answer = client.run(build(1, 3, cdb.BYTCHK), bytes(changed))
        assert (answer.code, answer.sense.information) == (MISCOMPARE, wrong)
    for unknown in (0x04, 0x06):
        assert client.run(build(0, 1, unknown)).sense.field == 1
    assert not store.calls
    store.failure = OSError(errno.EIO, "bad block")
    unread = (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR)
    assert client.code(build(1, 3)) == unread
    assert client.code(build(1, 3, cdb.BYTCHK), bytes(3 * block)) == unread
    assert client.code(cdb.compare_and_write(0, 1), bytes(2 * block)) == unread


@pytest.mark.parametrize("wrong", [None, 0, (1 << 20) - 1, 1 << 20, (5 << 19) - 1])
def test_verify_compares_in_steps(wrong: int | None) -> None:
    """No more of the medium is in memory, beside the data in the buffer, than 1 MiB."""
    size = 5 << 19
    store = FakeStore(size)
    store.content[:] = os.urandom(size)
    reads: list[int] = []
    read_into = store.read_into

    def noted(buffer: memoryview, offset: int, nowait: bool) -> bool:
        reads.append(len(buffer))
        return read_into(buffer, offset, nowait)

    store.read_into = noted  # type: ignore[method-assign]
    unit = LogicalUnit(store, serial="S", block=512)
    client = Client(DeviceServer({0: unit}, IQN))
    data = bytearray(store.content)
    if wrong is not None:
        data[wrong] ^= 1
    answer = client.run(cdb.verify16(0, size // 512, cdb.BYTCHK), bytes(data))
    if wrong is None:
        assert answer.code == GOOD and sum(reads) == size
    else:
        assert (answer.code, answer.sense.information) == (MISCOMPARE, wrong)
    assert max(reads) == 1 << 20


def test_one_verify_reads_2_gib_at_most() -> None:
    """So that those that wait for a thread of the LUN get one, whatever others verify."""
    store = FakeStore(1 << 20)
    store.size = 1 << 40
    client = Client(DeviceServer({0: LogicalUnit(store, serial="S", block=512)}, IQN))
    most = (2 << 30) // 512
    assert not client.server.begin(client.nexus, 0, cdb.verify16(0, most)).status
    assert client.code(cdb.verify16(0, most + 1)) == INVALID_FIELD


def changed_opcode(command: bytes, opcode: int) -> bytes:
    return bytes((opcode,)) + command[1:]


def test_verify_with_12_bytes(client: Client, store: FakeStore, block: int) -> None:
    data = bytes(store.content[block : 4 * block])
    command = rw(opcodes.READ_12, 1, 3)
    assert client.code(changed_opcode(command, opcodes.VERIFY_12)) == GOOD
    command = changed_opcode(rw(opcodes.READ_12, 1, 3, cdb.BYTCHK), opcodes.VERIFY_12)
    assert client.code(command, data) == GOOD
    assert client.code(command, data[1:] + data[:1]) == MISCOMPARE


@pytest.mark.parametrize("flags", [0, cdb.BYTCHK])
@pytest.mark.parametrize(
    ("write", "opcode"),
    [
        (opcodes.WRITE_10, opcodes.WRITE_AND_VERIFY_10),
        (opcodes.WRITE_12, opcodes.WRITE_AND_VERIFY_12),
        (opcodes.WRITE_16, opcodes.WRITE_AND_VERIFY_16),
    ],
)
def test_write_and_verify(
    client: Client, store: FakeStore, block: int, write: int, opcode: int, flags: int
) -> None:
    """The data is durable before the target reads it back."""
    data = os.urandom(3 * block)
    command = changed_opcode(rw(write, 1, 3, flags), opcode)
    assert client.server.begin(client.nexus, 0, command).may_block
    assert client.code(command, data) == GOOD
    assert store.content[block : 4 * block] == data
    assert store.calls == [("write", block, 3 * block, True)]
    assert client.code(changed_opcode(rw(write, 1, 0, flags), opcode)) == GOOD
    assert client.code(changed_opcode(rw(write, BLOCKS, 1), opcode)) == LBA_OUT_OF_RANGE
    assert client.run(changed_opcode(rw(write, 0, 1, 0x06), opcode)).sense.field == 1
    assert len(store.calls) == 1


def test_compare_and_write(client: Client, store: FakeStore, block: int) -> None:
    old, new = bytes(store.content[block : 3 * block]), os.urandom(2 * block)
    command = cdb.compare_and_write(1, 2)
    assert client.server.begin(client.nexus, 0, command).may_block
    assert client.code(command, old + new) == GOOD
    assert store.content[block : 3 * block] == new
    answer = client.run(command, new[:-1] + bytes((new[-1] ^ 1,)) + old)
    assert (answer.code, answer.sense.information) == (MISCOMPARE, 2 * block - 1)
    assert store.content[block : 3 * block] == new
    assert store.calls == [("write", block, 2 * block, False)]
    assert client.code(cdb.compare_and_write(1, 2, FUA), new + old) == GOOD
    assert store.calls[-1] == ("write", block, 2 * block, True)
    assert client.code(cdb.compare_and_write(1, 0)) == GOOD
    assert client.code(cdb.compare_and_write(BLOCKS - 1, 2)) == LBA_OUT_OF_RANGE


def test_compare_and_write_counts_without_losing_any() -> None:
    """Threads that increment one counter block: every success is one increment."""
    store = FakeStore(BLOCKS * 512)
    server = DeviceServer({0: unit_of(store)}, IQN)
    clients = [Client(server) for _ in range(4)]

    def increment(client: Client) -> None:
        done = 0
        while done < 25:
            old = client.data(rw(opcodes.READ_16, 0, 1))
            new = (int.from_bytes(old, "big") + 1).to_bytes(512, "big")
            code = client.code(cdb.compare_and_write(0, 1), old + new)
            assert code in (GOOD, MISCOMPARE)
            done += code == GOOD

    threads = [threading.Thread(target=increment, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int.from_bytes(store.content[:512], "big") == 100


def xor(one: bytes, two: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_xdwriteread(client: Client, store: FakeStore, block: int, blocks: int) -> None:
    """Data-In is the exclusive or of what was there and what is there now (SBC-3)."""
    old, new = bytes(store.content[block : (1 + blocks) * block]), os.urandom(blocks * block)
    before, after = bytes(store.content[:block]), bytes(store.content[(1 + blocks) * block :])
    command = cdb.xdwriteread10(1, blocks)
    assert client.server.begin(client.nexus, 0, command).may_block
    answer = client.run(command, new)
    assert (answer.code, answer.data) == (GOOD, xor(old, new))
    assert store.content == before + new + after
    assert store.calls == [("write", block, blocks * block, False)]


def test_xdwriteread_has_limits(client: Client, store: FakeStore, block: int) -> None:
    assert client.code(cdb.xdwriteread10(BLOCKS - 1, 2)) == LBA_OUT_OF_RANGE
    assert client.code(cdb.xdwriteread10(1, 0)) == GOOD
    assert client.code(cdb.xdwriteread10(BLOCKS, 0)) == LBA_OUT_OF_RANGE
    assert client.run(cdb.xdwriteread10(0, 1, 0x01)).sense.field == 1, "XORPINFO"
    assert client.run(cdb.xdwriteread10(0, 1, 0x20)).sense.field == 1, "WRPROTECT"
    assert not store.calls


@pytest.mark.parametrize("flags", [0, cdb.DISABLE_WRITE])
def test_xdwriteread_keeps_a_mib_beside_its_data_at_most(flags: int) -> None:
    """Each of a LUN's threads may carry one out."""
    store = FakeStore(4 << 20)
    client = client_of(store)
    most = (1 << 20) // 512
    assert client.run(cdb.xdwriteread10(0, most, flags), bytes(1 << 20)).code == GOOD
    answer = client.run(cdb.xdwriteread10(0, most + 1, flags), bytes((1 << 20) + 512))
    assert (answer.code, answer.sense.field) == (INVALID_FIELD, 7)


def test_xdwriteread_that_must_be_durable(client: Client, store: FakeStore, block: int) -> None:
    old, new = bytes(store.content[:block]), os.urandom(block)
    assert client.run(cdb.xdwriteread10(0, 1, FUA | cdb.DPO), new).data == xor(old, new)
    assert store.calls == [("write", 0, block, True)]


def test_xdwriteread_that_does_not_write() -> None:
    """DISABLE WRITE: only the exclusive or is wanted, of a LUN that cannot be written as well."""
    store = FakeStore(BLOCKS * 512)
    store.content[:] = os.urandom(store.size)
    old, data = bytes(store.content), os.urandom(512)
    client = client_of(store, read_only=True)
    answer = client.run(cdb.xdwriteread10(2, 1, cdb.DISABLE_WRITE), data)
    assert (answer.code, answer.data) == (GOOD, xor(old[1024:1536], data))
    assert client.code(cdb.xdwriteread10(2, 1)) == WRITE_PROTECTED
    assert store.content == old and not store.calls


def test_xdwriteread_of_a_file_that_fails(client: Client, store: FakeStore, block: int) -> None:
    store.failure = OSError(errno.EIO, "bad block")
    answer = client.run(cdb.xdwriteread10(0, 1), bytes(block))
    assert answer.code == (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR) and not answer.data


@pytest.mark.parametrize(
    ("command", "more"),
    [(cdb.compare_and_write(4, 2), bytes(1024)), (cdb.xdwriteread10(4, 2), b"")],
    ids=["COMPARE AND WRITE", "XDWRITEREAD"],
)
def test_a_write_stays_out_of_a_command_that_reads_first(command: bytes, more: bytes) -> None:
    """With ``nowait`` the write is put off; in a thread it waits; outside the range it goes on.
    ``more``: Data-Out in front of the data that is written."""
    inside, go_on = threading.Event(), threading.Event()

    class SlowStore(FakeStore):
        def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
            inside.set()
            assert go_on.wait(30)
            return super().read_into(buffer, offset, nowait)

    store = SlowStore(BLOCKS * 512)
    server = DeviceServer({0: unit_of(store)}, IQN)
    client, other = Client(server), Client(server)
    swap = threading.Thread(target=client.code, args=(command, more + b"\xaa" * 1024))
    swap.start()
    assert inside.wait(30)
    inner = server.begin(other.nexus, 0, rw(opcodes.WRITE_16, 5, 1))
    data = memoryview(bytearray(b"\xbb" * 512))
    assert not server.run(inner, data, nowait=True)
    assert not store.calls
    assert other.code(rw(opcodes.WRITE_16, 6, 1), b"\xcc" * 512) == GOOD
    waiting = threading.Thread(target=server.run, args=(inner, data))
    waiting.start()
    go_on.set()
    swap.join()
    waiting.join()
    assert [call[1] for call in store.calls] == [6 * 512, 4 * 512, 5 * 512]
    assert store.content[4 * 512 : 7 * 512] == b"\xaa" * 512 + b"\xbb" * 512 + b"\xcc" * 512


TIMEOUT = (sense.HARDWARE_ERROR, sense.COMMUNICATION_TIMEOUT)


def status_error(status: int, key: int = 0, code: int = 0) -> StatusError:
    data = sense.encode_fixed(key, code >> 8, code & 0xFF) if key else b""
    return StatusError(errno.EBUSY, "of the other target", status, data)


@pytest.mark.logs("it may have been carried out: of the other target$")
@pytest.mark.parametrize(
    ("command", "more"),
    [
        (cdb.compare_and_write(4, 2), bytes(1024)),
        (cdb.compare_and_write(4, 2, FUA), bytes(1024)),
        (cdb.xdwriteread10(4, 2), b""),
    ],
    ids=["COMPARE AND WRITE", "with FUA", "XDWRITEREAD"],
)
@pytest.mark.parametrize(
    ("error", "written", "read"),
    [
        (status_error(sam.BUSY), TIMEOUT, sam.BUSY),
        (status_error(sam.TASK_SET_FULL), TIMEOUT, sam.TASK_SET_FULL),
        (status_error(sam.CHECK_CONDITION, sense.ABORTED_COMMAND), TIMEOUT, sense.ABORTED_COMMAND),
        (status_error(sam.CHECK_CONDITION, sense.NOT_READY, 0x0401), TIMEOUT, sense.NOT_READY),
        (status_error(sam.CHECK_CONDITION, sense.UNIT_ATTENTION), TIMEOUT, sense.UNIT_ATTENTION),
        (status_error(sam.RESERVATION_CONFLICT), sam.RESERVATION_CONFLICT, None),
        (
            status_error(sam.CHECK_CONDITION, sense.MEDIUM_ERROR, sense.WRITE_ERROR),
            (sense.MEDIUM_ERROR, sense.WRITE_ERROR),
            None,
        ),
    ],
    ids=lambda value: "",
)
def test_a_command_that_reads_first_is_not_to_be_repeated_blindly(
    command: bytes, more: bytes, error: StatusError, written: object, read: int | None
) -> None:
    """A store that is a LUN itself may have written when it fails. Before the write its status is
    passed on, and the command may be repeated."""

    class Lost(FakeStore):
        def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
            super().write(data, offset, durable, nowait)
            raise error

    store = Lost(BLOCKS * 512)
    client = client_of(store)
    answer = client.run(command, more + b"\xaa" * 1024)
    assert written == (answer.code if answer.status == sam.CHECK_CONDITION else answer.status)
    assert not answer.data
    assert store.content[4 * 512 : 6 * 512] == b"\xaa" * 1024
    if read is not None:
        store.failure = error
        answer = client.run(command, more + b"\xbb" * 1024)
        assert read in (answer.status, answer.sense.key)


# -- what can go wrong -----------------------------------------------------------------------------


def test_read_only() -> None:
    store = FakeStore(BLOCKS * 512)
    client = client_of(store, read_only=True)
    for command in (
        *(rw(opcode, 0, 1) for opcode in WRITES),
        cdb.unmap(24),
        cdb.write_same10(0, 1),
        cdb.write_same16(0, 1, ndob=True),
        cdb.compare_and_write(0, 1),
    ):
        assert client.code(command) == WRITE_PROTECTED
    assert client.data(rw(opcodes.READ_16, 0, 1)) == bytes(512)
    assert client.data(rw(opcodes.READ_16, 0, 1, FUA)) == bytes(512)
    assert not store.calls


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, (sense.DATA_PROTECT, sense.SPACE_ALLOCATION_FAILED)),
        (errno.EDQUOT, (sense.DATA_PROTECT, sense.SPACE_ALLOCATION_FAILED)),
        (errno.EROFS, WRITE_PROTECTED),
        (errno.EIO, (sense.MEDIUM_ERROR, sense.WRITE_ERROR)),
    ],
)
def test_errors_of_the_file(
    client: Client, store: FakeStore, block: int, number: int, expected: tuple[int, int]
) -> None:
    store.failure = OSError(number, os.strerror(number))
    assert client.code(rw(opcodes.WRITE_16, 0, 1), bytes(block)) == expected
    # Whatever was in the way, no other flush brings it to the medium.
    lost = (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
    assert client.code(cdb.synchronize_cache16(0, 0)) == lost
    assert client.code(cdb.write_same16(0, 1, ndob=True)) == expected
    store.failure = OSError(errno.EIO, "bad block")
    answer = client.run(rw(opcodes.READ_16, 0, 1))
    assert answer.code == (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR)
    assert answer.data == b""
    # The failed command has left the range: the next one does not wait for ever.
    store.failure = None
    assert client.code(cdb.compare_and_write(0, 1), bytes(store.content[:block]) * 2) == GOOD


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO, errno.ESTALE])
def test_a_device_that_has_gone(client: Client, store: FakeStore, block: int, number: int) -> None:
    """No block is to blame: the errors are no medium errors."""
    store.failure = OSError(number, os.strerror(number))
    for command, data in (
        (rw(opcodes.WRITE_16, 0, 1), bytes(block)),
        (rw(opcodes.READ_16, 0, 1), b""),
        (cdb.write_same16(0, 1, ndob=True), b""),
        (cdb.synchronize_cache16(0, 0), b""),
        (cdb.get_lba_status16(0, 32), b""),
    ):
        expected = (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
        assert client.code(command, data) == expected


@pytest.mark.logs("no memory")
def test_a_command_for_which_there_is_no_memory(
    client: Client, store: FakeStore, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an error, and the target goes on."""

    def none_left(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store, "read_into", none_left)
        for command, data in (
            (cdb.compare_and_write(0, 1), bytes(2 * block)),
            (rw(opcodes.READ_16, 0, 1), b""),
            (cdb.verify16(0, 1), b""),
        ):
            expected = (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
            assert client.code(command, data) == expected
    assert client.code(cdb.compare_and_write(0, 1), bytes(store.content[:block]) * 2) == GOOD


def test_a_compare_and_write_that_was_aborted_while_it_waited_writes_nothing(
    store: FakeStore, block: int
) -> None:
    """For example it was preempted: its blocks are those of another host now."""
    before = bytes(store.content)
    commands = (
        (cdb.compare_and_write(0, 1), before[:block] + bytes(block)),
        (cdb.xdwriteread10(0, 1), bytes(block)),
    )
    unit = unit_of(store, block)
    client = Client(DeviceServer({0: unit}, IQN))
    for command, data in commands:
        assert unit.guard.enter((0, block), nowait=True)
        task = client.server.begin(client.nexus, 0, command)
        buffer = memoryview(bytearray(data))
        thread = threading.Thread(target=client.server.run, args=(task, buffer))
        thread.start()
        # It has announced itself when no other write gets in.
        while thread.is_alive() and unit.guard.enter((0, block), nowait=True):
            unit.guard.leave((0, block))
        task.cancel()
        unit.guard.leave((0, block))
        thread.join()
        assert (task.status, task.sense) == (sam.TASK_ABORTED, b"")
        assert store.content == before and not store.calls


def test_a_read_that_would_wait_is_put_off(client: Client, store: FakeStore, block: int) -> None:
    store.cached = False
    task = client.server.begin(client.nexus, 0, rw(opcodes.READ_16, 3, 2))
    assert not task.may_block
    buffer = memoryview(bytearray(2 * block))
    assert not client.server.run(task, buffer, nowait=True)
    assert client.server.run(task, buffer)
    assert (task.status, task.transferred) == (sam.GOOD, 2 * block)
    assert buffer == store.content[3 * block : 5 * block]
