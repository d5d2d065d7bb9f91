"""reserve=exclusive as users have it: a mount or an NBD server keeps other initiators off, also
over an outage and after a crash, and lets them in when it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, serving
from tests.integration.conftest import StartTarget
from tests.support.fuse import need_fuse, running_mount
from tests.support.nbdkit import need, run, running_nbd

MIB = 1 << 20
LUN = f"lun:size={4 * MIB}"
RESERVED = "reserve=exclusive&initiator-name=iqn.2026-11.example:front-ends&io-timeout=60"
OTHER = "initiator-name=iqn.2026-11.example:other"
DATA = os.urandom(MIB)


@contextmanager
def through(front_end: str, url: str, place: Path) -> Iterator[list[str]]:
    """Serve the LUN; yields its name for qemu-img."""
    if front_end == "fuse":
        with running_mount([url], place / "luns") as mounted:
            yield ["raw", str(mounted / "lun0")]
    else:
        with running_nbd(front_end, [url], place) as uri:
            yield ["raw", uri]


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
@pytest.mark.parametrize("front_end", ["fuse", "iserblk", "nbdkit"])
def test_others_are_kept_off(
    start_target: StartTarget, tmp_path: Path, front_end: str, scheme: str
) -> None:
    need("qemu-img", "qemu-io")
    if front_end == "fuse":
        need_fuse()
    target = start_target(LUN)
    url = target.url.replace("iser:", f"{scheme}:") + "/0"
    mine, others = f"{url}?{RESERVED}", f"{url}?{OTHER}"

    def kept_off() -> None:
        # shared: else a warning tells of the other writer, beside the error.
        words = ("trim", others, "--length", "1M", "--shared", "yes")
        assert "another initiator has reserved" in bad(28, *words)

    source = tmp_path / "source"
    source.write_bytes(DATA)
    with through(front_end, mine, tmp_path) as (kind, where):
        run("qemu-img", "convert", "-n", "-f", "raw", "-O", kind, source, where)
        kept_off()
        target.kill()  # its reservations stay: iserblk registers with APTPL
        start_target(LUN, listen=target.listen)
        run("qemu-io", "-f", kind, "-c", "write -P 7 1M 64k", "-c", "flush", where)
        kept_off()
        assert "on this machine already" in bad(28, "info", mine)
    assert (tmp_path / "lun").read_bytes()[: MIB + 65536] == DATA + b"\7" * 65536
    good("trim", others, "--length", "1M")


def test_a_mount_that_was_killed(start_target: StartTarget, tmp_path: Path) -> None:
    """After a crash the same machine takes over its reservation; another one cannot."""
    need_fuse()
    url = start_target(LUN).url + "/0"
    place = tmp_path / "luns"
    place.mkdir()
    with serving("mount", f"{url}?{RESERVED}", place, "-f", log=tmp_path / "log") as server:
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
    subprocess.run(["umount", "--lazy", place], check=True)
    assert "reserved by iqn.2026-11.example:front-ends" in bad(
        28, "info", f"{url}?{OTHER}&reserve=exclusive"
    )
    with running_mount([f"{url}?{RESERVED}"], place) as mounted:
        (mounted / "lun0").open("r+b").close()
    good("info", f"{url}?{OTHER}&reserve=exclusive")
