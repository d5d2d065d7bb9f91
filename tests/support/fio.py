"""fio as a judge: random data written in mixed sizes, then read and compared by checksum."""

from __future__ import annotations

import json

from tests.support.nbdkit import run

JOBS = 16
DEPTH = 32
KIB = 1024
MIB = 1 << 20


def verify(*engine: str, region: int) -> float:
    """JOBS jobs at DEPTH, blocks of 512 bytes to 1 MiB, each in its own ``region`` bytes.

    ``engine``: what fio needs to know of the device. Every job must have written and verified.
    Returns how long the slowest request took, seconds.
    """
    output = run(
        "fio",
        "--name=verify",
        *engine,
        "--rw=randwrite",
        "--bsrange=512-1M",
        f"--size={region}",
        f"--offset_increment={region}",
        f"--numjobs={JOBS}",
        f"--iodepth={DEPTH}",
        "--verify=crc32c",
        "--verify_state_save=0",  # else it leaves files in the working directory
        "--verify_fatal=1",
        "--randrepeat=0",
        "--output-format=json",
    )
    jobs = json.loads(output[output.index("{") :])["jobs"]
    assert len(jobs) == JOBS
    for job in jobs:
        assert job["error"] == 0
        assert job["write"]["io_bytes"] == region
        assert job["read"]["io_bytes"] == region  # the verification
    return max(job[way]["clat_ns"]["max"] for job in jobs for way in ("read", "write")) / 1e9  # type: ignore[no-any-return]
