"""Layouts that are written often, and what a buffer is, in both forms."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk import octets
from iserblk.datamover import iser
from iserblk.iscsi import bhs
from iserblk.nbd import messages
from iserblk.scsi import cdb

COMPILED = "iserblk._octets"
MOST = {"B": 2**8 - 1, "H": 2**16 - 1, "I": 2**32 - 1, "Q": 2**64 - 1}


@pytest.fixture
def compiled() -> Any:
    pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
    return importlib.import_module(COMPILED)


def test_what_is_bound_is_compiled(compiled: Any) -> None:
    assert octets.is_flat is compiled.is_flat
    for bound in (
        iser.pack_control,
        bhs.pack_scsi_command,
        bhs.pack_scsi_response,
        messages.pack_simple_reply,
        messages.pack_data_chunk,
        messages.pack_extended_data_chunk,
    ):
        assert isinstance(bound.__self__, compiled.Layout)  # type: ignore[attr-defined]
    for bound in (
        iser.unpack_message,
        iser.unpack_ends,
        bhs.unpack_scsi_command,
        bhs.unpack_scsi_response,
        bhs.unpack_data_in_place,
        cdb.unpack10,
        cdb.unpack16,
        messages.unpack_request,
        messages.unpack_extended_request,
    ):
        assert isinstance(bound.__self__, compiled.Layout)  # type: ignore[attr-defined]


def number(kind: str) -> st.SearchStrategy[int]:
    edges = st.sampled_from([0, 1, 2**30 - 1, 2**30, 2**31, 2**60, 2**62, 2**63, MOST[kind]])
    return edges.filter(lambda value: value <= MOST[kind]) | st.integers(0, MOST[kind])


FIELD = st.one_of(
    *(st.tuples(st.just(kind), number(kind).map(lambda value: [value])) for kind in MOST),
    st.integers(0, 20).flatmap(
        lambda size: st.tuples(
            st.just(f"{size}s"),
            st.binary(max_size=24).map(lambda data: [data]),
        )
    ),
    st.integers(0, 9).map(lambda size: (f"{size}x", [])),
    st.just(("x", [])),
    st.lists(number("H"), min_size=3, max_size=3).map(lambda values: ("3H", values)),
)


def test_any_layout_is_written_as_struct_does(compiled: Any) -> None:
    @given(st.lists(FIELD, min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 9))
    def agrees(fields: list[tuple[str, list[Any]]], before: int, behind: int) -> None:
        layout = struct.Struct(">" + "".join(part for part, _ in fields))
        values = [value for _, each in fields for value in each]
        wanted = bytearray(b"\xee" * (before + layout.size + behind))
        layout.pack_into(wanted, before, *values)
        found = bytearray(b"\xee" * len(wanted))
        compiled.Layout(layout.format).pack_into(memoryview(found), before, *values)
        assert found == wanted

    agrees()


def test_any_layout_is_read_as_struct_does(compiled: Any) -> None:
    @given(st.lists(FIELD, min_size=1, max_size=5), st.integers(0, 9), st.data())
    def agrees(fields: list[tuple[str, list[Any]]], before: int, draw: st.DataObject) -> None:
        layout = struct.Struct(">" + "".join(part for part, _ in fields))
        memory = bytes(before) + draw.draw(st.binary(min_size=layout.size, max_size=200))
        wanted = layout.unpack_from(memory, before)
        unpack_from = compiled.Layout(layout.format).unpack_from
        assert unpack_from(memory, before) == wanted
        assert unpack_from(memoryview(memory), before) == wanted

    agrees()


def test_bytes_from_a_bytearray(compiled: Any) -> None:
    memory = bytearray(6)
    compiled.Layout(">4sH").pack_into(memory, 0, bytearray(b"abcd"), 1)
    assert memory == b"abcd\0\1"


@pytest.mark.parametrize("name", ["<I", "=I", "I", "", ">", ">i", ">P", ">4", ">f", ">17I"])
def test_layouts_of_another_kind(compiled: Any, name: str) -> None:
    with pytest.raises(struct.error):
        compiled.Layout(name)


@pytest.fixture(params=["compiled", "as written"])
def pack_into(request: pytest.FixtureRequest) -> Callable[..., None]:
    layout = struct.Struct(">BHIQ2s")
    if request.param == "as written":
        return layout.pack_into
    pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
    packed: Callable[..., None] = octets.packer(layout)
    return packed


FIELDS = (1, 2, 3, 4, b"ab")


@pytest.fixture(params=["compiled", "as written"])
def unpack_from(request: pytest.FixtureRequest) -> Callable[..., Any]:
    layout = struct.Struct(">BHIQ2s")
    if request.param == "as written":
        return layout.unpack_from
    pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
    return octets.unpacker(layout)


def test_a_layout_is_read_where_it_lies(unpack_from: Callable[..., Any]) -> None:
    memory = bytearray(20)
    struct.pack_into(">BHIQ2s", memory, 3, *FIELDS)
    for buffer in (memory, bytes(memory), memoryview(memory)):
        assert unpack_from(buffer, 3) == FIELDS


def test_the_largest_numbers_are_read(unpack_from: Callable[..., Any]) -> None:
    assert unpack_from(b"\xff" * 17, 0) == (*MOST.values(), b"\xff\xff")


@pytest.mark.parametrize("at", [4, 17, 2**31, 2**32, 2**62, 2**63 - 1])
def test_a_layout_that_is_not_there(unpack_from: Callable[..., Any], at: int) -> None:
    with pytest.raises(struct.error):
        unpack_from(bytes(20), at)


@pytest.mark.parametrize("wrong", [(), (bytes(20),), (bytes(20), 0, 0), (bytes(20), "0")])
def test_what_is_no_buffer_and_offset(compiled: Any, wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        compiled.Layout(">BHIQ2s").unpack_from(*wrong)


def test_an_offset_below_the_buffer(compiled: Any) -> None:
    with pytest.raises(struct.error):
        compiled.Layout(">BHIQ2s").unpack_from(bytes(20), -1)


@pytest.mark.parametrize("wrong", [None, 7, "text", memoryview(bytes(40))[::2]])
def test_what_cannot_be_read(unpack_from: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        unpack_from(wrong, 0)


@pytest.mark.parametrize("at", [4, 17, 2**31, 2**32, 2**62, 2**63 - 1])
def test_a_layout_that_does_not_fit(pack_into: Callable[..., None], at: int) -> None:
    memory = bytearray(20)
    with pytest.raises(struct.error):
        pack_into(memory, at, *FIELDS)
    assert memory == bytes(20)


@pytest.mark.parametrize(
    ("index", "wrong"),
    [(0, 2**8), (1, 2**16), (2, 2**32), (3, 2**64), (0, -1), (3, -1), (2, "x"), (1, None), (4, 7)],
)
def test_values_that_no_field_takes(
    pack_into: Callable[..., None], index: int, wrong: object
) -> None:
    values: list[object] = [*FIELDS]
    values[index] = wrong
    with pytest.raises(struct.error):
        pack_into(bytearray(20), 0, *values)


@pytest.mark.parametrize("count", [0, 4, 6])
def test_another_number_of_values(pack_into: Callable[..., None], count: int) -> None:
    with pytest.raises(struct.error):
        pack_into(bytearray(20), 0, *(FIELDS * 2)[:count])


def test_memory_that_is_read_only(pack_into: Callable[..., None]) -> None:
    with pytest.raises((BufferError, TypeError)):
        pack_into(bytes(20), 0, *FIELDS)
    with pytest.raises((TypeError, struct.error)):
        pack_into(bytearray(20))


@pytest.fixture(params=["compiled", "as written"])
def is_flat(request: pytest.FixtureRequest) -> Callable[[memoryview, bool], bool]:
    flat: Callable[[memoryview, bool], bool] = vars(octets)["_is_flat"]
    if request.param == "compiled":
        compiled = pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
        flat = compiled.is_flat
    return flat


def test_what_is_flat(is_flat: Callable[[memoryview, bool], bool]) -> None:
    data = bytearray(16)
    for flat in (memoryview(data), memoryview(data)[3:9], memoryview(b"")[:0]):
        assert is_flat(flat, False) is True
    assert is_flat(memoryview(data), True) is True
    assert is_flat(memoryview(bytes(4)), True) is False
    views: tuple[Any, ...] = (
        memoryview(data)[::2],
        memoryview(data)[::-1],
        memoryview(data).cast("H"),
        memoryview(data).cast("b"),
        memoryview(data).cast("c"),
        memoryview(data).cast("B", (4, 4)),
        memoryview(data).cast("B", (16, 1)),
    )
    for view in views:
        assert is_flat(view, False) is False


@pytest.mark.parametrize("wrong", [bytearray(4), b"abcd", None, 7])
def test_what_is_no_memoryview(is_flat: Callable[[Any, bool], bool], wrong: object) -> None:
    assert is_flat(wrong, False) is False


def test_a_view_that_was_released(is_flat: Callable[[memoryview, bool], bool]) -> None:
    view = memoryview(bytes(4))
    view.release()
    with pytest.raises(ValueError, match="released"):
        is_flat(view, False)


def test_the_slots_of_cdbs_are_written_whole() -> None:
    for pack in (cdb.pack_read10, cdb.pack_write10, cdb.pack_read16, cdb.pack_write16):
        slot = bytearray(b"\xff" * 16)
        pack(slot, 0x01020304, 0x0506, cdb.FUA)
        short = pack in (cdb.pack_read10, cdb.pack_write10)
        layout = cdb.RW10 if short else cdb.RW16
        fields = layout.unpack_from(slot)
        opcode = fields[0]
        number, blocks = (fields[2], fields[4]) if short else (fields[2], fields[3])
        assert (fields[1], number, blocks) == (cdb.FUA, 0x01020304, 0x0506)
        assert not any(slot[layout.size :])
        wanted = {cdb.pack_read10: 0x28, cdb.pack_write10: 0x2A, cdb.pack_read16: 0x88}
        assert opcode == wanted.get(pack, 0x8A)
        assert (fields[3] if short else fields[4]) == fields[5] == 0
