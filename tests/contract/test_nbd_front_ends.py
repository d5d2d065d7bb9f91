"""What holds for both NBD front-ends, our server and nbdkit with the plugin, as libnbd sees it.

The disks are fake: their log shows what a request of a client has become. Tests with real disks are
in tests/integration/test_accept_nbd.py.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.nbd_servers import (
    BY_ISERBLK,
    SERVERS,
    Server,
    Start,
    Starter,
    exchange_many,
    libnbd,
)
from tests.support.until import until_blocking

nbd = libnbd()
MIB = 1 << 20


@pytest.fixture(params=SERVERS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    starter = Starter(request.param, tmp_path)
    yield starter
    starter.close()


def refused(call: Callable[[], object]) -> int:
    """The errno of a request that must fail."""
    with pytest.raises(nbd.Error) as caught:
        call()
    return caught.value.errnum  # type: ignore[no-any-return]


def status(client: Any, length: int, offset: int, flags: int = 0) -> list[tuple[int, int]]:
    """The extents that BLOCK_STATUS tells of: lengths, and NBD_STATE_HOLE | NBD_STATE_ZERO."""
    found: list[int] = []

    def take(context: str, at: int, entries: list[int], error: object) -> int:
        assert (context, at) == ("base:allocation", offset)
        found.extend(entries)
        return 0

    client.block_status(length, offset, take, flags)
    return list(zip(found[::2], found[1::2], strict=True))


# --- exports -----------------------------------------------------------------------------------


def test_what_is_advertised(start: Start) -> None:
    client = start().connect()
    assert client.get_size() == 8 * MIB
    assert client.can_flush() and client.can_fua() and client.can_trim() and client.can_zero()
    assert client.can_fast_zero() and client.can_cache() and client.can_multi_conn()
    assert client.can_df() and client.get_structured_replies_negotiated()
    assert client.can_meta_context("base:allocation")
    assert not client.is_read_only() and not client.is_rotational()
    assert client.get_block_size(nbd.SIZE_MINIMUM) == 1
    assert client.get_block_size(nbd.SIZE_PREFERRED) == 4096
    assert client.get_block_size(nbd.SIZE_MAXIMUM) == 32 * MIB


def test_what_a_lun_cannot_do_is_not_advertised(start: Start) -> None:
    lun = {"can_trim": False, "rotational": True, "physical_block_size": 65536}
    client = start(luns=[lun]).connect()
    assert not client.can_trim()
    assert client.is_rotational()
    assert client.get_block_size(nbd.SIZE_PREFERRED) == 65536
    assert client.can_zero()  # the disk writes zeroes then
    client.set_strict_mode(0)
    assert refused(lambda: client.trim(4096, 0)) == errno.EINVAL
    client.pwrite(b"x", 0)  # goes on


def test_several_luns_are_exports(start: Start) -> None:
    server = start(luns=[{}, {"size": MIB}])
    lister = server.options()
    listed: list[str] = []
    lister.opt_list(lambda name, description: listed.append(f"{name}: {description}"))
    lister.opt_abort()
    assert listed == [
        "lun0: iserblk fake, iqn.2026-11.example:fake LUN 0",
        "lun1: iserblk fake, iqn.2026-11.example:fake LUN 1",
    ]
    first, second = server.connect("lun0"), server.connect("lun1")
    assert server.connect("").get_size() == first.get_size() == 8 * MIB
    assert second.get_size() == MIB
    first.pwrite(b"first", 0)
    assert second.pread(5, 0) == bytes(5)


def test_the_default_export_has_a_name_and_a_description(start: Start) -> None:
    server = start(luns=[{}, {}])
    client = server.client()
    client.set_full_info(True)
    client.connect_unix(str(server.socket))
    assert client.get_canonical_export_name() == "lun0"
    assert client.get_export_description() == "iserblk fake, iqn.2026-11.example:fake LUN 0"


def test_an_unknown_export_is_refused(start: Start) -> None:
    server = start()
    for name in ("lun7", "LUN0", "lun0 ", "лун", "x" * 4096):
        assert refused(lambda: server.connect(name)) == errno.ENOENT  # noqa: B023
    assert server.connect("lun0").pread(1, 0) == b"\0"


def test_options_in_any_order(start: Start) -> None:
    """INFO of several exports, and of one that is not there, then GO."""
    server = start(luns=[{}, {"size": MIB}])
    client = server.options()
    client.set_export_name("lun1")
    client.opt_info()
    assert client.get_size() == MIB
    client.set_export_name("lun5")
    assert refused(client.opt_info) == errno.ENOENT
    client.set_export_name("lun0")
    client.opt_info()
    assert client.get_size() == 8 * MIB
    contexts: list[str] = []
    client.opt_list_meta_context(contexts.append)
    assert contexts == ["base:allocation"]
    client.set_export_name("lun1")
    client.opt_go()
    assert client.get_size() == MIB
    assert client.pread(1, MIB - 1) == b"\0"


def test_a_client_of_old(start: Start) -> None:
    """EXPORT_NAME, without the fixed newstyle, structured replies or sizes."""
    server = start()
    client = server.client("lun0")
    client.set_handshake_flags(0)
    client.set_request_structured_replies(False)
    client.connect_unix(str(server.socket))
    assert client.get_protocol() == "newstyle"
    assert not client.get_structured_replies_negotiated()
    assert client.get_size() == 8 * MIB
    client.pwrite(b"of old", 100)
    assert client.pread(6, 100) == b"of old"


def test_the_size_is_that_of_now(start: Start) -> None:
    """A client that connects after a LUN has grown sees it; a connected one may use what it knows
    of."""
    server = start()
    before = server.connect()
    assert before.get_size() == 8 * MIB
    server.size.write_text(str(16 * MIB))
    after = server.connect()
    assert after.get_size() == 16 * MIB
    after.pwrite(b"behind", 12 * MIB)
    assert after.pread(6, 12 * MIB) == b"behind"
    assert before.pread(6, 0) == bytes(6)


def test_a_size_that_cannot_be_asked_for_is_the_last_one_known(start: Start) -> None:
    server = start(refresh="CommandTimeout")
    assert server.connect().get_size() == 8 * MIB
    assert "lun0: the size is the last one known: refresh: made to fail" in server.end()


# --- reading and writing -------------------------------------------------------------------------


@pytest.mark.parametrize("structured", [True, False])
def test_what_was_written_is_read(start: Start, structured: bool) -> None:
    server = start()
    client = server.client()
    client.set_request_structured_replies(structured)
    client.connect_unix(str(server.socket))
    for offset in (0, 1, 511, 4096, 8 * MIB - 70_000):
        data = os.urandom(70_000)
        client.pwrite(data, offset)
        assert client.pread(len(data), offset) == data
        for length in (1, 13, 512, 4097, 65_536, 65_537):
            client.pwrite(data[:length], offset)
            assert client.pread(length, offset) == data[:length]


def test_requests_of_32_mib(start: Start) -> None:
    client = start(luns=[{"size": 32 * MIB}]).connect()
    data = os.urandom(32 * MIB)
    client.pwrite(data, 0)
    assert client.pread(len(data), 0) == data


def test_a_read_that_is_not_to_be_cut(start: Start) -> None:
    client = start().connect()
    client.pwrite(b"x" * 8192, 4096)
    parts: list[tuple[int, int]] = []

    def take(part: bytes, offset: int, kind: int, error: object) -> None:
        parts.append((offset, len(part)))

    client.pread_structured(MIB, 0, take, nbd.CMD_FLAG_DF)
    assert parts == [(0, MIB)]


def test_requests_of_nothing(start: Start) -> None:
    """Their effect is not specified; the connection stays in step."""
    client = start().connect()
    client.set_strict_mode(0)
    calls: list[Callable[[], object]] = [
        lambda: client.pread(0, 0),
        lambda: client.pwrite(b"", 0),
        lambda: client.trim(0, 0),
        lambda: client.zero(0, 0),
        lambda: client.cache(0, 0),
    ]
    for call in calls:
        try:
            call()
        except nbd.Error as error:
            assert error.errnum in (errno.EINVAL, errno.ENOSPC)
    client.pwrite(b"x", 5)
    assert client.pread(1, 5) == b"x"


def test_many_requests_at_once_keep_apart(start: Start) -> None:
    """Several connections in threads, one after the other."""
    server = start()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            client = server.connect()
            data = bytes([number, turn]) * 2048
            for slot in range(8):
                client.pwrite(data, number * 64 * 1024 + slot * 4096)
            for slot in range(8):
                if client.pread(4096, number * 64 * 1024 + slot * 4096) != data:
                    wrong.append(number)
            client.shutdown()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.process.poll() is None


def test_many_requests_of_one_connection(start: Start) -> None:
    """Of all sizes, with more bytes than a server keeps for one client."""
    client = start(luns=[{"size": 64 * MIB}]).connect()
    exchange_many(client, 64 * MIB)


def test_connections_see_the_writes_of_each_other(start: Start) -> None:
    """Which multi-conn promises: a flush by one is for the writes of all."""
    server = start()
    one, other = server.connect(), server.connect()
    one.pwrite(b"written", 0)
    assert other.pread(7, 0) == b"written"
    other.flush()
    assert server.served()[-1] == "lun0 flush"


def test_memory_is_given_back(start: Start) -> None:
    """malloc keeps some memory, but more connections do not need more of it."""
    server = start()
    before = server.memory
    for _ in range(4):
        client = server.connect()
        buffers = [nbd.Buffer(MIB) for _ in range(64)]
        for number, buffer in enumerate(buffers):
            client.aio_pread(buffer, number % 8 * MIB)
        while client.aio_in_flight():
            client.poll(-1)
        client.shutdown()
        server.clients.remove(client)
    until_blocking(lambda: server.memory <= before + 24 * MIB)


# --- the other commands, and flags ---------------------------------------------------------------


def test_flush_trim_zero_cache_and_their_flags(start: Start) -> None:
    server = start()
    client = server.connect()
    client.pwrite(b"x" * 4096, 4096, nbd.CMD_FLAG_FUA)
    client.pwrite(b"x" * 4096, 0)
    client.flush()
    client.trim(4096, 8192)
    client.trim(4096, 8192, nbd.CMD_FLAG_FUA)
    client.zero(512, 1024)
    client.zero(512, 1024, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    client.zero(512, 1024, nbd.CMD_FLAG_FAST_ZERO)
    client.cache(100, 200)
    assert server.served() == [
        "lun0 fua write 4096 4096",
        "lun0 flush",
        "lun0 trim 8192 4096 fua=False",
        "lun0 trim 8192 4096 fua=True",
        "lun0 zero 1024 512 may_trim=True fast=False fua=False",
        "lun0 zero 1024 512 may_trim=False fast=False fua=True",
        "lun0 zero 1024 512 may_trim=True fast=True fua=False",
        "lun0 cache 200 100",
    ]


def test_a_fast_zero_that_is_not_fast_is_refused(start: Start) -> None:
    client = start().connect()
    client.pwrite(b"x" * 4096, 0)
    flags = nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE
    assert refused(lambda: client.zero(4096, 0, flags)) == errno.ENOTSUP
    assert client.pread(4096, 0) == b"x" * 4096
    client.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)
    assert client.pread(4096, 0) == bytes(4096)


def test_trims_and_zeroes_of_most_of_4_gib(start: Start) -> None:
    """Their length is not that of a payload."""
    server = start()
    client = server.connect()
    client.trim(8 * MIB, 0)
    client.zero(8 * MIB - 1, 1)
    client.set_strict_mode(0)
    assert refused(lambda: client.zero((1 << 32) - 1, 0)) == errno.ENOSPC
    assert refused(lambda: client.trim((1 << 32) - 1, 0)) == errno.EINVAL
    assert server.served()[:2] == [
        f"lun0 trim 0 {8 * MIB} fua=False",
        f"lun0 zero 1 {8 * MIB - 1} may_trim=True fast=False fua=False",
    ]


def test_extents(start: Start) -> None:
    client = start().connect()
    client.pwrite(b"x" * 8192, 4096)
    found = status(client, 16384, 0)
    assert found[:2] == [(4096, 3), (8192, 0)]
    assert found[2][1] == 3
    # From the middle of an extent on, and one only.
    assert status(client, 8192, 6000, nbd.CMD_FLAG_REQ_ONE) == [(4096 + 8192 - 6000, 0)]
    assert status(client, 100, 6000, nbd.CMD_FLAG_REQ_ONE) == [(100, 0)]


def test_extents_of_many_pieces(start: Start) -> None:
    """A whole LUN in extents of 4 KiB: those that an answer leaves out are asked for again."""
    client = start().connect()
    for at in range(0, 2 * MIB, 8192):
        client.pwrite(b"x", at)
    found: list[tuple[int, int]] = []
    at = 0
    while at < 8 * MIB:
        told = status(client, 8 * MIB - at, at)
        found += told
        at += sum(length for length, _ in told)
    assert found == [(4096, 0), (4096, 3)] * 255 + [(4096, 0), (8 * MIB - 2 * MIB + 4096, 3)]


def test_no_extents_where_they_were_not_asked_for(start: Start) -> None:
    server = start()
    client = libnbd().NBD()
    server.clients.append(client)
    client.connect_unix(str(server.socket))
    client.set_strict_mode(0)
    assert refused(lambda: status(client, 4096, 0))
    client.pwrite(b"x", 0)


# --- what is refused -----------------------------------------------------------------------------


def changes(client: Any) -> list[Callable[[], object]]:
    return [
        lambda: client.pwrite(b"x" * 4096, 0),
        lambda: client.pwrite(b"x" * MIB, 0),
        lambda: client.trim(4096, 0),
        lambda: client.zero(4096, 0),
        lambda: client.pwrite(b"x" * 4096, 0, nbd.CMD_FLAG_FUA),
    ]


@pytest.mark.parametrize("by_lun", [True, False])
def test_read_only(start: Start, by_lun: bool) -> None:
    """By the LUN, or because the server was told so."""
    server = start(luns=[{"read_only": True}]) if by_lun else start(read_only=True)
    client = server.connect()
    assert client.is_read_only()
    assert not client.can_trim() and not client.can_zero() and not client.can_fast_zero()
    client.set_strict_mode(0)
    for call in changes(client):
        assert refused(call) == errno.EPERM
    assert client.pread(4096, 0) == bytes(4096)
    client.flush()
    client.cache(4096, 0)
    assert status(client, 4096, 0) != []
    assert not [line for line in server.served() if "write" in line or "zero" in line]


@pytest.mark.parametrize("at", [8 * MIB, 8 * MIB - 4095, (1 << 63) - 4096])
def test_past_the_end(start: Start, at: int) -> None:
    """ENOSPC for what writes; and the client goes on."""
    client = start().connect()
    client.set_strict_mode(0)
    assert refused(lambda: client.pread(4096, at)) == errno.EINVAL
    assert refused(lambda: client.pwrite(b"x" * 4096, at)) == errno.ENOSPC
    assert refused(lambda: client.pwrite(bytes(MIB), at)) == errno.ENOSPC
    assert refused(lambda: client.zero(4096, at)) == errno.ENOSPC
    assert refused(lambda: client.trim(4096, at)) == errno.EINVAL
    assert refused(lambda: client.cache(4096, at)) == errno.EINVAL
    assert refused(lambda: status(client, 4096, at)) == errno.EINVAL
    client.pwrite(b"end", 8 * MIB - 3)
    assert client.pread(3, 8 * MIB - 3) == b"end"


def test_flags_that_do_not_go_with_a_command(start: Start) -> None:
    client = start().connect()
    client.set_strict_mode(0)
    assert refused(lambda: client.pread(1, 0, 1 << 9)) == errno.EINVAL
    assert refused(lambda: client.flush(1 << 9)) == errno.EINVAL
    assert refused(lambda: client.pwrite(b"x" * 100_000, 0, 1 << 9)) == errno.EINVAL
    assert client.pread(1, 0) == b"\0"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        ("CommandTimeout", errno.EIO),
        ("ConnectionLost", errno.EIO),
        ("ScsiError", errno.EIO),
        ("ReservationConflict", errno.EIO),
        ("WriteProtected", errno.EPERM),
        ("OutOfSpace", errno.ENOSPC),
    ],
)
def test_errors_reach_the_client_as_errno(start: Start, error: str, number: int) -> None:
    faults = dict.fromkeys(("write", "read", "flush", "trim", "zero", "extents", "cache"), error)
    server = start(**faults)
    client = server.connect()
    for call in (
        lambda: client.pwrite(b"x", 0),
        lambda: client.pwrite(b"x", 0, nbd.CMD_FLAG_FUA),
        lambda: client.pread(1, 0),
        client.flush,
        lambda: client.trim(1, 0),
        lambda: client.zero(1, 0),
        lambda: client.cache(1, 0),
        lambda: status(client, 4096, 0),
    ):
        assert refused(call) == number
    said = server.end().splitlines()
    assert "lun0: the last flush failed, data may be lost: flush: made to fail" in said[-1]
    if server.kind == BY_ISERBLK:
        # The client has the text of what is no failure of the target.
        logged = 8 if number == errno.EIO else 0
        assert len(said) == logged + 1
        assert all("made to fail" in line for line in said)
        assert server.process.returncode == 1


def test_ending_flushes_and_logs_out(start: Start) -> None:
    """Only disks that were written are flushed: while a target is away, each flush takes long."""
    server = start(luns=[{}, {}, {"read_only": True}])
    server.connect().pwrite(b"x", 0)
    server.end()
    assert server.ended_well
    assert server.log()[-2:] == ["lun0 flush", "close"]
    assert "lun1 flush" not in server.log()


def test_a_login_that_fails(start: Start) -> None:
    server = start(open="ConnectFailed")
    _, said = server.process.communicate(timeout=60)
    assert server.process.returncode == (4 if server.kind == BY_ISERBLK else 1)
    (line,) = said.splitlines()
    assert line.endswith("open: made to fail")


def test_nothing_stays_open_of_a_server_that_died(start: Start) -> None:
    """``close`` leaves no pipe or socket open: else a later test fails when it is collected."""
    server: Server = start()
    server.connect()
    server.process.kill()
    server.process.wait()
    server.close()
    assert server.process.stderr is not None and server.process.stderr.closed
    server.close()


# --- losses of writes ----------------------------------------------------------------------------


@pytest.fixture
def lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have the disk lose what was written, as a request of a client will find."""
    path = tmp_path / "lose"
    monkeypatch.setenv("FAKE_LOSE", str(path))

    def lost(client: Any) -> None:
        client.pwrite(b"x", 0)
        path.touch()
        client.pwrite(b"x", 0, flags=nbd.CMD_FLAG_FUA)

    return lost


