"""Connects by rdma_cm: a queue pair of an RDMA device, and whether a device leads to an address at
all.

The provider neither blocks nor uses trio: this module waits for its descriptors. The provider is
loaded only where there is a device. Runs in trio.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import trio

from iserblk.errors import ConnectFailed, ConnectTimeout, NotSupported, PermissionDenied
from iserblk.initiator.connecting.iwarp import Address
from iserblk.initiator.connecting.login import RECEIVE_SIZE
from iserblk.loop.clock import monotonic
from iserblk.loop.patience import fail_after, move_on_after
from iserblk.loop.tasks import until_readable
from iserblk.rcap import verbs
from iserblk.rcap.seam import QueuePair

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LATE_S = 0.25  # how late a provider may notice that its own time limit has passed
GRACE_S = 1.0  # for the provider to report that itself

PrivateData = Callable[[bool], bytes]  # argument: whether the device has memory windows


class Step(Protocol[T_co]):
    """A task of a provider that has its result after a while, and is then closed. A queue pair that
    is the result stays open."""

    def fileno(self) -> int: ...

    def progress(self, now: float) -> T_co | None: ...

    def close(self) -> None: ...


class Provider(Protocol):
    """The part of ``iserblk.rcap.verbs`` that is needed here."""

    def available(self) -> str | None:
        """None when the provider is usable, else one line that says why not. Cheap."""
        ...

    def connector(
        self,
        address: Address,
        *,
        private_data: PrivateData,
        receives: int,
        ird: int,
        patience: float,
    ) -> Step[QueuePair]: ...

    def probe(self, address: Address) -> Step[tuple[bool, str]]:
        """Whether a device routes there, and its name or why not."""
        ...


class Verbs:
    """The Provider that drives real devices. Its modules are loaded when they are used first."""

    def available(self) -> str | None:
        return verbs.available()

    def connector(
        self,
        address: Address,
        *,
        private_data: PrivateData,
        receives: int,
        ird: int,
        patience: float,
    ) -> Step[QueuePair]:
        from iserblk.rcap.verbs.connecting import VerbsConnector  # noqa: PLC0415 (see above)

        return VerbsConnector(
            *numeric(address),
            private_data=private_data,
            receive_size=RECEIVE_SIZE,
            receives=receives,
            ird=ird,
            timeout=patience,
        )

    def probe(self, address: Address) -> Step[tuple[bool, str]]:
        from iserblk.rcap.verbs.connecting import RouteProbe  # noqa: PLC0415

        return RouteProbe(*numeric(address))


def numeric(address: Address) -> tuple[str, int]:
    host, port, *more = address.sockaddr
    if address.family == socket.AF_INET6 and more[1]:
        host = f"{host}%{more[1]}"  # the interface of a link-local address
    return host, port


provider: Provider = Verbs()


def check_available() -> None:
    """Raises PermissionDenied or NotSupported when verbs were asked for and cannot be had."""
    missing = provider.available()
    if missing is None:
        return
    text = f"rcap=verbs: {missing}; or say rcap=iwarp"
    if os.path.exists(verbs.CM_DEVICE) and not os.access(verbs.CM_DEVICE, os.R_OK | os.W_OK):
        raise PermissionDenied(text)
    raise NotSupported(text)


async def probe(address: Address, patience: float) -> tuple[bool, str]:
    """Whether an RDMA device routes to ``address``; its name, or why not in words."""
    step = provider.probe(address)
    try:
        with move_on_after(patience):
            return await _result(step)
        return False, f"no answer about the route within {patience:g} s"
    finally:
        step.close()


async def connect_verbs(
    addresses: Sequence[Address],
    portal: str,
    patience: float,
    *,
    private_data: PrivateData,
    receives: int,
    ird: int,
) -> QueuePair:
    """A queue pair with the first address that answers. Raises TransportError, NotSupported and
    related errors; then nothing is left open. ``patience``: seconds, for each address."""
    error: Exception = ConnectFailed(f"cannot connect to {portal}: no address")
    for address in addresses:
        try:
            step = provider.connector(
                address, private_data=private_data, receives=receives, ird=ird, patience=patience
            )
            try:
                with fail_after(patience + GRACE_S):
                    return await _result(step)
            finally:
                step.close()
        except ConnectFailed as problem:
            error = problem  # another address may answer
        except trio.TooSlowError:
            error = ConnectTimeout(
                f"{portal} did not answer by rdma_cm within {patience:g} s; "
                "check the address, and firewalls on the way"
            )
    raise error


async def _result(step: Step[T]) -> T:
    while (result := step.progress(monotonic())) is None:
        with trio.move_on_after(LATE_S):
            await until_readable(step.fileno())
    return result
