"""Several descriptors as one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from iserblk.loop.blocking import readable
from iserblk.loop.gathering import Gathering


def test_it_is_ready_when_one_of_them_is() -> None:
    (one, first), (other, second) = socket.socketpair(), socket.socketpair()
    with one, other, first, second:
        gathering = Gathering()
        fd = gathering.fileno()
        assert fd >= 0
        gathering.add(one.fileno())
        gathering.add(other.fileno())
        assert not readable(fd)
        second.send(b"x")
        assert readable(fd)
        first.send(b"x")
        gathering.remove(other.fileno())
        assert readable(fd)
        one.recv(1)
        assert not readable(fd)
        gathering.watch_output(one.fileno(), True)
        assert readable(fd)
        gathering.watch_output(one.fileno(), False)
        assert not readable(fd)
        gathering.close()
        assert gathering.closed
        assert gathering.fileno() == -1


def test_what_cannot_be_waited_for(tmp_path: Path) -> None:
    gathering = Gathering()
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="not permitted"):
        gathering.add(file.fileno())
    gathering.close()