def hears(client: Any) -> bool:
    """Its flush fails."""
    try:
        client.flush()
    except nbd.Error as error:
        assert error.errnum == errno.EIO
        return True
    return False


def test_each_client_hears_of_a_loss_once(start: Start, lose: Callable[[Any], None]) -> None:
    """Whichever wrote; and of nothing that was told before it came."""
    server = start()
    one, other = server.connect(), server.connect()
    lose(one)
    for each in (other, one):
        assert hears(each) and not hears(each)
    assert not hears(server.connect())
    said = server.end()
    assert server.ended_well and "the last flush" not in said and "not heard" not in said


def test_who_connects_behind_a_loss_that_was_not_told(
    start: Start, lose: Callable[[Any], None]
) -> None:
    server = start()
    lose(server.connect())
    server.leave()
    assert hears(server.connect())
    # (Where the server sees the end of the other client behind that, the next one hears, too.)
    until_blocking(lambda: not hears(server.connect()))


def test_who_connects_while_another_has_not_heard(
    start: Start, lose: Callable[[Any], None]
) -> None:
    """It may be that other one, which comes again before the server notices its end."""
    server = start()
    one, other = server.connect(), server.connect()
    lose(one)
    assert hears(other)
    for each in (server.connect(), one):
        assert hears(each) and not hears(each)
    assert not hears(other) and not hears(server.connect())
    said = server.end()
    assert server.ended_well and "the last flush" not in said and "not heard" not in said


def test_a_client_that_is_gone_before_the_answer(
    start: Start, lose: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects again, and repeats its flush."""
    hold = tmp_path / "hold"
    monkeypatch.setenv("FAKE_HOLD", str(hold))
    server = start()
    one = server.connect()
    lose(one)
    hold.touch()
    one.aio_flush()
    while one.aio_get_direction() & nbd.AIO_DIRECTION_WRITE:
        one.aio_notify_write()
    # (nbdkit carries out no request whose client is found gone before.)
    until_blocking(lambda: "a flush waits" in server.log())
    server.clients.remove(one)
    del one
    hold.unlink()
    until_blocking(lambda: "writes were lost" in _said(server))
    again = server.connect()
    assert hears(again) and not hears(again)


def _said(server: Server) -> str:
    """What the server has written to stderr by now."""
    assert server.process.stderr is not None
    descriptor = server.process.stderr.fileno()
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16).decode()
    except BlockingIOError:
        return ""
    finally:
        os.set_blocking(descriptor, True)


def test_what_no_client_was_told_of_at_the_end(start: Start, lose: Callable[[Any], None]) -> None:
    server = start()
    lose(server.connect())
    assert "lun0: writes were lost" in server.end()
