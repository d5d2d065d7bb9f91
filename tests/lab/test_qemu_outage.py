"""A guest of QEMU works on, while the target of its disk is away and loses its cache: over our NBD
server, and over QEMU's own iSCSI driver (libiscsi).

The guest boots from the LUN, and writes records to a file on its ext4 root, past its page cache.
After every BATCH of them it flushes the file.
"""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import pytest
from lablib.host import why_not
from lablib.kernel import the_kernel

from tests.support import boot_disk
from tests.support.nbdkit import run, running_nbd
from tests.support.target import running_target
from tests.support.until import until_blocking

LIMIT_S = 600  # emulated, on a machine that may be busy
RECORDS, BATCH, BLOCK = 80, 16, 4096
AT = 40  # records that are acknowledged when the outage begins; the last 8 of them not flushed
UNFLUSHED = {*range(AT - AT % BATCH, AT)}
AWAY_S = 45  # longer than the server's io-timeout is by default
# The file system must not flush by itself, every five seconds, what is to be lost.
SCRIPT = f"""
busybox mkdir /tmp
busybox mount -t tmpfs none /tmp
busybox mount -o remount,commit=600 /
told() {{ read seconds idle </proc/uptime; echo "$1 $seconds"; }}
try() {{
  word=$1
  shift
  if busybox dd of=/records status=none "$@"; then told $word; else told failed; fi
}}
number=0
while [ $number -lt {RECORDS} ]; do
  busybox yes $(printf %015d $number) | busybox head -c {BLOCK} >/tmp/record
  try wrote if=/tmp/record bs={BLOCK} seek=$number conv=notrunc oflag=direct
  number=$((number + 1))
  if [ $((number % {BATCH})) = 0 ]; then
    try flushed if=/dev/null conv=notrunc,fsync
  fi
  if [ $number = {AT} ]; then
    told waits
    read word </dev/ttyS0
  fi
done
"""
# What a kernel says of a request that has failed.
DAMAGE = re.compile(r"I/O error|EXT4-fs (?:error|warning)|Remounting filesystem|Aborting journal")


def record(number: int) -> bytes:
    return f"{number:015}\n".encode() * (BLOCK // 16)


class Guest:
    """Boots from the disk at ``uri``. ``said()``: what its console has said."""

    def __init__(self, uri: str, console: Path) -> None:
        self._console = console
        with console.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *("qemu-system-x86_64", "-machine", "pc", "-accel", "tcg", "-m", "256M"),
                    *("-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"),
                    *("-drive", f"file={uri},if=virtio,format=raw,cache=none"),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
            )

    def said(self) -> str:
        return self._console.read_text(errors="replace")

    def times(self, word: str) -> list[float]:
        """When the guest has told this, in seconds of its own clock."""
        return [float(each) for each in re.findall(rf"^{word} ([0-9.]+)", self.said(), re.M)]

    def until_told(self, word: str) -> None:
        def told() -> bool:
            assert self.process.poll() is None, self.said()
            return bool(self.times(word))

        until_blocking(told)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + AWAY_S)
@pytest.mark.parametrize("by", ["iserblk", "libiscsi"])
def test_a_guest_outlives_an_outage(
    by: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No call of a program in the guest fails over either. Over ours every record is there; over
    QEMU's driver those are missing that the target had in its cache, although a flush has succeeded
    behind them."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    reason = why_not("none") or boot_disk.missing()
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    kernel, image = the_kernel(), tmp_path / "disk.img"
    boot_disk.make(image, kernel.image, kernel.modules, SCRIPT)
    lun, log = [f"{image}:volatile-cache=16M"], tmp_path / "target.log"
    with ExitStack() as targets:
        target = targets.enter_context(running_target(lun, log))
        url = f"{target.url.replace('iser://', 'iscsi://')}/0"
        disk = (
            running_nbd("iserblk", [url], tmp_path, ("io-timeout=180",))
            if by == "iserblk"
            else nullcontext(url)
        )
        with disk as uri, closing(Guest(uri, tmp_path / "console")) as guest:
            guest.until_told("waits")
            target.kill()
            guest.go_on()
            time.sleep(AWAY_S)
            assert len(guest.times("wrote")) == AT, guest.said()
            successor = targets.enter_context(running_target(lun, log, target.listen))
            assert guest.process.wait() == 0
            said = guest.said()
            assert len(guest.times("wrote")) == RECORDS and not guest.times("failed"), said
            assert len(guest.times("flushed")) == RECORDS // BATCH, said
            assert DAMAGE.search(said) is None, said
        successor.kill()  # what is in the file now was flushed all the way
    root, found = f"{image}?offset={boot_disk.ROOT_AT}", tmp_path / "records"
    run("debugfs", "-R", f"dump /records {found}", root)
    data = found.read_bytes()
    missing = {
        number
        for number in range(RECORDS)
        if data[number * BLOCK : (number + 1) * BLOCK] != record(number)
    }
    assert missing == (set() if by == "iserblk" else UNFLUSHED)
    if by == "iserblk":
        run("e2fsck", "-f", "-n", root)
