"""Bytes touched for each byte moved, in requests of 1 MiB: the table in docs/data-path.md.

The real programs run with their copies, CRCs and system calls counted (tests/support/touched.py).
Each place that the table names is passed as often as it says (a place with "≤" not more often), and
there is no other one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from iserblk.nbd import messages as nbd
from tests.support.fuse import need_fuse
from tests.support.nbd_client import RawClient, connected, request, write
from tests.support.target import END_S, IQN, ROOT
from tests.support.touched import FRESH
from tests.support.until import until_blocking

MIB = 1 << 20
REQUESTS = 12
DEPTH = 4
SMALLEST = 4096
SMALL = 0.03  # of a byte, for each byte that is moved: headers, and how exact the table is
COLUMNS = ("iser read", "iser write", "iscsi read", "iscsi write")

# "MODULE.FUNCTION KIND" → column → times, at least and at most
Table = dict[str, dict[str, tuple[float, float]]]


def documented(process: str) -> Table:
    """The table's lines for a process."""
    text = (ROOT / "docs/data-path.md").read_text()
    section = text.partition("\n## 1 MiB\n")[2].partition("\n## ")[0]
    found: Table = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        place = re.fullmatch("`(.+)`", cells[1]) if len(cells) == 3 + len(COLUMNS) else None
        if place and process in cells[0].split(", "):
            found[f"{place[1]} {cells[2]}"] = {
                column: _times(cell)
                for column, cell in zip(COLUMNS, cells[3:], strict=True)
                if cell != "–"
            }
    return found


def _times(cell: str) -> tuple[float, float]:
    most = float(cell.removeprefix("≤"))
    return 0.0 if cell.startswith("≤") else most, most


class Counted:
    """An ``iserblk`` that counts. ``url``: of its line ``ready``."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self._report = directory / f"{name}.json"
        self._log = directory / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.touched", str(self._report), *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ready(self) -> str:
        assert self.process.stdout is not None
        word, _, url = self.process.stdout.readline().strip().partition(" ")
        assert word == "ready", self._log.read_text()
        return url

    def take(self) -> dict[str, int]:
        """What was counted since the last time. A program may count what it sends after that has
        come here: so a small request is to be answered before."""
        self.process.send_signal(signal.SIGUSR1)
        return self._take()

    def _take(self) -> dict[str, int]:
        until_blocking(self._report.exists)
        found: dict[str, int] = json.loads(self._report.read_text())
        self._report.unlink()
        return found

    def end(self) -> dict[str, int]:
        """It ends by itself."""
        self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0, self._log.read_text()
        return self._take()

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=END_S)


@contextmanager
def counted(directory: Path, name: str, *arguments: str) -> Iterator[Counted]:
    program = Counted(directory, name, *arguments)
    try:
        yield program
    finally:
        program.stop()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[tuple[Counted, str]]:
    """The target, and its LUN's URL. The file is in memory where it can be: what a read without
    waiting does not find in the page cache is read twice."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with TemporaryDirectory(dir=memory) as directory:
        file = Path(directory) / "lun"
        file.write_bytes(bytes(REQUESTS * MIB))
        arguments = ("--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", f"{file}:wce=1")
        with counted(tmp_path, "target", "target", *arguments) as program:
            yield program, f"{program.ready()}/0"


def check(found: Mapping[str, Mapping[str, float]], process: str) -> None:
    """``found``: by column, how often each byte passed each place. Memory may be new for as many
    requests as there are at once, not for each."""
    table = documented(process)
    for column, counted in found.items():
        wrong = {}
        for place in {*table, *counted}:
            least, most = table.get(place, {}).get(column, (0.0, 0.0))
            times = counted.get(place, 0.0)
            if place.endswith(f" {FRESH}"):
                most = DEPTH / REQUESTS
            if not least - SMALL <= times <= most + SMALL:
                wrong[place] = times, (least, most)
        assert not wrong, f"{process}, {column}: {wrong}"


def factors(counts: Mapping[str, int], moved: int) -> dict[str, float]:
    return {place: size / moved for place, size in counts.items()}


async def exchange(client: RawClient, messages: list[bytes], length: int) -> None:
    """Send them, DEPTH at a time; each answer has so many bytes of data."""
    for at in range(0, len(messages), DEPTH):
        await client.send(b"".join(messages[at : at + DEPTH]))
        for _ in messages[at : at + DEPTH]:
            assert not (await client.reply(length)).error


