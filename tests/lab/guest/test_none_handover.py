"""The kernel's connections go from one living server to the next under load."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.nbd.kernel.client import kernel_timeout
from tests.cli.commands import good, iserblk
from tests.lab.guest.attached import DEVICE, attached, block, connected, nothing_left, servers
from tests.support.programs import SLOW_S
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking

# The kernel's limit follows from it, and only what waits beyond that was lost. In an emulated guest
# with a busy host a request has waited for 164 s while three servers took over from each other.
IO_TIMEOUT_S = 120
CONNECTIONS = 4  # the kernel sends again what takes longer than its limit
DEPTH = 16
LEAST = 3  # replacements


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    specs = [f"{files}/a:size=64M", f"{files}/b:size=64M"]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    for name in connected():  # after a failure: for the next test
        iserblk("detach", name)
    nothing_left()


def answered() -> int:
    """Reads and writes that the device has completed (Linux, Documentation/block/stat.rst)."""
    numbers = block("nbd0", "stat").split()
    return int(numbers[0]) + int(numbers[4])


@pytest.mark.parametrize(
    "reserve", ["", pytest.param("?reserve=exclusive", marks=pytest.mark.long)]
)
def test_no_request_notices_more_than_a_pause(
    reserve: str, target: TargetProcess, tmp_path: Path
) -> None:
    """fio writes and compares while servers replace each other as fast as they can, each of them
    once it has answered so many requests as wait for it: where a machine is slow, a request would
    otherwise wait through all of them. A request that was lost with a server would be answered when
    the kernel's time limit has passed. ``good``: no server kept its connections, which would be a
    warning."""
    url, options = (
        f"{target.url}/0{reserve}",
        ("-o", f"io-timeout={IO_TIMEOUT_S}", "--connections", str(CONNECTIONS)),
    )
    report = tmp_path / "report"
    with attached(url, DEVICE, *options):
        words = (
            *("fio", "--name=verify", f"--filename={DEVICE}", "--size=64M", "--bsrange=4k-256k"),
            *("--rw=randwrite", "--verify=crc32c", "--verify_state_save=0", "--direct=1"),
            *("--verify_backlog=64", "--ioengine=libaio", f"--iodepth={DEPTH}", "--fsync=64"),
            *("--time_based", "--runtime=40", "--output-format=json", f"--output={report}"),
        )
        count = 0
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as fio:
            try:
                while fio.poll() is None or count < LEAST:
                    good("attach", "--replace", url, DEVICE, *options)
                    assert len(servers()) == 1
                    count += 1
                    before = answered()
                    until_blocking(
                        lambda before=before: (  # type: ignore[misc]
                            answered() - before >= DEPTH or fio.poll() is not None
                        )
                    )
                output, _ = fio.communicate(timeout=SLOW_S)
            finally:
                fio.kill()
        assert fio.returncode == 0, output
        assert block("nbd0", "inflight").split() == ["0", "0"]
    (job,) = json.loads(report.read_text())["jobs"]
    assert job["error"] == 0
    longest = max(job[way]["clat_ns"]["max"] for way in ("read", "write")) / 1e9
    requests = sum(job[way]["total_ios"] for way in ("read", "write"))
    print(f"{count} replacements, {requests} requests, the slowest in {longest:.2f} s")
    assert longest < kernel_timeout(IO_TIMEOUT_S, CONNECTIONS)
