"""Every error that iserblk raises, branched by what the caller may do next.

    IserblkError
    ├── LocalProtocolError        a caller inside iserblk broke a rule: a bug; nothing was sent
    ├── BadArgument               an option, URL or path is wrong: correct it and call again
    ├── NotSupported              the request is clear, but cannot be done: the text says what can
    │   └── UnusableLun           a disk whose blocks or capacity cannot be used
    ├── PermissionDenied          more rights are needed
    ├── Busy                      the thing is in use: try again later
    │   └── ReservationLost       another initiator has taken over the LUN: do not write to it again
    ├── WritesLost                writes that the target had acknowledged are lost: write them again
    ├── TransportError            no connection, or not any more; every task in flight has ended
    │   ├── RemoteProtocolError   the peer broke its protocol; the connection has been closed
    │   ├── ConnectionLost        the connection ended unexpectedly
    │   ├── ConnectFailed         no connection could be made
    │   ├── HostNotFound          the portal's name does not resolve
    │   ├── OtherProtocol         the portal speaks another protocol than the URL's: it says which
    │   ├── ConnectTimeout        the peer did not answer in time
    │   │   └── NoMpaReply        TCP answered, MPA did not: another style of login may work
    │   └── LunChanged            another LUN is there now: nothing is sent to it
    ├── LoginError                the target refused the login; carries status class and detail
    │   ├── IserRefused           the target does not agree to iSER; Traditional iSCSI may work
    │   ├── TargetNotFound        no such target name there
    │   └── AuthenticationError   the credentials were refused
    └── CommandError              one command failed; the session goes on
        ├── CommandTimeout        its deadline passed; it was aborted, its buffer is free
        ├── CommandRejected       a Reject PDU or a task management answer ended it
        └── ScsiError             a SCSI status other than GOOD; carries status and sense
            ├── NoSuchLun
            ├── WriteProtected
            ├── OutOfSpace        there is no room left behind a thin LUN
            ├── ReservationConflict   another initiator has reserved the LUN
            └── OutOfRange        the address is past the end

``errno`` is what the two front-ends (NBD, FUSE) return; ``exit_status`` is the exit status of the
command line: 0 done, 1 other, 4 transport, 5 login refused, 7 bad argument, 8 connect timeout,
11 command timeout, 13 permission, 21 no such target or LUN, 23 host not found,
24 authentication, 27 not supported, 28 busy.
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar, TypeVar


class IserblkError(Exception):
    """Root of the tree. ``str(error)`` is one line that names the thing and the remedy.

    ``losses``: of a flush that has failed: how many losses of writes the LUN had by then, where the
    error tells of one; see ``iserblk.disk.durability.losses``."""

    errno: int = _errno.EIO
    losses: int = 0
    exit_status: ClassVar[int] = 1


E = TypeVar("E", bound=Exception)


def without_frames(error: E) -> E:
    """``error``, to be kept: it refers to no frame any more, nor does another error behind it, and
    so not to the buffers that callers have there."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class LocalProtocolError(IserblkError):
    """A caller inside iserblk broke the rule named in the text; no state was changed."""

    errno = _errno.EINVAL


class BadArgument(IserblkError):
    """A URL, option or path that cannot be used as given."""

    errno = _errno.EINVAL
    exit_status = 7


class NotSupported(IserblkError):
    """A request that is clear, but not possible here; the text says what to do instead."""

    errno = _errno.EOPNOTSUPP
    exit_status = 27


class UnusableLun(NotSupported):
    """The LUN is a disk, but its block length or its capacity, as it tells them now, cannot be
    used. Nothing was written to it."""


class PermissionDenied(IserblkError):
    errno = _errno.EACCES
    exit_status = 13


class Busy(IserblkError):
    errno = _errno.EBUSY
    exit_status = 28


class ReservationLost(Busy):
    """Another initiator has, or had, the LUN that ``reserve=exclusive`` reserved. No session that
    had the reservation may write to the LUN any more."""


class WritesLost(IserblkError):
    """Writes that were acknowledged are lost, and iserblk has no copy of them. A flush tells each
    client of that once. Raised by a write with ``fua``, it was that write."""


