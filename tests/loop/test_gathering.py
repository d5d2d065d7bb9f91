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
        assert gathering.fileno() >= 0
        gathering.add(one.fileno())
        gathering.add(other.fileno())
        assert not readable(gathering.fileno())
        assert gathering.ready(9) == []
        second.send(b"x")
        assert readable(gathering.fileno())
        assert gathering.ready(9) == [other.fileno()]
        first.send(b"x")
        assert sorted(gathering.ready(9)) == sorted([one.fileno(), other.fileno()])
        assert len(gathering.ready(1)) == 1
        gathering.remove(other.fileno())
        assert gathering.ready(9) == [one.fileno()]
        one.recv(1)
        assert gathering.ready(9) == []
        gathering.watch_output(one.fileno(), True)
        assert gathering.ready(9) == [one.fileno()]
        gathering.watch_output(one.fileno(), False)
        assert not readable(gathering.fileno())
        gathering.close()
        assert gathering.closed
        assert gathering.fileno() == -1


def test_what_cannot_be_waited_for(tmp_path: Path) -> None:
    gathering = Gathering()
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="not permitted"):
        gathering.add(file.fileno())
    gathering.close()
