"""Event channels of rdma_cm, without blocking: descriptors, events, numeric addresses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from threading import Lock
from typing import Any

from iserblk.errors import ConnectFailed, NotSupported, PermissionDenied
from iserblk.installation import no_gaps
from iserblk.rcap.verbs import api

CM_LINK = "rdma_cm"
COMPLETION_LINK = "[infinibandevent]"
_making = Lock()  # held while a new descriptor is found by comparing lists of descriptors


class Event:
    """One rdma_cm event. ``status`` is 0 where pyverbs alone cannot tell it."""

    __slots__ = ("kind", "private_data", "raw", "status")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.kind: int = raw.event_type
        self.private_data = bytes(raw.private_data or b"")
        gaps = api.gaps()
        self.status: int = 0 if gaps is None else gaps.event_status(raw)

    def close(self) -> None:
        """Acknowledge the event: identifiers with open events cannot be destroyed."""
        self.raw.close()


class Channel:
    """One event channel. Raises NotSupported or PermissionDenied when it cannot be created."""

    def __init__(self) -> None:
        cmid = api.pyverbs("cmid")
        self._event_type = cmid.CMEvent
        self._error: type[Exception] = api.pyverbs("pyverbs_error").PyverbsRDMAError
        gaps = api.gaps()
        find = None if gaps is None else gaps.channel_descriptor
        try:
            self.raw, self.fd = with_descriptor(cmid.CMEventChannel, find, CM_LINK)
        except self._error as error:
            words = api.error_words(error)
            text = f"no rdma_cm event channel ({words})"
            if getattr(error, "error_code", 0) in (errno.EACCES, errno.EPERM):
                raise PermissionDenied(
                    f"{text}: run as root, or give your group access to /dev/infiniband/rdma_cm"
                ) from None
            raise NotSupported(f"{text}: run modprobe rdma_ucm, or say rcap=iwarp") from None

    def take(self) -> Event | None:
        """The next event, which the caller closes; None when there is none. Never blocks.

        Raises ConnectFailed when the channel is broken.
        """
        try:
            return Event(self._event_type(self.raw))
        except self._error as error:
            if getattr(error, "error_code", 0) in (errno.EAGAIN, errno.EINTR):
                return None
            raise ConnectFailed(f"rdma_cm: {api.error_words(error)}") from None

    def close(self) -> None:
        """Close the channel. The caller has closed all identifiers on it before."""
        if self.fd >= 0:
            self.fd = -1
            self.raw.close()


def address_info(host: str, port: int) -> Any:
    """A numeric address in the form of librdmacm. The caller closes it. Raises ConnectFailed."""
    try:
        return api.pyverbs("cmid").AddrInfo(
            dst=host, dst_service=str(port), port_space=api.PS_TCP, flags=api.RAI_NUMERICHOST
        )
    except api.pyverbs("pyverbs_error").PyverbsError as error:
        raise ConnectFailed(
            f"rdma_cm does not take the address {host}: {api.error_words(error)}"
        ) from None


def with_descriptor(
    make: Callable[[], Any], find: Callable[[Any], int] | None, link: str
) -> tuple[Any, int]:
    """The object that ``make`` makes, and its descriptor, set to non-blocking.

    ``find`` gets the descriptor from the object. Without it, the descriptor is found in
    /proc/self/fd: it is new, and its link ends in ``link``. Raises NotSupported if that fails.
    """
    if find is not None:
        made = make()
        fd = find(made)
    else:
        with _making:
            before = _descriptors(link)
            made = make()
            new = _descriptors(link) - before
        if len(new) != 1:
            made.close()
            raise NotSupported(
                "the descriptor of an RDMA event channel was not found without the compiled"
                f" module: {no_gaps()}"
            )
        (fd,) = new
    os.set_blocking(fd, False)
    return made, fd


def _descriptors(link: str) -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith(link):
                found.add(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
    return found