class TransportError(IserblkError):
    """There is no connection, or not any more. Every task in flight on it has ended."""

    errno = _errno.EIO
    exit_status = 4


class RemoteProtocolError(TransportError):
    """The peer sent something that its protocol forbids.

    The only error that bytes from the network may raise. ``layer`` names the standard
    ("MPA", "DDP", "RDMAP", "iSER", "iSCSI", "SCSI"). ``terminate`` is the (layer, etype, ecode)
    of the RDMAP Terminate that belongs to it (RFC 5040 section 4.8), or None.
    """

    errno = _errno.EPROTO

    def __init__(
        self, layer: str, text: str, terminate: tuple[int, int, int] | None = None
    ) -> None:
        super().__init__(f"{layer}: {text}")
        self.layer = layer
        self.terminate = terminate


class ConnectionLost(TransportError):
    errno = _errno.ECONNRESET


class ConnectFailed(TransportError):
    errno = _errno.ECONNREFUSED


class HostNotFound(TransportError):
    errno = _errno.ENOENT
    exit_status = 23


class OtherProtocol(TransportError):
    """The portal does not speak the protocol that the URL asks for. ``speaks``: what it speaks, as
    the text says. Nothing was left at the target."""

    errno = _errno.EPROTONOSUPPORT

    def __init__(self, text: str, speaks: str = "") -> None:
        super().__init__(text)
        self.speaks = speaks


class ConnectTimeout(TransportError):
    errno = _errno.ETIMEDOUT
    exit_status = 8


class NoMpaReply(ConnectTimeout):
    """The portal took the TCP connection, but did not answer the MPA Request."""


class LunChanged(TransportError):
    """Another LUN has taken the place of the LUN in use. Nothing was sent to it since that was
    noticed, and nothing will be: the data to write belongs to the LUN that is gone. After a
    reconnection the session is over; in a living one, its other LUNs go on."""


class LoginError(IserblkError):
    """The target refused the login. ``status``: (Status-Class << 8) | Status-Detail, RFC 7143
    section 11.13.5. ``address``: the target's new address (TargetAddress, ``host[:port]``) if it
    has moved, else "".
    """

    errno = _errno.EACCES
    exit_status = 5

    def __init__(self, text: str, status: int = 0, address: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.address = address


class IserRefused(LoginError):
    """The target did not answer RDMAExtensions with Yes (RFC 7145 section 6.3)."""

    errno = _errno.EPROTONOSUPPORT


class TargetNotFound(LoginError):
    errno = _errno.ENOENT
    exit_status = 21


class AuthenticationError(LoginError):
    exit_status = 24


class CommandError(IserblkError):
    """One command failed; the session and the connection stay usable."""


class CommandTimeout(CommandError):
    """``logged``: the log has a line already about the target that does not answer."""

    exit_status = 11
    logged: bool = False


class CommandRejected(CommandError):
    """The target ended the command with a Reject PDU or a task management response."""


class ScsiError(CommandError):
    """A command ended with a status other than GOOD.

    ``status`` is the SAM status byte, ``sense`` the decoded sense data
    (``iserblk.scsi.sense.Sense``) or None.
    """

    def __init__(self, text: str, status: int = 0, sense: object | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.sense = sense


class NoSuchLun(ScsiError):
    errno = _errno.ENXIO
    exit_status = 21


class WriteProtected(ScsiError):
    errno = _errno.EROFS
    exit_status = 13


class OutOfSpace(ScsiError):
    """The target has no room for the data (DATA PROTECT, SPACE ALLOCATION FAILED WRITE PROTECT, of
    SBC-4). Any part of the command's data may be missing; the rest of the LUN is intact."""

    errno = _errno.ENOSPC


class ReservationConflict(ScsiError):
    errno = _errno.EBUSY
    exit_status = 28


class OutOfRange(ScsiError):
    errno = _errno.EINVAL


def first_error(error: BaseException) -> BaseException:
    """The first IserblkError, else the first OSError, in a group of errors (several tasks failed);
    else the group. An error that is no group is returned unchanged."""
    if isinstance(error, BaseExceptionGroup):
        known = error.subgroup(IserblkError) or error.subgroup(OSError)
        return error if known is None else first_error(known.exceptions[0])
    return error
