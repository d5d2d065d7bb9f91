"""Traditional iSCSI between our initiator and our target, beside iSER on the same port."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from iserblk.errors import CommandTimeout, TargetNotFound, TransportError
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.ports import free_port
from tests.support.target import IQN, TargetProcess, running_target

pytestmark = pytest.mark.logs(logs.RECONNECTED)

MIB = 1 << 20
SIZE = 16 * MIB
DIGESTS = "?header_digest=crc32c&data_digest=crc32c"
OPTIONS = ("", DIGESTS, "?data-digest=crc32c,none", "?header-digest=crc32c&immediate-data=no")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size={SIZE}"], place / "target.log") as running:
        yield running


def iscsi(target: TargetProcess) -> str:
    return target.url.replace("iser://", "iscsi://")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("options", OPTIONS)
async def test_digests_and_immediate_data(target: TargetProcess, face: str, options: str) -> None:
    """512 bytes to 4 MiB, read back over the same connection and over iSER: the target serves an
    initiator without iSER as well. proves: ISER-2.2-1"""
    async with one_disk(face, f"{iscsi(target)}/0{options}") as disk:
        about = disk.info.connection
        assert (about["datamover"], about["provider"]) == ("tcp", "tcp")
        assert about["header_digest"] == ("CRC32C" if "header" in options else "None")
        wanted = "CRC32C" if "data_digest" in options.replace("-", "_") else "None"
        assert about["data_digest"] == wanted
        async with one_disk(face, f"{target.url}/0") as beside:
            for seed, size in enumerate((512, 8192, 8704, 65536, 66048, MIB, 4 * MIB)):
                data = random.Random(seed).randbytes(size)
                await write(disk, data, 1024)
                assert await read(disk, 1024, size) == data
                assert await read(beside, 1024, size) == data
                await write(beside, data[::-1], 1024)
                assert await read(disk, 1024, size) == data[::-1]
            await disk.flush()


async def test_no_such_target(target: TargetProcess) -> None:
    with pytest.raises(TargetNotFound):
        async with one_disk("async", f"{iscsi(target)}2/0"):
            pass


async def test_rubbish_is_cut_off(target: TargetProcess) -> None:
    """The target disconnects when the first byte begins no MPA Request and no Login Request."""
    with socket.create_connection(("127.0.0.1", target.port), 5) as sock:
        sock.settimeout(5)
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


async def test_the_target_goes_away(start_target: StartTarget) -> None:
    target = start_target(f"lun:size={SIZE}")
    async with one_disk("async", f"{iscsi(target)}/0", {"io-timeout": "1"}) as disk:
        target.kill()
        with pytest.raises(CommandTimeout, match=r"not connected for .* s: cannot connect"):
            await read(disk, 0, 512)


async def test_nobody_listens() -> None:
    """A port where no process listens: the error names the portal and what to check."""
    port = free_port()
    with pytest.raises(TransportError, match="is the target listening there"):
        async with one_disk("async", f"iscsi://127.0.0.1:{port}/{IQN}/0"):
            pass
