"""Accepting connections by rdma_cm, without blocking.

Each connection gets its own event channel as soon as its request arrives, because pyverbs does not
show which identifier an event is about.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from iserblk.errors import BadArgument, Busy, ConnectFailed, IserblkError, NotSupported
from iserblk.installation import no_gaps
from iserblk.loop.gathering import Gathering
from iserblk.rcap.verbs import api, available, statuses
from iserblk.rcap.verbs.cm import Channel, Event
from iserblk.rcap.verbs.link import MAX_DEPTH, MODES, REGION, Link
from iserblk.rcap.verbs.queuepair import VerbsQueuePair, pool_budget

log = logging.getLogger(__name__)

BACKLOG = 64
MAX_PENDING = 64  # accepted, and not yet established
MOST_EVENTS = 16  # of one call of ``progress``: a request takes a while, and others wait
PENDING_S = 10.0

# Takes the private data of a connection request and returns that of the reply. When it raises an
# IserblkError, the connection is refused.
Reply = Callable[[bytes], bytes]


class _Pending:
    """An accepted connection that is not established yet."""

    __slots__ = ("deadline", "depths", "link", "private_data", "qp")

    def __init__(
        self,
        qp: VerbsQueuePair,
        link: Link,
        depths: tuple[int, int],
        private_data: bytes,
        deadline: float,
    ) -> None:
        self.qp = qp
        self.link = link
        self.depths = depths
        self.private_data = private_data
        self.deadline = deadline


class VerbsListener:
    """Listens on a numeric address. Refused connections are logged and raise nothing."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        receive_size: int,
        receives: int,
        ird: int,
        reply: Reply,
        mode: str = REGION,
    ) -> None:
        """``port`` 0 takes a free port. ``receives`` of ``receive_size`` bytes are posted for each
        connection before it is accepted. ``ird`` and ``mode``: as for VerbsConnector; a target
        advertises no memory.

        Raises Busy, BadArgument, NotSupported or PermissionDenied.
        """
        missing = available()
        if missing is not None:
            raise NotSupported(f"RDMA: {missing}")
        self._gaps = api.gaps()
        if self._gaps is None:
            raise NotSupported(f"listening by rdma_cm needs the compiled module: {no_gaps()}")
        if mode not in MODES:
            raise ValueError(mode)
        self._cmid = api.pyverbs("cmid")
        self._error: type[Exception] = api.pyverbs("pyverbs_error").PyverbsError
        self._receive_size = receive_size
        self._receives = receives
        self._ird = ird
        self._reply = reply
        self._mode = mode
        self._pending: dict[int, _Pending] = {}
        self._name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._gathering = Gathering()
        self._identifier: Any = None
        self._channel: Channel | None = None
        try:
            self._channel = Channel()
            self._identifier = self._cmid.CMID(creator=self._channel.raw)
            self._bind(host, port)
            self._gathering.add(self._channel.fd)
            self.port: int = self._gaps.source_port(self._identifier)
        except BaseException:
            self.close()
            raise

    def _bind(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        assert self._gaps is not None  # __init__ has checked
        try:
            has_device = self._gaps.bind(self._identifier, _packed(family, address))
            if not has_device and not ipaddress.ip_address(address[0]).is_unspecified:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self._identifier.listen(BACKLOG)
        except (OSError, self._error) as error:
            number = getattr(error, "errno", None) or getattr(error, "error_code", 0)
            words_ = getattr(error, "strerror", None) or api.error_words(error)
            if number == errno.EADDRINUSE:
                raise Busy(
                    f"{self._name} is in use by rdma_cm: choose another port, or see which process "
                    "has it (rdma resource show cm_id)"
                ) from None
            if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise BadArgument(
                    f"{self._name}: no RDMA device has this address; see rdma link"
                ) from None
            raise BadArgument(f"cannot listen on {self._name} by rdma_cm: {words_}") from None

    def fileno(self) -> int:
        """The descriptor to wait for; -1 after ``close``."""
        return self._gathering.fileno()

    def progress(self, now: float) -> list[VerbsQueuePair]:
        """Returns new connections that are established; they belong to the caller.

        Call it when the descriptor is readable, and once a second while it is not: that drops peers
        that do not finish within PENDING_S. ``now``: monotonic seconds. Raises ConnectFailed when
        listening is over, because the device is gone.
        """
        if self._channel is None:
            raise ConnectFailed(f"{self._name}: the listener is closed")
        for _ in range(MOST_EVENTS):  # for more the descriptor stays readable
            event = self._channel.take()
            if event is None:
                break
            kind = event.kind
            if kind == statuses.CONNECT_REQUEST:
                self._request(event, now)
                continue
            event.close()
            if kind == statuses.DEVICE_REMOVAL:
                raise ConnectFailed(f"{self._name}: {statuses.event(kind)}; no longer listening")
        return self._established(now)

    def _request(self, event: Event, now: float) -> None:
        """Answer one connection request. Closes the event."""
        private_data = event.private_data
        try:
            # An empty CMID in place of the listener: what it does not have is then made for the new
            # identifier.
            identifier = self._cmid.CMID(creator=event.raw, listen_id=self._cmid.CMID())
        finally:
            event.close()
        qp: VerbsQueuePair | None = None
        channel: Channel | None = None
        try:
            if len(self._pending) >= MAX_PENDING:
                raise Busy("too many connections are being set up")
            answer = self._reply(private_data)
            context = api.pyverbs("device").Context(cmid=identifier)
            domain = api.pyverbs("pd").PD(identifier)
            budget = pool_budget(self._receives, self._receive_size)
            channel = Channel()
            assert self._gaps is not None
            self._gaps.migrate(identifier, channel.raw)
            link = Link(identifier, channel, context, domain, self._mode)
            qp = VerbsQueuePair(
                link, receive_size=self._receive_size, receives=self._receives, budget=budget
            )
            device = link.device
            depth = min(self._ird, device.max_reads_in, device.max_reads_out, MAX_DEPTH)
            depths = depth, depth
            if not device.iwarp:
                depths = link.ready(depth, depth)
            identifier.accept(link.parameters(*depths, answer))
            self._pending[channel.fd] = _Pending(qp, link, depths, private_data, now + PENDING_S)
            self._gathering.add(channel.fd)
        except (IserblkError, OSError, self._error) as error:
            log.warning("%s: connection refused: %s", self._name, error)
            with suppress(self._error):
                identifier.reject()
            if qp is not None:
                qp.close()
            else:
                identifier.close()
                if channel is not None:
                    channel.close()

    def _established(self, now: float) -> list[VerbsQueuePair]:
        ready = []
        for fd, pending in list(self._pending.items()):
            event = pending.link.channel.take()
            if event is None:
                if now >= pending.deadline:
                    self._give_up(fd, f"not established within {PENDING_S:g} s")
                continue
            kind, status = event.kind, event.status
            event.close()
            if kind == statuses.ESTABLISHED:
                del self._pending[fd]
                self._gathering.remove(fd)
                pending.qp.connected(*pending.depths, pending.private_data, "")
                ready.append(pending.qp)
            else:
                self._give_up(fd, statuses.failure(kind, status))
        return ready

    def _give_up(self, fd: int, reason: str) -> None:
        log.warning("%s: connection not established: %s", self._name, reason)
        self._gathering.remove(fd)
        self._pending.pop(fd).qp.close()

    def close(self) -> None:
        """Stop listening. Queue pairs that ``progress`` has returned go on."""
        for fd in list(self._pending):
            self._give_up(fd, "no longer listening")
        if self._identifier is not None:
            self._identifier.close()
            self._identifier = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._gathering.close()


def _packed(family: int, address: tuple[Any, ...]) -> bytes:
    """The bytes of a struct sockaddr_in or sockaddr_in6."""
    host, port, *more = address
    number, packed = port.to_bytes(2, "big"), socket.inet_pton(family, host.partition("%")[0])
    if family == socket.AF_INET:
        return struct.pack("=H2s4s8x", family, number, packed)
    flow, scope = more
    return struct.pack("=H2sI16sI", family, number, flow, packed, scope)
