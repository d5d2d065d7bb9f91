"""Programs that make data durable, and note what; and what has to be there after a power failure.

A note ``begun`` comes before an operation, ``done`` when fsync(2) has returned. Versions of a thing
are numbered from 1; 0 stands for its absence. At a power failure it has a version from the last one
that is done to the last that has begun.
"""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import subprocess
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from tests.crash.recording import MARK, Journal
from tests.crash.states import Note

SECTOR = 512
PAGE = 4096
PAGES = 16  # of the file that is overwritten in place
Play = Callable[[Path, Journal, int], None]
Check = Callable[[Path, "Versions"], None]


class Lost(Exception):
    """What was durable is not there."""


class Versions:
    """Of each thing the last version that is done, and the last that has begun."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self._done: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        for note in notes:
            what, thing = note.fields["what"], note.fields.get("thing", "")
            if what == "begun":
                self._begun[thing] = note.fields["version"]
            elif what == "done":
                self._done[thing] = note.fields["version"]

    def of(self, thing: str) -> range:
        """Those that it may have."""
        return range(self._done.get(thing, 0), self._begun.get(thing, 0) + 1)

    def things(self, prefix: str) -> list[str]:
        return sorted(each for each in self._begun if each.startswith(prefix))

    @property
    def done(self) -> int:
        return sum(self._done.values())


def content(thing: str, version: int, length: int) -> bytes:
    """Of a version of a thing. Each sector of it says what it is."""
    chance = random.Random(f"{thing} {version}")
    found = bytearray()
    while len(found) < length:
        head = MARK + f" {thing} {version} {len(found)} ".encode()
        found += head + chance.randbytes(SECTOR - len(head))
    return bytes(found[:length])


def size_of(thing: str, version: int) -> int:
    digest = hashlib.sha256(f"{thing}/{version}".encode()).digest()
    return int.from_bytes(digest[:2], "big") % (1, 700, 5000, 40_000)[digest[2] % 4] + 1


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_absent(thing: str, version: int) -> bool:
    """Whether this version of a thing that is replaced is its removal."""
    return version % 5 == 0


# -- files -------------------------------------------------------------------------------------


class _Files:
    def __init__(self, place: Path, journal: Journal, seed: int) -> None:
        self.place = place
        self.journal = journal
        self.chance = random.Random(seed)
        self.versions: dict[str, int] = {}

    def begin(self, thing: str) -> int:
        version = self.versions.get(thing, 0) + 1
        self.versions[thing] = version
        self.journal.note(what="begun", thing=thing, version=version)
        return version

    def done(self, thing: str) -> None:
        self.journal.note(what="done", thing=thing, version=self.versions[thing])

    def replaced(self) -> None:
        """Written anew beside it, and renamed; or removed."""
        thing = f"replaced{self.chance.randrange(4)}"
        version = self.begin(thing)
        path = self.place / thing
        if is_absent(thing, version):
            path.unlink()
        else:
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                file.write(content(thing, version, size_of(thing, version)))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        sync_directory(self.place)
        self.done(thing)

    def appended(self) -> None:
        thing = f"appended{self.chance.randrange(2)}"
        version = self.begin(thing)
        path = self.place / thing
        with path.open("ab", buffering=0) as file:
            file.write(content(thing, version, size_of(thing, version)))
            os.fdatasync(file.fileno())
        if version == 1:
            sync_directory(self.place)
        self.done(thing)

    def overwritten(self) -> None:
        """In place, in a file that was filled before, some pages at once."""
        pages = self.chance.sample(range(PAGES), self.chance.randrange(1, 4))
        things = [f"page{page}" for page in pages]
        path = self.place / "pages"
        with path.open("r+b", buffering=0) as file:
            for page, thing in zip(pages, things, strict=True):
                version = self.begin(thing)
                file.seek(page * PAGE)
                file.write(content(thing, version, PAGE))
            os.fdatasync(file.fileno())
        for thing in things:
            self.done(thing)

    def made(self) -> None:
        """A new file in a new directory."""
        thing = f"made/{len([each for each in self.versions if each.startswith('made/')])}"
        version = self.begin(thing)
        path = self.place / thing.replace("/", "-") / "file"
        path.parent.mkdir()
        with path.open("wb") as file:
            file.write(content(thing, version, size_of(thing, version)))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)
        sync_directory(self.place)
        self.done(thing)

    def noise(self) -> None:
        """What nobody has asked to be durable."""
        path = self.place / f"noise{self.chance.randrange(6)}"
        if path.exists() and self.chance.random() < 0.4:
            path.unlink()
        else:
            with path.open("ab") as file:
                file.write(self.chance.randbytes(self.chance.randrange(30_000)))

    def trim(self) -> None:
        subprocess.run(["fstrim", self.place], check=False, stderr=subprocess.DEVNULL)


def play_files(place: Path, journal: Journal, steps: int) -> None:
    files = _Files(place, journal, seed=steps)
    with (place / "pages").open("wb") as file:
        file.write(bytes(PAGES * PAGE))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(place)
    journal.note(what="made")
    kinds = [files.replaced, files.appended, files.overwritten, files.made, files.noise]
    for step in range(steps):
        if step % 40 == 39:
            files.trim()
        files.chance.choices(kinds, (4, 3, 3, 2, 4))[0]()


def check_files(place: Path, versions: Versions) -> None:
    """Raises Lost."""
    for thing in versions.things("replaced"):
        _check_whole(place / thing, thing, versions)
    for thing in versions.things("made/"):
        path = place / thing.replace("/", "-") / "file"
        if versions.of(thing).start:
            _check_whole(path, thing, versions)
    for thing in versions.things("appended"):
        done = versions.of(thing).start
        expected = b"".join(
            content(thing, each, size_of(thing, each)) for each in range(1, done + 1)
        )
        path = place / thing
        found = path.read_bytes() if path.exists() else b""
        if not found.startswith(expected):
            at = next(
                (i for i, each in enumerate(expected) if found[i : i + 1] != bytes((each,))), 0
            )
            raise Lost(f"{thing}: {len(expected)} bytes were synced; wrong from byte {at} on")
    pages = (place / "pages").read_bytes()
    if len(pages) != PAGES * PAGE:
        raise Lost(f"pages: {len(pages)} bytes")
    for page in range(PAGES):
        thing = f"page{page}"
        allowed = [
            content(thing, each, PAGE) if each else bytes(PAGE) for each in versions.of(thing)
        ]
        for at in range(0, PAGE, SECTOR):
            found = pages[page * PAGE + at :][:SECTOR]
            if all(found != each[at : at + SECTOR] for each in allowed):
                raise Lost(f"{thing}, byte {at}: none of the versions {versions.of(thing)}")


def _check_whole(path: Path, thing: str, versions: Versions) -> None:
    found = path.read_bytes() if path.exists() else None
    for version in versions.of(thing):
        absent = not version or (thing.startswith("replaced") and is_absent(thing, version))
        expected = None if absent else content(thing, version, size_of(thing, version))
        if found == expected:
            return
    length = "absent" if found is None else f"{len(found)} bytes"
    raise Lost(f"{thing}: {length}, none of the versions {versions.of(thing)}")


# -- SQLite ------------------------------------------------------------------------------------


def play_sqlite(place: Path, journal: Journal, steps: int, mode: str = "WAL") -> None:
    """Transactions, each durable when its commit returns: with a rollback journal that takes
    synchronous=EXTRA (its removal has to be durable)."""
    path = place / "db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode.lower()
        db.execute("pragma synchronous=" + ("full" if mode == "WAL" else "extra"))
        db.execute("pragma wal_autocheckpoint=20")
        db.execute("create table words (number integer primary key, word blob)")
        db.execute("create table counts (id integer primary key, number integer)")
        db.execute("insert into counts values (1, 0)")
        sync_directory(place)
        journal.note(what="made")
        for version in range(1, steps + 1):
            journal.note(what="begun", thing="row", version=version)
            db.execute("begin")
            word = content("row", version, size_of("row", version))
            db.execute("insert into words values (?, ?)", (version, word))
            if version > 30:  # pages become free, and are used again
                db.execute("delete from words where number = ?", (version - 30,))
            db.execute("update counts set number = ?", (version,))
            db.execute("commit")
            journal.note(what="done", thing="row", version=version)


def play_sqlite_rollback(place: Path, journal: Journal, steps: int) -> None:
    play_sqlite(place, journal, steps, "DELETE")


def check_sqlite(place: Path, versions: Versions) -> None:
    """Raises Lost."""
    try:
        with closing(sqlite3.connect(place / "db")) as db:
            problems = db.execute("pragma integrity_check").fetchall()
            if problems != [("ok",)]:
                raise Lost(f"integrity_check: {problems[:3]}")
            ((number,),) = db.execute("select number from counts").fetchall()
            rows = dict(db.execute("select number, word from words").fetchall())
    except sqlite3.Error as error:
        raise Lost(f"the database: {error}") from error
    if number not in versions.of("row"):
        raise Lost(f"the database has {number} transactions, none of {versions.of('row')}")
    expected = range(max(1, number - 29), number + 1)
    if sorted(rows) != list(expected):
        raise Lost(f"the database has rows {sorted(rows)}, not {expected}")
    for version, word in rows.items():
        if word != content("row", version, size_of("row", version)):
            raise Lost(f"row {version} has another content")
