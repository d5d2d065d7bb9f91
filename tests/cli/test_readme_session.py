"""The first session of README.md: its lines are pasted into a shell, as a stranger would."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.pidfile import read_pid
from tests.cli.commands import environment
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import END_S, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = ROOT / ".venv/bin/iserblk"


def lines() -> list[str]:
    """What stands there to be pasted."""
    section = README.partition("\n## The first session\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    return str(block).splitlines()


class Shell:
    """A bash that gets a line at a time."""

    def __init__(self, directory: Path, said: Path) -> None:
        path = f"{PROGRAM.parent}:{environment()['PATH']}"
        self._said = said
        with said.open("wb") as stderr:
            self.process = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=directory,
                env=environment(PATH=path),
            )

    def paste(self, line: str) -> str:
        """What it printed. The line must succeed, without a word on stderr."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\nprintf '\\nended %s\\n' $?\n")
        self.process.stdin.flush()
        printed = ""
        while not (ended := re.search(r"\nended (\d+)\n$", printed)):
            more = self.process.stdout.readline()
            assert more, f"{line}: {self._said.read_text()}"
            printed += more
        assert (ended[1], self._said.read_text()) == ("0", ""), line
        return printed[: ended.start()]


@contextmanager
def shell(directory: Path, said: Path) -> Iterator[Shell]:
    """Nothing that was started there is left."""
    running = Shell(directory, said)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()
        left = read_pid(directory / "serve.pid")
        luns = directory / "luns"
        if os.path.ismount(luns):
            subprocess.run([PROGRAM, "umount", luns], check=False)
        if left:
            os.kill(left, signal.SIGTERM)


def test_each_line_succeeds(tmp_path: Path) -> None:
    """Nothing is left then but the file that was served."""
    need_fuse()
    need("bash")
    if not PROGRAM.exists():
        pytest.skip(f"there is no {PROGRAM}: scripts/setup makes it")
    pasted = lines()
    assert len(pasted) == 10
    scratch = tmp_path / "an empty directory"
    scratch.mkdir()
    ended = None
    with shell(scratch, tmp_path / "said") as bash:
        for line in pasted:
            if line.startswith("kill "):
                ended = os.pidfd_open(read_pid(scratch / "serve.pid"))
            printed = bash.paste(line)
            if line == "echo $lun":
                url = printed.strip()
                assert re.fullmatch(r"iser://127\.0\.0\.1:\d+/iqn\.[^/]+:disk-[0-9a-f]{8}/0", url)
            elif line.startswith("iserblk discover"):
                assert url.removesuffix("/0") in printed
            elif line.startswith("iserblk info"):
                assert "64.0 MiB" in printed
            elif line.startswith("iserblk compare"):
                assert printed.startswith("identical: ")
            elif line.startswith("iserblk umount"):
                assert not os.path.ismount(scratch / "luns")
        assert ended is not None
        try:
            assert select.select([ended], [], [], END_S)[0], "the target does not end"
        finally:
            os.close(ended)
    copied = Path("/bin/bash").read_bytes()
    assert (scratch / "disk.img").read_bytes()[: len(copied)] == copied
    assert sorted(path.name for path in scratch.iterdir()) == ["disk.img", "luns"]


def test_the_demo_ends_with_the_same_commands() -> None:
    """What it says to be tried."""
    demo = (ROOT / "scripts/demo").read_text(encoding="utf-8")
    tried = demo.partition("Try it yourself")[2].partition("EOF")[0].replace("\\$", "$")
    first = lines()[0].replace("64M", "1G")
    for line in (first, "iserblk info $lun", "kill $(cat serve.pid)"):
        assert line in tried


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("**/*.md")),
        ROOT / "nbd_plugin/iserblk.py",
        ROOT / "scripts/manlib/pages.py",
    ],
    ids=lambda path: path.name,
)
def test_nbdkit_is_not_open_to_the_network(path: Path) -> None:
    """Without -U it listens on all addresses, and asks nobody who they are."""
    for line in path.read_text(encoding="utf-8").splitlines():
        for call in re.findall(r"\bnbdkit (?!-U)[^`]*\buri=", line):
            assert " -U " in call, line
