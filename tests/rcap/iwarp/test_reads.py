"""RDMA Reads under way: where a response comes from, and what a Read still waits for."""

from __future__ import annotations

from iserblk.rcap import seam
from iserblk.rcap.iwarp.reads import OutstandingRead, ReadResponse
from iserblk.rcap.stags import StagTable


def test_a_response_is_a_view_of_its_source() -> None:
    source = bytearray(b"old data")
    response = ReadResponse(0x77, 1 << 40, memoryview(source), None)
    assert (response.sink_stag, response.sink_to, response.size) == (0x77, 1 << 40, 8)
    source[:3] = b"new"
    assert bytes(response.view) == b"new data"


def test_a_detached_response_has_a_copy_and_frees_its_source() -> None:
    """The owner may then change the memory, and even resize it."""
    source = bytearray(b"old data")
    table = StagTable()
    region = table.owned(table.advertise(memoryview(source), seam.REMOTE_READ))
    response = ReadResponse(0x77, 0, region.view[:], region)
    response.detach()
    assert response.region is None
    source[:3] = b"new"
    assert bytes(response.view) == b"old data" and response.size == 8
    table.release(region)
    source.clear()  # BufferError while a view of it is left
    assert bytes(response.view) == b"old data"


def test_a_read_waits_for_its_whole_sink() -> None:
    sink = bytearray(1000)
    read = OutstandingRead(9, memoryview(sink), "token")
    assert (read.stag, read.length, read.placed, read.token) == (9, 1000, 0, "token")
    read.sink[:2] = b"ab"
    assert sink[:2] == b"ab"


def test_a_read_without_a_sink_is_empty() -> None:
    read = OutstandingRead(1, None, "token")
    assert read.length == 0 and len(read.sink) == 0
