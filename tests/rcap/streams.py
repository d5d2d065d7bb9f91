"""The captured streams of tests/vectors/streams."""

from __future__ import annotations

from pathlib import Path

from tests.rcap.fpdu import Fpdu, decode_fpdu

STREAMS = Path(__file__).parent.parent / "vectors" / "streams"

BAD_CRC = "err_badcrc/terminate.i2t.bin"
# The script filled the CRC field at will: these connections run without CRC.
NO_CRC_SETS = ("lo64k_nocrc", "kernel_initiator_v2")


def names() -> list[str]:
    """All streams, as ``<set>/<phase>.<direction>.bin``."""
    found = sorted(str(path.relative_to(STREAMS)) for path in STREAMS.glob("*/*.bin"))
    assert found, "tests/vectors/streams is empty"
    return found


def read(name: str) -> bytes:
    return (STREAMS / name).read_bytes()


def is_mpa(name: str) -> bool:
    return "01_mpa" in name


def has_crc(name: str) -> bool:
    return name.split("/", maxsplit=1)[0] not in NO_CRC_SETS


def frames(name: str) -> list[Fpdu]:
    """The FPDUs of a stream. Raises RemoteProtocolError for a bad one."""
    data = read(name)
    result = []
    while data:
        decoded = decode_fpdu(data, crc=has_crc(name))
        assert decoded is not None, f"{name} ends in the middle of an FPDU"
        result.append(decoded[0])
        data = data[decoded[1] :]
    return result
