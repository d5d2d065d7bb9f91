"""A new epoll instance (iserblk/loop/renewing.py)."""

from __future__ import annotations

import errno
import os
import select
import socket
from pathlib import Path

import pytest

from iserblk.loop.renewing import renewed
from tests.support.descriptors import descriptors


def test_it_has_what_the_old_one_has() -> None:
    """With its mask, and without what was closed; a socket with the number of that is not added."""
    pairs = [socket.socketpair() for _ in range(4)]
    (here, _), (closed, _), (replaced, _), (stranger, beyond) = pairs
    old = select.epoll()
    masks = {
        here.fileno(): select.EPOLLOUT,
        closed.fileno(): select.EPOLLIN,
        replaced.fileno(): select.EPOLLIN,
    }
    for fd, mask in masks.items():
        old.register(fd, mask)
    beyond.sendall(b"x")
    number = closed.fileno()
    closed.close()
    os.dup2(stranger.fileno(), replaced.fileno())
    new, gone = renewed(old, masks)
    assert sorted(gone) == sorted([number, replaced.fileno()])
    assert new.poll(0) == [(here.fileno(), select.EPOLLOUT)]
    old.close()
    new.close()
    for pair in pairs:
        for end in pair:
            end.close()


def test_no_room_for_a_descriptor_leaves_nothing_open(tmp_path: Path) -> None:
    """The old one has what the new one refuses: as where the kernel has no room."""

    class Old:
        def modify(self, fd: int, mask: int) -> None:
            pass

    with (tmp_path / "file").open("wb") as file:
        before = descriptors()
        with pytest.raises(OSError, match="not permitted") as refused:
            renewed(Old(), {file.fileno(): select.EPOLLIN})  # type: ignore[arg-type]
        assert refused.value.errno == errno.EPERM
        assert descriptors() == before
