"""A machine with devices, file systems and mounts in memory, on which calls can be interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from iserblk.csi.host import Mounted
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.volumes import BLOCK, Volume

DEVICES = 3


class Killed(BaseException):
    """The plugin is killed here."""


class FakeHost:
    """Implements Host. ``luns``: URL → what is on the LUN ("": nothing, "half": a mkfs that did not
    end). ``same``: URLs of one LUN. ``failing``: mkfs fails when it has begun. ``unwritable``: what
    it has left cannot be erased. ``left``: steps until the plugin is killed, before and behind each
    change of the machine; None: it lives."""

    def __init__(self, *urls: str, size: int = 1 << 30) -> None:
        self.luns = dict.fromkeys(urls, "")
        self.sizes = dict.fromkeys(urls, size)
        self.attached: dict[str, str] = {}
        self.foreign: set[str] = set()
        self.served: set[str] = set()
        self.mounts: dict[str, list[Mounted]] = {}
        self.paths: set[str] = set()
        self.formats = 0
        self.grown: list[str] = []
        self.refusal: Refused | None = None
        self.same: set[str] = set()
        self.failing = False
        self.unwritable = False
        self.left: int | None = None
        self.steps = 0

    def _step(self) -> None:
        self.steps += 1
        if self.left is not None:
            if not self.left:
                raise Killed
            self.left -= 1

    @contextmanager
    def change(self) -> Iterator[None]:
        self._step()
        yield
        self._step()

    def _number(self, volume: Volume) -> str:
        """Of the file system: a btrfs has one of its own."""
        nbd = volume.device.removeprefix("/dev/nbd")
        return f"0:{nbd}" if volume.fs == "btrfs" else f"43:{nbd}"

    def free_device(self, taken: Sequence[str]) -> str:
        for index in range(DEVICES):
            path = f"/dev/nbd{index}"
            if path not in {*self.attached, *taken}:
                return path
        raise Refused(Code.FAILED_PRECONDITION, "all in use")

    def attach(self, volume: Volume, secret: Path) -> bool:
        if self.refusal is not None:
            raise self.refusal
        assert volume.device
        if volume.device in self.foreign:
            self.attached[volume.device] = "another"
            return False
        if volume.has_secret:
            assert secret.stat().st_mode & 0o777 == 0o600
        with self.change():
            (url,) = volume.urls
            assert self.attached.get(volume.device, url) == url
            others = {**self.attached}
            others.pop(volume.device, None)
            assert url not in others.values(), "attached twice"
            self.attached[volume.device] = url
            self.served.add(volume.device)
        return True

    def is_attached(self, volume: Volume) -> bool:
        return bool(volume.device) and self.attached.get(volume.device) == volume.urls[0]

    def is_served(self, volume: Volume) -> bool:
        return volume.device in self.served

    def attached_at(self, path: str) -> str:
        mounted = self.mounted(path)
        if mounted is None:
            return ""
        found = [each for each in self.attached if self.number(each) == mounted.number]
        return mounted.source if mounted.source in self.attached else "".join(found)

    def also_attached_at(self, volume: Volume) -> list[str]:
        same = {volume.urls[0], *(self.same if volume.urls[0] in self.same else ())}
        return [
            path for path, url in self.attached.items() if path != volume.device and url in same
        ]

    def detach(self, path: str) -> None:
        for place, mounts in self.mounts.items():
            if any(each.source == path for each in mounts):
                raise Refused(Code.FAILED_PRECONDITION, f"mounted at {place}")
        with self.change():
            del self.attached[path]
            self.served.discard(path)

    def size(self, volume: Volume) -> int:
        return self.sizes[volume.urls[0]]

    def wait_for_size(self, volume: Volume, secret: Path, size: int) -> int:
        return self.size(volume)

    def file_system(self, volume: Volume) -> str:
        found = self.luns[volume.urls[0]]
        if found == "partitions":
            raise Refused(Code.FAILED_PRECONDITION, "has a partition table")
        return "" if found == "half" and volume.formatting else found

    def format(self, volume: Volume) -> None:
        self._step()
        self.luns[volume.urls[0]] = "half"
        self._step()
        if self.failing:
            raise Refused(Code.INTERNAL, "mkfs.xfs: killed")
        self.luns[volume.urls[0]] = volume.fs
        self.formats += 1
        self._step()

    def erase_unfinished(self, volume: Volume) -> None:
        assert self.is_attached(volume)
        if self.unwritable:
            raise Refused(Code.INTERNAL, "wipefs: Input/output error")
        if self.luns[volume.urls[0]] == "half":
            self.luns[volume.urls[0]] = ""

    def mounted(self, path: str) -> Mounted | None:
        return self.mounts[path][-1] if path in self.mounts else None

    def shown(self, volume: Volume) -> list[Mounted]:
        own = self.mounted(volume.place)
        return [
            mounts[-1]
            for place, mounts in self.mounts.items()
            if own is not None and place != volume.place and mounts[-1].number == own.number
        ]

    def url(self, path: str) -> str:
        return self.attached[path]

    def number(self, path: str) -> str:
        if path.startswith("/dev/nbd"):
            return f"43:{path.removeprefix('/dev/nbd')}"
        mounted = self.mounted(path)
        return mounted.number if mounted else "8:1"

    def mount(self, volume: Volume, path: str) -> None:
        assert self.luns[volume.urls[0]] == volume.fs
        assert self.is_attached(volume)
        with self.change():
            self.paths.add(path)
            self._step()
            self.mounts.setdefault(path, []).append(
                Mounted(path, self._number(volume), "/", volume.read_only, volume.device)
            )

    def bind(self, volume: Volume, source: str, path: str, read_only: bool) -> None:
        if self.mounted(path) is None:
            with self.change():
                self.paths.add(path)
                self._step()
                number = self.number(source)
                read_only_there = volume.read_only and volume.kind != BLOCK
                of = "" if volume.kind == BLOCK else volume.device  # else devtmpfs
                self.mounts.setdefault(path, []).append(
                    Mounted(path, number, "/", read_only_there, of)
                )
        if read_only:
            with self.change():
                self.mounts[path][-1] = replace(self.mounts[path][-1], read_only=True)

    def unmount(self, path: str) -> None:
        while self.mounted(path) is not None:
            with self.change():
                self.mounts[path].pop()
                if not self.mounts[path]:
                    del self.mounts[path]
        with self.change():
            self.paths.discard(path)

    def grow(self, volume: Volume, path: str) -> None:
        assert self.mounted(path) is not None
        self.grown.append(path)

    def usage(self, path: str) -> os.statvfs_result:
        return os.statvfs("/")

    def device_count(self) -> int:
        return DEVICES
