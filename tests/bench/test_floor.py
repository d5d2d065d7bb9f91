"""The floor (floor.c) serves what is in the file, to one client after another, and has rows: over
what is like iSER on its own target, and over Traditional iSCSI, where it writes, too, on tgtd."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from benchlib import goals, subjects
from benchlib.load import Job, JobFailed, parse_floor
from benchlib.nbd_load import BLOCK, Connection, LoadFailed
from benchlib.sections import SECTIONS, measure
from benchlib.servers import Absent
from benchlib.subjects import Bench, Endpoint

from iserblk.nbd import messages as nbd

BLOCKS = 64
JOB = Job("4k-randread-d4", "randread", BLOCK, 4)
WRITES = Job("4k-randwrite-d4", "randwrite", BLOCK, 4)


@pytest.fixture
def content() -> bytes:
    return os.urandom(BLOCKS * BLOCK)


@pytest.fixture
def bench(tmp_path: Path, content: bytes) -> Iterator[Bench]:
    file = tmp_path / "lun"
    file.write_bytes(content)
    with ExitStack() as stack:
        yield Bench(stack, tmp_path, file, file)


@pytest.fixture(params=[goals.FLOOR, goals.FLOOR_TCP])
def name(request: pytest.FixtureRequest) -> str:
    """Of the subject."""
    return str(request.param)


@pytest.fixture
def floor(bench: Bench, name: str) -> Endpoint:
    """With both its processes."""
    return opener(name)(bench)


@pytest.fixture
def path(floor: Endpoint, bench: Bench, name: str) -> str:
    """Of its socket."""
    return str(bench.path(f"{name}.sock"))


def opener(name: str) -> Callable[[Bench], Endpoint]:
    section = next(each for each in SECTIONS if each.name == "nbd")
    return section.openers[name]


def requests(*offsets: int, length: int = BLOCK) -> bytes:
    """READs; the cookie of each is its offset."""
    return b"".join(
        nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.READ, offset, offset, length)
        for offset in offsets
    )


def exchange(sock: socket.socket, said: bytes, length: int) -> bytes:
    sock.sendall(said)
    return sock.recv(length, socket.MSG_WAITALL)


def test_reads_what_is_in_the_file(path: str, content: bytes) -> None:
    offsets = [number * 7 % BLOCKS * BLOCK for number in range(BLOCKS)]
    for _ in range(2):  # one client after another
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            Connection(sock, "any")
            reply = nbd.SIMPLE_REPLY.size + BLOCK
            got = exchange(sock, requests(*offsets), reply * len(offsets))
            found = {}
            for at in range(0, len(got), reply):
                magic, error, cookie = nbd.SIMPLE_REPLY.unpack_from(got, at)
                assert (magic, error) == (nbd.SIMPLE_REPLY_MAGIC, 0)
                found[cookie] = got[at + nbd.SIMPLE_REPLY.size : at + reply]
            assert found == {offset: content[offset : offset + BLOCK] for offset in offsets}
            # This one leaves without its answers.
            sock.sendall(requests(*offsets))


@pytest.mark.parametrize("name", [goals.FLOOR_TCP], indirect=True)
def test_writes_what_it_is_given(path: str, bench: Bench, content: bytes) -> None:
    """Requests that come in pieces, in another order than that of their blocks."""
    blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
    said = b"".join(
        nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.WRITE, number, number * BLOCK, BLOCK) + block
        for number, block in enumerate(reversed(blocks))
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        Connection(sock, "any")
        for at in range(0, len(said), 30_000):
            sock.sendall(said[at : at + 30_000])
        got = sock.recv(nbd.SIMPLE_REPLY.size * BLOCKS, socket.MSG_WAITALL)
    replies = list(nbd.SIMPLE_REPLY.iter_unpack(got))
    assert sorted(replies) == [(nbd.SIMPLE_REPLY_MAGIC, 0, number) for number in range(BLOCKS)]
    assert bench.file.read_bytes() == b"".join(reversed(blocks))


@pytest.mark.parametrize(
    ("name", "length"), [(goals.FLOOR, BLOCK), (goals.FLOOR_TCP, 512)], indirect=["name"]
)
def test_a_write_that_it_cannot_do_ends_it_with_words(
    floor: Endpoint, path: str, length: int
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        Connection(sock, "any")
        sock.sendall(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.WRITE, 0, 0, length))
        assert sock.recv(1) == b""
    server = floor.servers["floor"]
    with suppress(Absent):  # it may end between two looks
        server.wait_until(lambda: not server.running())
    assert server.last_words() == "floor: a write: not understood"


@pytest.mark.parametrize(("offset", "length"), [(0, 8192), (512, BLOCK), (BLOCKS * BLOCK, BLOCK)])
def test_other_requests_are_refused(path: str, offset: int, length: int) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        Connection(sock, "any")
        got = exchange(sock, requests(offset, length=length), nbd.SIMPLE_REPLY.size)
    assert nbd.SIMPLE_REPLY.unpack(got) == (nbd.SIMPLE_REPLY_MAGIC, nbd.EINVAL, offset)


def test_connection_that_is_no_nbd_client_ends_the_floor_with_words(
    floor: Endpoint, path: str
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.recv(18, socket.MSG_WAITALL)
        sock.sendall(struct.pack(">I", 3) + bytes(16))
        assert sock.recv(1) == b""
    server = floor.servers["floor"]
    with suppress(Absent):  # it may end between two looks
        server.wait_until(lambda: not server.running())
    assert server.last_words() == "floor: an option of the client: not understood"


def test_it_has_rows_with_the_clients_of_the_others(bench: Bench, name: str) -> None:
    section = next(each for each in SECTIONS if each.name == "nbd")
    jobs = {row.job.name for row in section.rows(f"nbd/*/{name}")}
    written = {"4k-randwrite-d1", "4k-randwrite-d32"} if name == goals.FLOOR_TCP else set()
    assert jobs == {"4k-randread-d1", "4k-randread-d32", *written}
    endpoint = opener(name)(bench)
    target = {goals.FLOOR: "floor target", goals.FLOOR_TCP: "tgtd"}[name]
    for job in (JOB, WRITES) if written else (JOB,):
        sample = measure(endpoint, job, 0.2)
        assert sample.measured.ios > 0
        assert list(sample.cpu_seconds) == ["floor", target, "fio"]


@pytest.mark.parametrize(("block", "depth"), [(BLOCK, 1), (BLOCK, 32), (32 * BLOCK, 8)])
def test_it_reads_by_itself(bench: Bench, block: int, depth: int) -> None:
    """A row of the API: 32 blocks come in more than one Data-In."""
    endpoint = subjects.api_floor_tcp(bench)
    sample = measure(endpoint, Job("any", "randread", block, depth), 0.2)
    measured = sample.measured
    assert measured.ios > depth and measured.bytes == measured.ios * block
    assert measured.seconds >= 0.2
    assert list(sample.cpu_seconds) == ["tgtd", "floor"]
    section = next(each for each in SECTIONS if each.name == "api")
    assert section.openers[goals.FLOOR_TCP] is subjects.api_floor_tcp


def test_a_lun_that_is_smaller_than_a_block_ends_it_with_words(bench: Bench) -> None:
    endpoint = subjects.api_floor_tcp(bench)
    with pytest.raises(JobFailed, match="floor: SIZE, BLOCK or DEPTH"):
        measure(endpoint, Job("any", "randread", 2 * BLOCKS * BLOCK, 1), 0.2)


@pytest.mark.parametrize("output", ["", "5", "0 1.0", "five 1.0", "5 1.0 2"])
def test_what_it_does_not_print_is_no_measurement(output: str) -> None:
    with pytest.raises(JobFailed, match="floor"):
        parse_floor(output, JOB, 1.0)


def test_without_isal_it_is_absent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "ISAL", Path("/nowhere/crc.h"))
    with pytest.raises(Absent, match="libisal-dev is not installed"):
        subjects.nbd_floor(bench)


@pytest.mark.parametrize("name", [goals.FLOOR])
def test_a_file_that_is_smaller_than_told_fails_the_reads(
    floor: Endpoint, path: str, bench: Bench
) -> None:
    os.truncate(bench.file, BLOCK)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        connection = Connection(sock, "any")
        for _ in range(BLOCKS):
            connection.request()
        connection.send()
        with pytest.raises((LoadFailed, ConnectionError)):
            while True:
                connection.answered()
    target = floor.servers["floor target"]
    target.wait_until(lambda: not target.running())
    assert target.last_words().startswith("floor: the file")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{subjects.PEER_IQN}/7", "the LUN's status"),
        (f"{subjects.PEER_IQN}-other/1", "the answer to the login"),
    ],
)
def test_what_the_target_does_not_have_ends_the_floor_with_words(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    tgtd, url = bench.tgtd()
    portal = url.partition(subjects.PEER_IQN)[0]
    monkeypatch.setattr(bench, "tgtd", lambda: (tgtd, portal + path))
    with pytest.raises(Absent, match=f"ended with status 1: floor: {words}"):
        subjects.nbd_floor_tcp(bench)
