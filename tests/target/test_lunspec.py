"""``--lun`` specifications, and the units that come of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, Busy
from iserblk.scsi import cdb, inquiry
from iserblk.target.lunspec import LunSpec, open_lun, parse_lun_spec
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.store.store import FileStore
from iserblk.target.store.volatile import VolatileStore
from tests.target.scsi_client import GOOD, IQN, Client


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/x/disk", LunSpec("/x/disk")),
        ("/x/disk:ro", LunSpec("/x/disk", read_only=True)),
        ("/x/disk:block=4096", LunSpec("/x/disk", block=4096)),
        ("/x/disk:block=512", LunSpec("/x/disk")),
        ("/x/disk:size=1024", LunSpec("/x/disk", size=1024)),
        ("/x/disk:size=3K", LunSpec("/x/disk", size=3 << 10)),
        ("/x/disk:size=3m", LunSpec("/x/disk", size=3 << 20)),
        ("/x/disk:size=1G", LunSpec("/x/disk", size=1 << 30)),
        ("/x/disk:size=2T", LunSpec("/x/disk", size=2 << 40)),
        ("/x/disk:size=1.5GiB", LunSpec("/x/disk", size=3 << 29)),
        ("/x/disk:serial=A-1", LunSpec("/x/disk", serial="A-1")),
        ("/x/disk:wce=0", LunSpec("/x/disk", write_cache=False)),
        ("/x/disk:wce=1", LunSpec("/x/disk", write_cache=True)),
        ("/x/disk:soft-threshold=3G", LunSpec("/x/disk", soft_threshold=3 << 30)),
        ("/x/disk:tas=0", LunSpec("/x/disk", tas=False)),
        ("/x/disk:volatile-cache=64M", LunSpec("/x/disk", volatile_cache=64 << 20)),
        (
            "/x/disk:size=1G:serial=S:block=4096:volatile-cache=1K",
            LunSpec("/x/disk", False, 4096, 1 << 30, "S", None, 1024),
        ),
        ("a:b", LunSpec("a:b")),
        ("/x/a:/b/c:ro", LunSpec("/x/a:/b/c", read_only=True)),
    ],
)
def test_good(text: str, expected: LunSpec) -> None:
    assert parse_lun_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name is missing"),
        (":ro", "name is missing"),
        ("x:sise=1G", "unknown option `sise=1G`; the options are ro, block="),
        ("alice%secret@h/iqn.2026-11.example:disk/0", "not a URL: it has no scheme"),
        ("x:ro:ro", "`ro` is given twice"),
        ("x:size=1G:size=2G", "`size` is given twice"),
        ("x:block=1024", "512 or 4096"),
        ("x:block=", "512 or 4096"),
        ("x:size=0", "`size=0`: write a size such as 1G, or leave out `size=`"),
        ("x:size=-1", "a number of bytes"),
        ("x:size=1.5", "a number of bytes"),
        ("x:size=1P", "a number of bytes"),
        ("x:size=", "a number of bytes"),
        ("x:size=99999999999999999999", "a number of bytes"),
        ("x:size=9999999T", "no file is as large; write a size such as 1G"),
        ("x:size=٣", "a number of bytes"),
        ("x:volatile-cache=0", "`volatile-cache=0`"),
        ("x:wce=yes", "`wce=yes`: write 0 or 1"),
        ("x:tas=2", "`tas=2`: write 0 or 1"),
        ("x:serial=", "1 to 64 printable"),
        ("x:serial=ä", "1 to 64 printable"),
        ("x:serial=" + "s" * 65, "1 to 64 printable"),
        ("x:soft-threshold=", "`soft-threshold=`"),
        ("x:wce=0:volatile-cache=1M", "contradict"),
        ("x:ro:volatile-cache=1M", "contradict"),
    ],
)
def test_bad(text: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        parse_lun_spec(text)


@given(st.text(alphabet=":=roblcksizewc0149GM/-.", max_size=40) | st.text(max_size=40))
def test_any_text(text: str) -> None:
    try:
        spec = parse_lun_spec(text)
    except BadArgument:
        return
    assert text.startswith(spec.path)


def test_files_that_exist_win_over_options(tmp_path: Path) -> None:
    for name in ("a:ro", "b:size=1G:block=7", "c:d"):
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        assert parse_lun_spec(str(path)) == LunSpec(str(path))
        assert parse_lun_spec(f"{path}:wce=0") == LunSpec(str(path), write_cache=False)


def test_open(tmp_path: Path) -> None:
    spec = parse_lun_spec(f"{tmp_path}/disk:size=1M:block=4096")
    unit = open_lun(spec, "the-default")
    assert (unit.serial, unit.block, unit.blocks) == ("the-default", 4096, 256)
    assert isinstance(unit.store, FileStore)
    assert unit.write_cache and not unit.read_only
    with pytest.raises(Busy):
        open_lun(spec, "the-default")
    unit.close()
    unit = open_lun(parse_lun_spec(f"{tmp_path}/disk:ro:serial=S"), "the-default")
    assert (unit.serial, unit.read_only) == ("S", True)
    unit.close()


def test_a_serial_that_cannot_be_leaves_nothing_open(tmp_path: Path) -> None:
    spec = parse_lun_spec(f"{tmp_path}/disk:size=1M")
    with pytest.raises(BadArgument, match="serial"):
        open_lun(spec, "")
    open_lun(spec, "S").close()


def test_a_volatile_cache_end_to_end(tmp_path: Path) -> None:
    """Written, read back, not in the file; after SYNCHRONIZE CACHE it is."""
    path = tmp_path / "disk"
    unit = open_lun(parse_lun_spec(f"{path}:size=1M:volatile-cache=64K"), "S")
    assert isinstance(unit.store, VolatileStore)
    server = DeviceServer({0: unit}, IQN)
    client = Client(server)
    slot, read = bytearray(16), bytearray(16)
    cdb.pack_write16(slot, 8, 2, 0)
    cdb.pack_read16(read, 8, 2, 0)
    assert client.code(bytes(slot), b"x" * 1024) == GOOD
    assert client.data(bytes(read)) == b"x" * 1024
    assert path.read_bytes() == bytes(1 << 20)
    assert client.code(cdb.synchronize_cache16(0, 0)) == GOOD
    assert path.read_bytes()[4096:5120] == b"x" * 1024
    cdb.pack_write16(slot, 8, 1, cdb.FUA)
    assert client.code(bytes(slot), b"y" * 512) == GOOD
    assert path.read_bytes()[4096:5120] == b"y" * 512 + b"x" * 512
    assert inquiry.decode_serial(client.data(cdb.inquiry(255, 0x80))) == "S"
    server.close()


def test_a_soft_threshold_reaches_the_unit(tmp_path: Path) -> None:
    unit = open_lun(parse_lun_spec(f"{tmp_path}/lun:size=4M:soft-threshold=2M"), "S")
    try:
        assert unit.soft_threshold == 2 and not unit.passes_threshold()
        unit.store.write(memoryview(bytes(b"x" * (2 << 20))), 0, True, False)
        assert unit.passes_threshold() and not unit.passes_threshold()
    finally:
        unit.close()


def test_tas_reaches_the_unit(tmp_path: Path) -> None:
    for option, tas in (("", True), (":tas=1", True), (":tas=0", False)):
        with closing(open_lun(parse_lun_spec(f"{tmp_path}/lun:size=4M{option}"), "S")) as unit:
            assert unit.tas is tas


@pytest.mark.logs(r"one\.reservations: these are no reservations", r"one\.modes: ")
def test_damaged_state_files_keep_no_lun_away(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    (tmp_path / "one.reservations").write_bytes(b"[" * (2 << 20))
    (tmp_path / "one.modes").write_bytes(b"\0")
    one, two = (open_lun(parse_lun_spec(f"{tmp_path}/{name}"), "S") for name in ("one", "two"))
    assert not one.write_cache and two.write_cache
    one.close()
    two.close()
