"""Every program of the project that takes a URL, to try the same things on each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import COMMAND, environment
from tests.support import forking
from tests.support.nbdkit import PLUGIN
from tests.support.target import END_S

FUSE = [sys.executable, "-m", "fuse_mount"]


@dataclass(slots=True, frozen=True)
class Way:
    """A program. ``words``: the call, with {url}, and {at} for an empty directory. ``prefix``: how
    its line on stderr begins. ``usage`` and ``other``: its exit statuses for wrong usage and for
    all other errors, where they differ from iserblk's."""

    words: tuple[str, ...]
    prefix: str = "iserblk: "
    usage: int | None = None
    other: int | None = None

    def call(self, url: str, at: Path) -> list[str]:
        return [word.format(url=url, at=at) for word in self.words]

    def status(self, general: int) -> int:
        """Its exit status for an error whose status in iserblk is ``general``."""
        own = self.usage if general in (7, 27) else self.other
        return general if own is None else own


def _iserblk(*words: str, usage: int | None = None, other: int | None = None) -> Way:
    return Way((*COMMAND, *words), usage=usage, other=other)


_OURS = {tuple(COMMAND): "iserblk.cli", tuple(FUSE): "fuse_mount"}

NBDKIT = ("nbdkit", "-f", "-U", "{at}/s", "python", str(PLUGIN), "uri={url}")

WAYS = {
    "info": _iserblk("info", "{url}"),
    "nbd": _iserblk("nbd", "{url}", "--socket", "{at}/s"),
    "nbd --nbdkit": _iserblk("nbd", "{url}", "--socket", "{at}/s", "--nbdkit"),
    "nbd --background": _iserblk(
        *("nbd", "{url}", "--socket", "{at}/s", "--background", "--pidfile", "{at}/pid")
    ),
    "copy from": _iserblk("copy", "{url}", "{at}/f"),
    "copy to": _iserblk("copy", str(PLUGIN), "{url}"),
    "trim": _iserblk("trim", "{url}", "--all"),
    "bench": _iserblk("bench", "{url}", "--time", "1"),
    "bench blocking": _iserblk("bench", "{url}", "--time", "1", "--face", "blocking"),
    "mount": _iserblk("mount", "{url}", "{at}", usage=1, other=32),
    "mount -f": _iserblk("mount", "-f", "{url}", "{at}", usage=1, other=32),
    "fuse_mount": Way((*FUSE, "{url}", "{at}"), "fuse_mount: ", 1, 32),
    "nbdkit": Way(NBDKIT, "nbdkit: error: ", 1, 1),
}


def ended(words: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. ``changes`` are environment variables. One of ours is forked
    (tests/support/forking.py), unless it is to look for modules elsewhere."""
    module = _OURS.get(tuple(words[:3]))
    if module and "PYTHONPATH" not in changes:
        return forking.run(module, words[3:], env=environment(**changes), timeout=END_S)
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=environment(**changes),
        timeout=END_S,
    )


def one_line(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The line on stderr; checks the status, and that the command printed nothing else."""
    assert (done.returncode, done.stdout) == (status, ""), done
    (line,) = done.stderr.splitlines()
    return line
