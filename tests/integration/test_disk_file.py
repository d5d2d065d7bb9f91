"""Disks of a real target as file objects, read and written by Python's own modules."""

from __future__ import annotations

import gzip
import io
import random
import shutil
import tarfile
import zipfile
from collections.abc import Iterator

import pytest

from iserblk.disk.blocking import ThreadDiskSet, open_disks
from iserblk.disk.seam import BlockingLun
from iserblk.errors import ConnectionLost
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.target import TargetProcess, running_target

MIB = 1 << 20
SIZE = 4 * MIB
BLOCKS = (512, 4096)
FILES = {f"dir/{number}": random.Random(number).randbytes(number * 777) for number in range(60)}


@pytest.fixture(scope="module", params=["iser", "iscsi"])
def disks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadDiskSet]:
    """LUN 0 has blocks of 512 bytes, LUN 1 of 4096."""
    place = tmp_path_factory.mktemp("luns")
    specs = [f"{place}/{size}:size={SIZE}:block={size}" for size in BLOCKS]
    with running_target(specs, place / "target.log") as running:
        url = running.url.replace("iser://", f"{request.param}://")
        # (With ``metrics`` the disk is a wrapper.)
        with open_disks([url], {"metrics": f"{place}/metrics"}) as found:
            yield found


@pytest.fixture(params=BLOCKS)
def disk(request: pytest.FixtureRequest, disks: ThreadDiskSet) -> BlockingLun:
    return disks.disks[f"lun{BLOCKS.index(request.param)}"]


def test_tar(disk: BlockingLun) -> None:
    with disk.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert not disk.dirty
    with disk.open() as file, tarfile.open(fileobj=file) as archive:
        for name in random.Random(1).sample(list(FILES), len(FILES)):
            found = archive.extractfile(name)
            assert found is not None and found.read() == FILES[name]


@pytest.mark.parametrize("buffering", [0, -1])
def test_zip(disk: BlockingLun, buffering: int) -> None:
    """In a part of the disk, as its directory is at the end. It is appended to."""
    with disk.open("r+b", buffering, offset=1001) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in FILES.items():
                archive.writestr(name, data)
        length = file.tell()
    part = disk.open("rb", buffering, offset=1001, length=length)
    with part as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == FILES


def test_gzip_and_copyfileobj(disk: BlockingLun) -> None:
    data = random.Random(2).randbytes(MIB) + bytes(MIB)
    with disk.open("wb", offset=3) as file:
        with gzip.GzipFile(fileobj=file, mode="wb") as packed:
            shutil.copyfileobj(io.BytesIO(data), packed)
        length = file.tell()
    with disk.open(offset=3, length=length) as file, gzip.open(file) as packed:
        assert packed.read() == data


@pytest.mark.parametrize("buffering", [0, 1000, -1])
def test_edges_of_blocks(disk: BlockingLun, buffering: int) -> None:
    """Writes of any alignment leave what is around them as it was."""
    chance = random.Random(buffering)
    with disk.open("r+b", buffering) as file:
        model = bytearray(file.read(64 << 10))
        for _ in range(60):
            at = chance.randrange(len(model) - 9000)
            data = chance.randbytes(chance.choice((1, 511, 513, 4095, 8193)))
            file.seek(at)
            file.write(data)
            model[at : at + len(data)] = data
            at = chance.randrange(len(model) - 9000)
            file.seek(at)
            assert file.read(len(data)) == model[at : at + len(data)]
    found = bytearray(64 << 10)
    disk.read_into(memoryview(found), 0)
    assert found == model


@pytest.mark.logs(logs.RECONNECTED)
def test_flushed_data_outlives_the_cache(start_target: StartTarget) -> None:
    """``flush`` of a file is a promise of the target, with the journal off as well."""
    spec = f"lun:size={SIZE}:volatile-cache=64M"
    running: TargetProcess = start_target(spec)
    with open_disks([f"{running.url}/0"], {"journal": "off"}) as disks:
        file = disks.disks["lun0"].open("r+b")
        file.write(b"promised" * 1000)
        file.flush()
        running.kill()
    running = start_target(spec, listen=running.listen)
    with open_disks([f"{running.url}/0"]) as disks, disks.disks["lun0"].open() as again:
        assert again.read(8000) == b"promised" * 1000
    with pytest.raises(OSError) as caught:
        file.read(1 << 20)
    assert isinstance(caught.value.__cause__, ConnectionLost)
    file.close()  # nothing was written since


def test_disks_that_were_closed_first(start_target: StartTarget) -> None:
    """What the file has in its buffer cannot be written any more: ``close`` says so."""
    running = start_target(f"lun:size={SIZE}")
    with open_disks([f"{running.url}/0"]) as disks:
        file = disks.disks["lun0"].open("r+b")
        file.write(b"late")
    with pytest.raises(OSError) as caught:
        file.close()
    assert isinstance(caught.value.__cause__, ConnectionLost) and file.closed
