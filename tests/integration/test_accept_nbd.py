"""Through NBD, by our own server and by nbdkit with our plugin, and with the usual NBD clients."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartTarget
from tests.support import fio
from tests.support.interop import Record, package
from tests.support.nbdkit import need, run, running_nbd

KIB = 1024
MIB = 1 << 20

OURS = {"iserblk": "iserblk nbd", "nbdkit": "nbdkit plugin"}
TRANSPORT = "NBD, Unix socket; iSER, software iWARP"


class Start:
    """``export(spec, …)`` → NBD URI of a fresh target's LUNs. ``by``: the server."""

    def __init__(self, by: str, start_target: StartTarget, place: Path, stack: ExitStack) -> None:
        self.by = by
        self._start_target = start_target
        self._place = place
        self._stack = stack

    def __call__(self, *specs: str, parameters: tuple[str, ...] = ()) -> str:
        url = self._start_target(*specs).url
        running = running_nbd(self.by, [url], self._place, parameters=parameters)
        return self._stack.enter_context(running)

    def passed(self, record: Record, peer: str, source: str, ran: str) -> None:
        """A row of interop-results (docs/made.md). ``source``: the package of ``peer``."""
        record(
            ours=OURS[self.by],
            peer=peer,
            version=package(source),
            transport=TRANSPORT,
            ran=ran,
        )


