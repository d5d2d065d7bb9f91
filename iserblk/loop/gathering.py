"""Several descriptors as one, for what waits for a single descriptor."""

from __future__ import annotations

import select


class Gathering:
    """A descriptor of its own, which can be read from when one of those that were added is ready.

    It is an epoll instance. Nobody waits in it: its ``fileno`` is what a loop waits for. Any thread
    may call its methods, two of them not at the same time. All but ``close`` and ``fileno`` raise
    OSError: no descriptor is left, or no memory of the kernel, or ``fd`` is closed."""

    __slots__ = ("_epoll",)

    def __init__(self) -> None:
        self._epoll = select.epoll()

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def fileno(self) -> int:
        """-1: closed."""
        return -1 if self._epoll.closed else self._epoll.fileno()

    def add(self, fd: int) -> None:
        """``fd`` is ready when it can be read from."""
        self._epoll.register(fd, select.EPOLLIN)

    def watch_output(self, fd: int, wanted: bool) -> None:
        """``wanted``: ``fd`` is ready also when it can be written to."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """To be called before ``fd`` is closed."""
        self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()