@pytest.mark.parametrize("scheme", ["iser", pytest.param("iscsi", marks=pytest.mark.long)])
async def test_through_nbd(tmp_path: Path, target: tuple[Counted, str], scheme: str) -> None:
    behind, url = target
    place = tmp_path / "nbd"
    url = url.replace("iser:", f"{scheme}:")
    reads = [request(nbd.READ, at * MIB, MIB, at) for at in range(REQUESTS)]
    writes = [write(os.urandom(MIB), at * MIB, at) for at in range(REQUESTS)]
    ours, theirs = {}, {}
    with counted(tmp_path, "server", "nbd", url, "--socket", str(place)) as server:
        server.ready()
        async with await connected(place) as client:
            # Memory that is used for the first time does not count.
            await exchange(client, reads, MIB)
            await exchange(client, [*writes, request(nbd.FLUSH)], 0)
            await exchange(client, [request(nbd.READ, 0, SMALLEST)], SMALLEST)
            for column, messages, length in (("write", writes, 0), ("read", reads, MIB)):
                behind.take()
                server.take()
                await exchange(client, messages, length)
                await exchange(client, [request(nbd.READ, 0, SMALLEST)], SMALLEST)
                ours[f"{scheme} {column}"] = factors(server.take(), REQUESTS * MIB)
                theirs[f"{scheme} {column}"] = factors(behind.take(), REQUESTS * MIB)
    check(ours, "nbd")
    check(theirs, "target")


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
def test_from_python(tmp_path: Path, target: tuple[Counted, str], scheme: str) -> None:
    """`iserblk copy` uses the API; what it does with its file, in threads, is not counted."""
    behind, url = target
    url = url.replace("iser:", f"{scheme}:")
    source, place = tmp_path / "source", tmp_path / "place"
    source.write_bytes(os.urandom(REQUESTS * MIB))
    ours, theirs = {}, {}
    for column, words in (("write", (str(source), url)), ("read", (url, str(place)))):
        behind.take()
        with counted(tmp_path, column, "copy", *words) as program:
            counts = program.end()
        ours[f"{scheme} {column}"] = {
            where: factor
            for where, factor in factors(counts, REQUESTS * MIB).items()
            # What is allocated at its start, and what the command does itself, is left out.
            if not where.endswith(f" {FRESH}") and not where.startswith("cli.")
        }
        theirs[f"{scheme} {column}"] = factors(behind.take(), REQUESTS * MIB)
    assert place.read_bytes() == source.read_bytes()
    check(ours, "api")
    check(theirs, "target")


@pytest.mark.parametrize("scheme", ["iser", pytest.param("iscsi", marks=pytest.mark.long)])
def test_through_fuse(tmp_path: Path, target: tuple[Counted, str], scheme: str) -> None:
    need_fuse()
    behind, url = target
    url = url.replace("iser:", f"{scheme}:")
    (tmp_path / "mount").mkdir()
    memory = mmap(-1, MIB)  # in whole pages: each call is one request
    memory[:] = os.urandom(MIB)
    columns = (f"{scheme} write", f"{scheme} read")
    ours, theirs = {}, {}
    with counted(tmp_path, "server", "mount", "-f", url, str(tmp_path / "mount")) as server:
        server.ready()
        fd = os.open(tmp_path / "mount" / "lun0", os.O_RDWR)
        try:
            os.preadv(fd, [memory], 0)  # memory that is used for the first time does not count
            os.preadv(fd, [memoryview(memory)[:SMALLEST]], 0)
            for column, call in zip(columns, (os.pwritev, os.preadv), strict=True):
                behind.take()
                server.take()
                for at in range(REQUESTS):
                    assert call(fd, [memory], at * MIB) == MIB
                os.preadv(fd, [memoryview(memory)[:SMALLEST]], 0)
                ours[column] = factors(server.take(), REQUESTS * MIB)
                theirs[column] = factors(behind.take(), REQUESTS * MIB)
        finally:
            os.close(fd)
    check(ours, "fuse")
    check(theirs, "target")


def test_every_line_of_the_table_is_known() -> None:
    """Also those that no test counts have a number in at least one column."""
    for process in ("nbd", "fuse", "api", "target"):
        assert documented(process)
        assert all(documented(process).values())
