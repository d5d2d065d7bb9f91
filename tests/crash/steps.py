"""Records what a function of ours does to the files of a directory, step by step; and makes the
directory as it may be when the process is killed between two steps or within a write, and as it may
be after a power failure.

A killed process leaves each step that it has taken. A power failure leaves of the names (files
made, linked, renamed, removed) those that were synced with their directory, and any number of those
after, in order; and of the bytes of a file those that were synced, and more of them, cut anywhere,
or zeroes in their place.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("create", "mkdir", "link", "rename", "unlink", "rmdir")


@dataclass
class Step:
    """``kind``: one of _NAMES, write, truncate, mode, sync, syncdir. ``file``: a number that stays
    with a file. ``path``, ``other``: relative to the directory; "." is the directory itself."""

    kind: str
    file: int = -1
    path: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = b""
    number: int = 0  # a size, or mode


@dataclass
class Tree:
    """What a directory has. ``names``: path → number of a file, None for a directory."""

    names: dict[str, int | None] = field(default_factory=dict)
    contents: dict[int, bytearray] = field(default_factory=dict)
    modes: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Tree:
        contents = {file: bytearray(content) for file, content in self.contents.items()}
        return Tree(dict(self.names), contents, dict(self.modes))

    def name(self, step: Step) -> None:
        if step.kind == "create":
            self.names[step.path] = step.file
            self.contents.setdefault(step.file, bytearray())
            self.modes.setdefault(step.file, step.number)
        elif step.kind == "mkdir":
            self.names[step.path] = None
        elif step.kind == "link":
            self.names[step.other] = self.names[step.path]
        elif step.kind == "rename":
            self.names[step.other] = self.names.pop(step.path)
        else:
            del self.names[step.path]

    def change(self, step: Step, cut: int | None = None, *, zeroes: bool = False) -> None:
        """``cut``: only so many bytes of a write."""
        if step.kind == "mode":
            self.modes[step.file] = step.number
            return
        content = self.contents.setdefault(step.file, bytearray())
        if step.kind == "truncate":
            del content[step.number :]
            content.extend(bytes(step.number - len(content)))
        elif step.kind == "write":
            data = step.data[:cut]
            if zeroes:
                data = bytes(len(data))
            content.extend(bytes(max(0, step.offset - len(content))))
            content[step.offset : step.offset + len(data)] = data

    def apply(self, step: Step, cut: int | None = None) -> None:
        if step.kind in _NAMES:
            self.name(step)
        else:
            self.change(step, cut)

    def make(self, directory: Path) -> None:
        """Make the directory so."""
        for each in directory.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
        for path, file in sorted(self.names.items()):
            place = directory / path
            if file is None:
                place.mkdir()
            else:
                place.write_bytes(self.contents[file])
                place.chmod(self.modes[file])

    def __str__(self) -> str:
        found = {
            path: "directory" if file is None else bytes(self.contents[file])
            for path, file in sorted(self.names.items())
        }
        return repr(found)


class _Raw(io.FileIO):
    """A file that is open for writing: what is written goes through os.write."""

    steps: Steps

    def write(self, data: Any, /) -> int:
        return os.write(self.fileno(), bytes(data))

    def truncate(self, size: int | None = None, /) -> int:
        os.ftruncate(self.fileno(), self.tell() if size is None else size)
        return self.tell() if size is None else size

    def close(self) -> None:
        if not self.closed:
            self.steps.forget(self.fileno())
        super().close()


class Steps:
    """Records what happens in ``directory``, from now on until the monkeypatch is undone."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.before = Tree()
        self.steps: list[Step] = []
        self._files: dict[int, int] = {}  # descriptor → number of the file
        self._directories: dict[int, str] = {}
        self._inodes: dict[int, int] = {}
        self._files_seen = 0
        for path in sorted(directory.rglob("*")):
            name = str(path.relative_to(directory))
            if path.is_dir():
                self.before.names[name] = None
                continue
            number = self._number(os.stat(path).st_ino)
            self.before.names[name] = number
            self.before.contents[number] = bytearray(path.read_bytes())
            self.before.modes[number] = path.stat().st_mode & 0o7777
        self._real = {
            name: getattr(os, name)
            for name in (
                *("open", "close", "write", "ftruncate", "fsync", "fdatasync", "fchmod", "chmod"),
                *("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir"),
            )
        }
        self._real_open = io.open
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(io, "open", self._open_file)
        monkeypatch.setattr(builtins, "open", self._open_file)

    def _number(self, inode: int) -> int:
        if inode not in self._inodes:
            self._inodes[inode] = self._files_seen
            self._files_seen += 1
        return self._inodes[inode]

    def _inside(self, path: Any) -> str:
        """Relative to the directory; "": it is elsewhere."""
        if isinstance(path, int):
            return ""
        absolute = os.path.abspath(os.fsdecode(path))
        if absolute == str(self.directory):
            return "."
        begin = f"{self.directory}/"
        return absolute.removeprefix(begin) if absolute.startswith(begin) else ""

    def _step(self, kind: str, **fields: Any) -> None:
        self.steps.append(Step(kind, **fields))

    def forget(self, fd: int) -> None:
        self._files.pop(fd, None)
        self._directories.pop(fd, None)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        name = self._inside(path)
        was = bool(name) and os.path.lexists(path)
        fd: int = self._real["open"](path, flags, mode, **more)
        self.forget(fd)  # a number that has come again: what only reads was closed unnoticed
        if not name:
            return fd
        status = os.fstat(fd)
        if os.path.isdir(path):
            self._directories[fd] = name
        else:
            if not was:
                self._inodes.pop(status.st_ino, None)  # the number may have come again
            file = self._number(status.st_ino)
            self._files[fd] = file
            if not was:
                self._step("create", file=file, path=name, number=status.st_mode & 0o7777)
            elif flags & os.O_TRUNC:
                self._step("truncate", file=file)
        return fd

    def _close(self, fd: int) -> None:
        self.forget(fd)
        self._real["close"](fd)

    def _write(self, fd: int, data: Any) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR) if fd in self._files else 0
        count: int = self._real["write"](fd, data)
        if fd in self._files:
            content = bytes(data)[:count]
            self._step("write", file=self._files[fd], offset=offset, data=content)
        return count

    def _ftruncate(self, fd: int, size: int) -> None:
        self._real["ftruncate"](fd, size)
        if fd in self._files:
            self._step("truncate", file=self._files[fd], number=size)

    def _fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        if fd in self._files:
            self._step("sync", file=self._files[fd])
        elif fd in self._directories:
            self._step("syncdir", path=self._directories[fd])

    def _fdatasync(self, fd: int) -> None:
        self._fsync(fd)

    def _fchmod(self, fd: int, mode: int) -> None:
        self._real["fchmod"](fd, mode)
        if fd in self._files:
            self._step("mode", file=self._files[fd], number=mode)

    def _chmod(self, path: Any, mode: int, **more: Any) -> None:
        self._real["chmod"](path, mode, **more)
        if self._inside(path):
            self._step("mode", file=self._number(os.stat(path).st_ino), number=mode)

    def _two(self, kind: str, name: str, old: Any, new: Any, more: Any) -> None:
        self._real[name](old, new, **more)
        if self._inside(old):
            self._step(kind, path=self._inside(old), other=self._inside(new))

    def _rename(self, old: Any, new: Any, **more: Any) -> None:
        self._two("rename", "rename", old, new, more)

    def _replace(self, old: Any, new: Any, **more: Any) -> None:
        self._two("rename", "replace", old, new, more)

    def _link(self, old: Any, new: Any, **more: Any) -> None:
        self._two("link", "link", old, new, more)

    def _one(self, kind: str, name: str, path: Any, *words: Any, **more: Any) -> None:
        self._real[name](path, *words, **more)
        if self._inside(path):
            self._step(kind, path=self._inside(path))

    def _unlink(self, path: Any, **more: Any) -> None:
        self._one("unlink", "unlink", path, **more)

    def _remove(self, path: Any, **more: Any) -> None:
        self._one("unlink", "remove", path, **more)

    def _mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        self._one("mkdir", "mkdir", path, mode, **more)

    def _rmdir(self, path: Any, **more: Any) -> None:
        self._one("rmdir", "rmdir", path, **more)

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        ours = file in self._files if isinstance(file, int) else bool(self._inside(file))
        if not ours or not set(mode) & set("wax+"):
            return self._real_open(
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        if isinstance(file, int):
            fd = file
        else:
            flags = {"w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL}
            extra = next((flags[each] for each in mode if each in flags), 0)
            access = os.O_RDWR if "+" in mode else os.O_WRONLY
            fd = (opener or os.open)(file, access | extra | os.O_CLOEXEC)
        raw = _Raw(fd, "r+" if "+" in mode else "w", closefd=closefd)
        raw.steps = self
        if not buffering:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    # -- what may be left ----------------------------------------------------------------------

    def killed(self) -> Iterator[tuple[str, Tree]]:
        """After each step, and after each byte of each write. With words for each."""
        tree = self.before.copy()
        yield "before the first step", tree.copy()
        for number, step in enumerate(self.steps):
            for cut in range(len(step.data)):
                part = tree.copy()
                part.apply(step, cut)
                yield f"step {number} ({step.kind}) cut at byte {cut}", part
            tree.apply(step)
            yield f"after step {number} ({step.kind} {step.path} {step.other})", tree.copy()

    def power_failed(self, count: int | None = None) -> Iterator[tuple[str, Tree]]:
        """After each number of steps, or after ``count`` of them."""
        counts = range(len(self.steps) + 1) if count is None else (count,)
        for taken in counts:
            steps = self.steps[:taken]
            names = [each for each in steps if each.kind in _NAMES]
            certain = self._certain_names(steps)
            for kept in range(certain, len(names) + 1):
                for words, contents in self._contents(steps):
                    tree = contents.copy()
                    for step in names[:kept]:
                        tree.name(step)
                    yield f"{taken} steps, {kept} names of {len(names)}, {words}", tree

    def _certain_names(self, steps: list[Step]) -> int:
        """How many of the first names are durable: a directory that is synced has all of its names;
        a name in another directory behind one of them is taken to be as durable."""
        count, certain = 0, 0
        for step in steps:
            if step.kind in _NAMES:
                count += 1
            elif step.kind == "syncdir":
                certain = count
        return certain

    def _contents(self, steps: list[Step]) -> Iterator[tuple[str, Tree]]:
        """With what is synced; and with more."""
        synced = {step.file: at for at, step in enumerate(steps) if step.kind == "sync"}
        data = [
            (step, at < synced.get(step.file, -1))
            for at, step in enumerate(steps)
            if step.kind in ("write", "truncate", "mode")
        ]
        pending = sum(len(step.data) for step, certain in data if not certain)
        for zeroes in (False, True):
            for share in range(pending + 1):
                tree = self.before.copy()
                left = share
                for step, certain in data:
                    if certain or step.kind == "mode":
                        tree.change(step)
                    elif step.kind == "write":
                        cut = min(left, len(step.data))
                        left -= cut
                        if cut:
                            tree.change(step, cut, zeroes=zeroes)
                    elif left or share == pending:
                        tree.change(step)
                yield f"{share} bytes of {pending}{' as zeroes' if zeroes else ''}", tree
            if not pending:
                return
