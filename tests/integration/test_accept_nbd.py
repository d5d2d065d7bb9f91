"""Through NBD: nbdkit with our plugin, and the usual NBD clients."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartTarget
from tests.support import fio
from tests.support.nbdkit import need, run, running_nbdkit

KIB = 1024
MIB = 1 << 20

Start = Callable[..., str]


@pytest.fixture
def export(start_target: StartTarget, tmp_path: Path) -> Iterator[Start]:
    """``export(spec, …)`` → NBD URI of a fresh target's LUNs."""
    need("nbdkit")
    with ExitStack() as stack:

        def start(*specs: str, parameters: tuple[str, ...] = ()) -> str:
            url = start_target(*specs).url
            return stack.enter_context(running_nbdkit([url], tmp_path, parameters=parameters))

        yield start


def connect(uri: str) -> Any:
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    client = nbd.NBD()
    client.connect_uri(uri)
    return client


@pytest.mark.parametrize("crc", ["yes", "no"])
def test_512_mib_of_random_data_in_and_out(export: Start, tmp_path: Path, crc: str) -> None:
    need("nbdcopy", "qemu-img", "cmp")
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb") as file:
        chance = random.Random(512)
        for _ in range(64):
            file.write(chance.randbytes(8 * MIB))
    uri = export("lun:size=512M", parameters=(f"mpa-crc={crc}",))
    run("nbdcopy", "--flush", source, uri)
    run("nbdcopy", uri, copy)
    run("cmp", source, copy)
    run("cmp", source, tmp_path / "lun")  # the flush has brought it to the target's file
    assert "identical" in run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri)
    # The comparison does find a difference.
    connect(uri).pwrite(b"\0", 300 * MIB + 17)
    found = subprocess.run(
        ["qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1 and "mismatch" in found.stdout


def test_what_nbdinfo_shows(export: Start, tmp_path: Path) -> None:
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


def test_maps_agree_with_what_was_written_trimmed_and_zeroed(export: Start, tmp_path: Path) -> None:
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


def test_zeroes_that_must_stay_allocated_read_as_zeroes(export: Start) -> None:
    uri = export("lun:size=16M")
    client = connect(uri)
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    client.pwrite(b"x" * (4 * MIB), 0)
    client.zero(2 * MIB, MIB, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    content = bytes(client.pread(4 * MIB, 0))
    assert content == b"x" * MIB + bytes(2 * MIB) + b"x" * MIB


def test_fio_verifies_what_it_wrote(export: Start) -> None:
    """Sixteen connections at depth 32, mixed sizes, each in its own region."""
    need("fio")
    if "nbd" not in run("fio", "--enghelp").split():
        pytest.skip("this fio has no nbd engine (built without libnbd)")
    uri = export(f"lun:size={fio.JOBS * 16}M")
    fio.verify("--ioengine=nbd", f"--uri={uri}", region=16 * MIB)


def test_a_killed_target_is_an_error_for_the_client(
    start_target: StartTarget, tmp_path: Path
) -> None:
    """Reads and writes fail with EIO, nbdkit lives, and ends when it is told to."""
    need("nbdkit")
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    running = start_target("lun:size=16M")
    with running_nbdkit([f"{running.url}?io-timeout=1"], tmp_path) as uri:
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
