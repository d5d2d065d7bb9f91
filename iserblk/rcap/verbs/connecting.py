"""Connecting by rdma_cm, without blocking: each call of ``progress`` does what can be done now.

    resolve address → resolve route → connect ─┬─ InfiniBand, RoCE: response → ready → establish
                                               └─ iWARP: established

The listening side is in ``listening``; this module exports it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iserblk.errors import (
    ConnectFailed,
    ConnectTimeout,
    IserblkError,
    NotSupported,
)
from iserblk.rcap.verbs import api, available, statuses
from iserblk.rcap.verbs.cm import Channel, Event, address_info
from iserblk.rcap.verbs.link import AUTO, MAX_DEPTH, MODES, Link
from iserblk.rcap.verbs.listening import VerbsListener
from iserblk.rcap.verbs.queuepair import VerbsQueuePair, pool_budget

__all__ = ["RouteProbe", "VerbsConnector", "VerbsListener"]

ADDRESS_S = 5.0
ROUTE_S = 5.0

PrivateData = bytes | Callable[[bool], bytes]


class _Resolver:
    """The part that a connector and a probe share: an identifier whose address is resolved."""

    def __init__(self, host: str, port: int) -> None:
        missing = available()
        if missing is not None:
            raise NotSupported(f"RDMA: {missing}; or say rcap=iwarp")
        self.portal = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._error: type[Exception] = api.pyverbs("pyverbs_error").PyverbsError
        self.channel = Channel()
        self.identifier: Any = None
        try:
            self.identifier = api.pyverbs("cmid").CMID(creator=self.channel.raw)
            address = address_info(host, port)
            try:
                self.identifier.resolve_addr(address, int(ADDRESS_S * 1000))
            finally:
                address.close()
        except self._error as error:
            self.close()
            raise self._no_device(error) from None
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self.channel.fd

    @property
    def device(self) -> str | None:
        """The name of the device, once the address is resolved."""
        name = self.identifier.dev_name if self.identifier is not None else None
        return (name.decode() if isinstance(name, bytes) else name) or None

    def resolve_route(self, timeout: float) -> None:
        """Start to resolve the route: the step after the address. Raises ConnectFailed."""
        try:
            self.identifier.resolve_route(int(timeout * 1000))
        except self._error as error:
            raise self._no_device(error) from None

    def _no_device(self, error: Exception) -> ConnectFailed:
        return ConnectFailed(
            f"{self.portal}: no RDMA device leads there ({api.error_words(error)}); "
            "check ip route and rdma link, or say rcap=iwarp"
        )

    def close(self) -> None:
        if self.identifier is not None:
            self.identifier.close()
            self.identifier = None
        self.channel.close()


class RouteProbe:
    """Finds out whether an RDMA device leads to an address. It sends nothing but ARP requests, and
    on InfiniBand a query to the subnet manager."""

    def __init__(self, host: str, port: int) -> None:
        self._answer: tuple[bool, str] | None = None
        self._resolver: _Resolver | None = None
        try:
            self._resolver = _Resolver(host, port)
        except IserblkError as error:
            self._answer = False, str(error)

    def fileno(self) -> int:
        """The descriptor to wait for; -1 when ``progress`` has the answer without waiting."""
        return -1 if self._resolver is None else self._resolver.fileno()

    def progress(self, now: float) -> tuple[bool, str] | None:
        """(True, name of the device) or (False, reason). None: call again when the descriptor is
        readable."""
        resolver = self._resolver
        while self._answer is None and resolver is not None:
            event = resolver.channel.take()
            if event is None:
                return None
            kind, status = event.kind, event.status
            event.close()
            if kind == statuses.ADDR_RESOLVED:
                try:
                    # Up to here any device accepts an address of this host.
                    resolver.resolve_route(ROUTE_S)
                except ConnectFailed as error:
                    self._answer = False, str(error)
            elif kind == statuses.ROUTE_RESOLVED:
                self._answer = True, resolver.device or "an RDMA device"
            else:
                self._answer = False, statuses.failure(kind, status)
        return self._answer

    def close(self) -> None:
        if self._resolver is not None:
            self._resolver.close()
            self._resolver = None


class VerbsConnector:
    """Connects to a numeric address. After an exception everything is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        private_data: PrivateData,
        receive_size: int,
        receives: int,
        ird: int,
        mode: str = AUTO,
        timeout: float,
    ) -> None:
        """``private_data``: bytes, or a function that makes them from "memory windows are used".
        ``receives`` of ``receive_size`` bytes are posted before connecting. ``ird``: RDMA Reads
        that the peer may have outstanding, at most; the device may allow fewer. ``mode``: a value
        of ``link.MODES``. ``timeout``: seconds in all.

        Raises ConnectFailed, NotSupported or PermissionDenied.
        """
        if mode not in MODES:
            raise ValueError(mode)
        self._private_data = private_data
        self._receive_size = receive_size
        self._receives = receives
        self._ird = ird
        self._mode = mode
        self._timeout = timeout
        self._deadline: float | None = None
        self._qp: VerbsQueuePair | None = None
        self._link: Link | None = None
        self._depth = 0
        self._resolver: _Resolver | None = _Resolver(host, port)
        self._portal = self._resolver.portal
        self._error = self._resolver._error
        self.device: str | None = None

    def fileno(self) -> int:
        """The descriptor to wait for; -1 after ``close``, and once ``progress`` has returned the
        queue pair."""
        if self._resolver is not None:
            return self._resolver.fileno()
        return -1 if self._qp is None else self._qp.fileno()

    def progress(self, now: float) -> VerbsQueuePair | None:
        """The connected queue pair, or None. The queue pair belongs to the caller then.

        After None call again when the descriptor is readable; and from time to time while it is
        not, for the timeout. ``now``: monotonic seconds. Raises ConnectFailed, ConnectTimeout or
        NotSupported; then everything is closed.
        """
        if self._deadline is None:
            self._deadline = now + self._timeout
        try:
            return self._progress(now)
        except BaseException:
            self.close()
            raise

    def _progress(self, now: float) -> VerbsQueuePair | None:
        while True:
            channel = self._channel()
            event = channel.take()
            if event is None:
                break
            try:
                done = self._step(event)
            finally:
                event.close()
            if done:
                qp, self._qp = self._qp, None
                return qp
        if self._deadline is not None and now >= self._deadline:
            raise ConnectTimeout(
                f"{self._portal} did not answer by rdma_cm within {self._timeout:g} s; "
                "does an iSER portal listen there? check firewalls on the way (UDP 4791 for RoCE)"
            )
        return None

    def _channel(self) -> Channel:
        if self._resolver is not None:
            return self._resolver.channel
        if self._link is None:
            raise ConnectFailed(f"{self._portal}: the connector is closed")
        return self._link.channel

    def _step(self, event: Event) -> bool:
        """Handle one event. True when the connection is established."""
        kind = event.kind
        if kind == statuses.ADDR_RESOLVED and self._resolver is not None:
            self.device = self._resolver.device
            self._resolver.resolve_route(self._timeout)
        elif kind == statuses.ROUTE_RESOLVED and self._resolver is not None:
            self._connect()
        elif kind == statuses.CONNECT_RESPONSE and self._link is not None:
            ird, ord = self._link.ready(self._depth, self._depth)
            try:
                self._link.identifier.establish()
            except self._error as error:
                raise self._failed(f"not established ({api.error_words(error)})") from None
            return self._connected(ird, ord, event)
        elif kind == statuses.ESTABLISHED and self._link is not None:
            return self._connected(self._depth, self._depth, event)
        else:
            raise self._failed(statuses.failure(kind, event.status))
        return False

    def _connect(self) -> None:
        """The route is known: make the device's objects, and send the connection request."""
        resolver = self._resolver
        assert resolver is not None
        identifier = resolver.identifier
        budget = pool_budget(self._receives, self._receive_size)
        link = Link(identifier, resolver.channel, identifier.context, identifier.pd, self._mode)
        self._resolver = None  # the link owns its identifier and channel now
        self._link = link
        try:
            self._qp = VerbsQueuePair(
                link, receive_size=self._receive_size, receives=self._receives, budget=budget
            )
        except OSError as error:
            raise self._failed(str(error)) from None
        self._depth = min(self._ird, link.device.max_reads_in, link.device.max_reads_out, MAX_DEPTH)
        data = self._private_data
        if not isinstance(data, bytes):
            data = data(link.windows)
        try:
            identifier.connect(link.parameters(self._depth, self._depth, data))
        except self._error as error:
            raise self._failed(f"no connection request ({api.error_words(error)})") from None

    def _connected(self, ird: int, ord: int, event: Event) -> bool:
        assert self._qp is not None
        self._qp.connected(ird, ord, event.private_data, self._portal)
        return True

    def _failed(self, reason: str) -> ConnectFailed:
        device = f" over {self.device}" if self.device else ""
        return ConnectFailed(f"cannot connect to {self._portal}{device}: {reason}")

    def close(self) -> None:
        """Give up. A queue pair that ``progress`` has returned is not touched."""
        if self._resolver is not None:
            self._resolver.close()
            self._resolver = None
        if self._qp is not None:
            self._qp.close()
            self._qp = None
