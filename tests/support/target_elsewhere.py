"""``iserblk target`` in a network namespace of a test."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.cli.commands import environment
from tests.support.forking import Forked
from tests.support.namespaces import Host

IQN = "iqn.2026-11.example:elsewhere"
END_S = 60


@contextmanager
def our_target(
    host: Host,
    address: str,
    luns: Sequence[object],
    *options: str,
    listen: str = "",
    iqn: str = IQN,
) -> Iterator[str]:
    """A target with these LUNs, on port 3260 of an address of the host; yields its URL, without a
    LUN. ``listen``: what follows the address and port in ``--listen``."""
    words = ["target", "--iqn", iqn]
    for lun in luns:
        words += ["--lun", str(lun)]
    words += ["--listen", f"{address}:3260{listen}", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = Forked(
            "iserblk.cli",
            words,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            namespace=host.name,
        )
        try:
            assert process.stdout is not None
            word, _, url = process.stdout.readline().strip().partition(" ")
            if word != "ready":
                process.wait(timeout=END_S)
                log.seek(0)
                raise AssertionError(log.read())
            yield url
            assert process.poll() is None
        finally:
            process.terminate()
            process.communicate(timeout=END_S)
        log.seek(0)
        assert "Traceback" not in (said := log.read()), said