@pytest.fixture(params=["iserblk", "nbdkit"])
def by(request: pytest.FixtureRequest) -> str:
    if request.param == "nbdkit":
        need("nbdkit")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def export(by: str, start_target: StartTarget, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield Start(by, start_target, tmp_path, stack)


def connect(uri: str) -> Any:
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    client = nbd.NBD()
    client.connect_uri(uri)
    return client


@pytest.mark.parametrize(
    ("size", "crc"),  # MiB
    [
        (128, "yes"),
        pytest.param(512, "yes", marks=pytest.mark.long),
        pytest.param(512, "no", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "by", ["iserblk", pytest.param("nbdkit", marks=pytest.mark.long)], indirect=True
)
def test_random_data_in_and_out(
    export: Start, tmp_path: Path, size: int, crc: str, record: Record
) -> None:
    need("nbdcopy", "qemu-img", "cmp")
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb") as file:
        chance = random.Random(512)
        for _ in range(size // 8):
            file.write(chance.randbytes(8 * MIB))
    uri = export(f"lun:size={size}M", parameters=(f"mpa-crc={crc}",))
    run("nbdcopy", "--flush", source, uri)
    run("nbdcopy", uri, copy)
    run("cmp", source, copy)
    run("cmp", source, tmp_path / "lun")  # the flush has brought it to the target's file
    assert "identical" in run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri)
    # The comparison does find a difference.
    connect(uri).pwrite(b"\0", size // 2 * MIB + 17)
    found = subprocess.run(
        ["qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1 and "mismatch" in found.stdout
    ran = f"{size} MiB by nbdcopy to the LUN and back, qemu-img compare; mpa-crc={crc}"
    export.passed(record, "nbdcopy, qemu-img", "libnbd-bin", ran)


def test_what_nbdinfo_shows(export: Start, tmp_path: Path, record: Record) -> None:
    need("nbdinfo")
    (tmp_path / "other").write_bytes(bytes(MIB))
    uri = export("lun:size=64M", "other:ro")
    (first,) = json.loads(run("nbdinfo", "--json", "--no-content", uri))["exports"]
    abilities = ("flush", "fua", "trim", "zero", "fast_zero", "cache", "multi_conn")
    assert {name: first[f"can_{name}"] for name in abilities} == dict.fromkeys(abilities, True)
    assert first["export-size"] == 64 * MIB
    assert first["is_read_only"] is False
    assert "base:allocation" in first["contexts"]
    listed = json.loads(run("nbdinfo", "--list", "--json", uri))["exports"]
    assert [each["export-name"] for each in listed] == ["lun0", "lun1"]
    second = listed[1]
    assert second["export-size"] == MIB
    assert second["is_read_only"] is True
    assert second["can_trim"] is second["can_zero"] is False
    ran = "nbdinfo --json and --list of two exports, one of them read-only"
    export.passed(record, "nbdinfo", "libnbd-bin", ran)


Span = tuple[int, int, bool]  # from, to, whether data is there


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop, data in spans:
        if merged and merged[-1][1:] == (start, data):
            merged[-1] = (merged[-1][0], stop, data)
        else:
            merged.append((start, stop, data))
    return merged


def nbdinfo_map(uri: str) -> list[Span]:
    entries = json.loads(run("nbdinfo", "--map", "--json", uri))
    assert all(entry["type"] in (0, 3) for entry in entries)  # data, or hole and zero
    return _merged(
        [
            (entry["offset"], entry["offset"] + entry["length"], entry["type"] == 0)
            for entry in entries
        ]
    )


def qemu_map(uri: str) -> list[Span]:
    entries = json.loads(run("qemu-img", "map", "--output=json", "-f", "raw", uri))
    assert all(entry["data"] is not entry["zero"] for entry in entries)
    return _merged(
        [(entry["start"], entry["start"] + entry["length"], entry["data"]) for entry in entries]
    )


def test_maps_agree_with_what_was_written_trimmed_and_zeroed(
    export: Start, tmp_path: Path, record: Record
) -> None:
    need("nbdinfo", "qemu-img")
    uri = export("lun:size=256M")
    empty = [(0, 256 * MIB, False)]
    assert nbdinfo_map(uri) == qemu_map(uri) == empty
    client = connect(uri)
    client.pwrite(b"x" * MIB, 16 * MIB)
    client.pwrite(b"x" * (4 * MIB), 64 * MIB)
    client.pwrite(b"x" * 4096, 256 * MIB - 4096)
    client.flush()
    written = [
        (0, 16 * MIB, False),
        (16 * MIB, 17 * MIB, True),
        (17 * MIB, 64 * MIB, False),
        (64 * MIB, 68 * MIB, True),
        (68 * MIB, 256 * MIB - 4096, False),
        (256 * MIB - 4096, 256 * MIB, True),
    ]
    assert nbdinfo_map(uri) == qemu_map(uri) == written
    client.trim(MIB, 65 * MIB)
    client.zero(MIB, 16 * MIB)  # may trim: no NO_HOLE flag
    client.trim(4095, 256 * MIB - 4095)  # no whole granule in it
    after = [
        (0, 64 * MIB, False),
        (64 * MIB, 65 * MIB, True),
        (65 * MIB, 66 * MIB, False),
        (66 * MIB, 68 * MIB, True),
        (68 * MIB, 256 * MIB - 4096, False),
        (256 * MIB - 4096, 256 * MIB, True),
    ]
    assert nbdinfo_map(uri) == qemu_map(uri) == after
    # A copy that ignores the map has the same content.
    model = tmp_path / "model"
    with model.open("wb") as file:
        file.truncate(256 * MIB)
        for start, stop, data in after:
            if data:
                file.seek(start)
                file.write(b"x" * (stop - start))
    assert "identical" in run("qemu-img", "compare", "-f", "raw", "-F", "raw", model, uri)
    ran = "nbdinfo --map, qemu-img map: holes and data as written, trimmed and zeroed"
    export.passed(record, "nbdinfo, qemu-img", "qemu-utils", ran)


def test_qemu_img_writes_and_finds_no_difference(
    export: Start, tmp_path: Path, record: Record
) -> None:
    """An image with holes, and back into a file of another format."""
    need("qemu-img")
    image, back = tmp_path / "image", tmp_path / "back.qcow2"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 5 * MIB + 512, 63 * MIB):
            file.seek(at)
            file.write(random.Random(at).randbytes(MIB))
    uri = export("lun:size=64M")
    run("qemu-img", "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw", image, uri)
    run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", uri, back)
    for other, kind in ((uri, "raw"), (back, "qcow2")):
        words = ("qemu-img", "compare", "-f", "raw", "-F", kind, image, other)
        assert "identical" in run(*words)
    ran = "qemu-img convert of 64 MiB with holes to the LUN and back, 16 coroutines, compare"
    export.passed(record, "qemu-img", "qemu-utils", ran)


def test_qemu_io(export: Start, record: Record) -> None:
    need("qemu-io")
    uri = export("lun:size=16M")

    def does(*commands: str) -> str:
        return run(
            "qemu-io", "-f", "raw", *[word for each in commands for word in ("-c", each)], uri
        )

    does("write -P 5 0 1M", "write -f -P 6 1M 64k", "write -P 7 4095 3", "flush")
    does("write -z 512k 100k", "write -z -u 2M 1M", "discard 3M 1M", "aio_flush")
    said = does(
        "read -P 5 4098 500k", "read -P 7 4095 3", "read -P 0 512k 100k", "read -P 6 1M 64k"
    )
    assert "Pattern verification failed" not in said
    does(*(f"aio_write -P {number} {number}M 1M" for number in range(16)), "aio_flush")
    assert "failed" not in does(*(f"read -P {number} {number}M 1M" for number in range(16)))
    ran = (
        "qemu-io: write, write -f, write -z with and without -u, discard, aio_write, flush, read -P"
    )
    export.passed(record, "qemu-io", "qemu-utils", ran)


def test_nbdsh(export: Start, record: Record) -> None:
    pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    uri = export("lun:size=16M")
    nbdsh = (sys.executable, "-m", "nbd")  # as the program does, with the python3 of PATH
    script = """
assert h.get_structured_replies_negotiated()
h.pwrite(b"nbdsh" * 100, 123, nbd.CMD_FLAG_FUA)
assert h.pread(500, 123) == b"nbdsh" * 100
h.zero(100, 200)
assert h.pread(100, 200) == bytes(100)
h.trim(8192, 8192)
h.cache(4096, 0)
h.flush()
entries = []
h.block_status(16 << 20, 0, lambda context, offset, found, error: entries.extend(found))
print(sum(entries[::2]))
"""
    assert run(*nbdsh, "--base-allocation", "-u", uri, "-c", script).strip() == str(16 * MIB)
    ran = "nbdsh: write with FUA, read, zero, trim, cache, flush, block status"
    export.passed(record, "nbdsh", "python3-libnbd", ran)


def test_zeroes_that_must_stay_allocated_read_as_zeroes(export: Start) -> None:
    uri = export("lun:size=16M")
    client = connect(uri)
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    client.pwrite(b"x" * (4 * MIB), 0)
    client.zero(2 * MIB, MIB, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    content = bytes(client.pread(4 * MIB, 0))
    assert content == b"x" * MIB + bytes(2 * MIB) + b"x" * MIB


def test_fio_verifies_what_it_wrote(export: Start, record: Record) -> None:
    """Sixteen connections at depth 32, mixed sizes, each in its own region."""
    need("fio")
    if "nbd" not in run("fio", "--enghelp").split():
        pytest.skip("this fio has no nbd engine (built without libnbd)")
    uri = export(f"lun:size={fio.JOBS * 16}M")
    fio.verify("--ioengine=nbd", f"--uri={uri}", region=16 * MIB)
    ran = "fio verify, sixteen connections at depth 32, blocks of 512 bytes to 1 MiB"
    export.passed(record, "fio, engine nbd", "fio", ran)


def test_a_killed_target_is_an_error_for_the_client(
    start_target: StartTarget, tmp_path: Path, by: str
) -> None:
    """Reads and writes fail with EIO, the server lives, and ends when it is told to."""
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    running = start_target("lun:size=16M")
    # At the end the flush fails, which our server tells by its status, too.
    with running_nbd(by, [f"{running.url}?io-timeout=1"], tmp_path, status=1) as uri:
        client = connect(uri)
        client.pwrite(b"x" * 4096, 0)
        running.kill()
        for call in (
            lambda: client.pread(4096, 0),
            lambda: client.pwrite(b"y" * 4096, 0),
            client.flush,
            lambda: client.zero(4096, 0),
            lambda: client.trim(4096, 0),
        ):
            with pytest.raises(nbd.Error) as caught:
                call()
            assert caught.value.errno == "EIO"
        client.shutdown()
