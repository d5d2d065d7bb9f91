"""The device objects of one connection: rdma_cm identifier, queue pair, completion queue.

A Link is made for an identifier whose device is known. On InfiniBand and RoCE, ``ready`` then takes
the queue pair to the state in which it can send. ``close`` takes all down in the only order that
works: windows, regions, queue pair, completion queue, its channel, identifier, event channel.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from iserblk.errors import ConnectFailed, NotSupported
from iserblk.installation import no_gaps
from iserblk.rcap.verbs import api, memlock
from iserblk.rcap.verbs.cm import COMPLETION_LINK, Channel, with_descriptor
from iserblk.rcap.verbs.engine import Engine, PlainEngine
from iserblk.rcap.verbs.pool import Memory, Registration

log = logging.getLogger(__name__)

SENDS = 1024  # work requests that may be under way
RECEIVES = 1280  # receives that may be posted; at a target 1024 of these are for Data-Outs
MAX_DEPTH = 255  # RDMA Reads outstanding: the field on the wire is one byte
SYS = Path("/sys/class/infiniband")
_layout_checked = False

REGION = "region"
WINDOW = "window"
AUTO = "auto"
MODES = (AUTO, REGION, WINDOW)


class Device(NamedTuple):
    """The properties of a device that matter here."""

    name: str
    transport: str  # "InfiniBand", "RoCE" or "iWARP"
    windows: str  # "" when its type 2 memory windows can be used, else the reason why not
    max_requests: int  # work requests of a queue
    max_entries: int  # of a completion queue
    max_reads_in: int  # RDMA Reads of the peer outstanding at a queue pair
    max_reads_out: int  # RDMA Reads of ours outstanding at a queue pair

    @property
    def iwarp(self) -> bool:
        return self.transport == "iWARP"


def name_of(context: Any) -> str:
    name = context.name
    return name.decode() if isinstance(name, bytes) else str(name)


def device_of(context: Any, port: int) -> Device:
    """The properties of the device of an open context. Raises ConnectFailed when the device does
    not answer."""
    name = name_of(context)
    try:
        attributes = context.query_device()
        ethernet = context.query_port(port).link_layer == api.LINK_ETHERNET
    except api.pyverbs("pyverbs_error").PyverbsError as error:
        raise ConnectFailed(f"RDMA device {name}: {api.error_words(error)}") from None
    try:
        iwarp = "RNIC" in (SYS / name / "node_type").read_text()
    except OSError:
        iwarp = False
    windows = ""
    if api.gaps() is None:
        windows = f"the compiled module is missing ({no_gaps()})"
    elif iwarp or not attributes.device_cap_flags & api.DEVICE_MW_TYPE_2 or not attributes.max_mw:
        windows = f"{name} has no type 2 memory windows"
    return Device(
        name,
        "iWARP" if iwarp else "RoCE" if ethernet else "InfiniBand",
        windows,
        attributes.max_qp_wr,
        attributes.max_cqe,
        attributes.max_qp_rd_atom,
        attributes.max_qp_init_rd_atom,
    )


def resolve_mode(mode: str, device: Device) -> bool:
    """Whether to use memory windows. Raises NotSupported when ``mode`` asks for windows, and the
    device has none that can be used."""
    if mode == WINDOW and device.windows:
        raise NotSupported(f"memory windows: {device.windows}; use the mode auto")
    return mode != REGION and not device.windows


class Link:
    """All device objects of one connection. Owns ``identifier`` and ``channel``."""

    def __init__(
        self, identifier: Any, channel: Channel, context: Any, domain: Any, mode: str
    ) -> None:
        """Raises ConnectFailed or NotSupported; then all that was made is closed, and the arguments
        still belong to the caller."""
        self.identifier = identifier
        self.channel = channel
        self._context = context  # kept: pyverbs closes librdmacm's context when it is freed
        self._domain = domain
        self.device = device_of(context, identifier.port_num or 1)
        self.windows = resolve_mode(mode, self.device)
        self.send_room = min(SENDS, self.device.max_requests)
        self.receive_room = min(
            RECEIVES, self.device.max_requests, self.device.max_entries - self.send_room
        )
        self._error: type[Exception] = api.pyverbs("pyverbs_error").PyverbsError
        self._made: list[Any] = []  # closed in reverse order
        self._empty: tuple[Memory, Registration] | None = None
        self.engine: Engine
        self._mr_type = api.pyverbs("mr").MR
        self._mw_type = api.pyverbs("mr").MW
        try:
            self._make()
        except self._error as error:
            self._unmake()
            raise ConnectFailed(self._words("no queue pair", error)) from None
        except BaseException:
            self._unmake()
            raise

    def _words(self, what: str, error: BaseException) -> str:
        text = f"RDMA device {self.device.name}: {what} ({api.error_words(error)})"
        if getattr(error, "error_code", 0) == errno.ENOMEM and memlock.lockable() is not None:
            text += f"; perhaps the locked-memory limit: {memlock.REMEDY}"
        return text

    def _make(self) -> None:
        gaps = api.gaps()
        cq_module, qp_module = api.pyverbs("cq"), api.pyverbs("qp")
        find = None if gaps is None else gaps.completion_descriptor
        completions, self.completion_fd = with_descriptor(
            lambda: cq_module.CompChannel(self._context), find, COMPLETION_LINK
        )
        self._made.append(completions)
        entries = self.send_room + self.receive_room
        self._cq = cq_module.CQ(self._context, entries, None, completions, 0)
        self._made.append(self._cq)
        attributes = qp_module.QPInitAttrEx(
            qp_type=api.QPT_RC,
            scq=self._cq,
            rcq=self._cq,
            cap=qp_module.QPCap(self.send_room, self.receive_room, 2, 1, 0),
            sq_sig_all=0,
            comp_mask=api.INIT_ATTR_PD,
            pd=self._domain,
        )
        self._qp_module = qp_module
        self._qp = qp_module.QP(self._context, attributes)
        self._made.append(self._qp)
        self._to(api.QPS_INIT)
        if gaps is not None:
            self.engine = gaps.Engine(self._qp, self._cq, completions)
        else:
            memory = Memory(4096)
            self._empty = memory, self.register(memory.address, 4096, 0)
            self.engine = PlainEngine(
                self._qp, self._cq, completions, (memory.address, self._empty[1].lkey)
            )
        if self.windows and not self._layout_known():
            self.windows = False
        self.engine.arm()

    def _layout_known(self) -> bool:
        """Whether the compiled module finds regions and windows where pyverbs keeps them."""
        global _layout_checked  # noqa: PLW0603 (once is enough: the module does not change)
        if not _layout_checked:
            gaps = api.gaps()
            memory = Memory(4096)
            region = self.register(memory.address, 4096, api.LOCAL_WRITE | api.MW_BIND).region
            window = self.make_window()
            try:
                assert gaps is not None  # or ``windows`` would not be set
                gaps.check_region(region)
                gaps.check_window(window)
                _layout_checked = True
            except ValueError as error:
                log.warning("memory windows are not used: %s", error)
            finally:
                window.close()
                region.close()
                memory.close()
        return _layout_checked

    @property
    def number(self) -> int:
        """The number of the queue pair."""
        number: int = self._qp.qp_num
        return number

    def _to(self, state: int) -> Any:
        """Take the queue pair to ``state`` with the attributes that rdma_cm gives."""
        attributes, mask = self.identifier.init_qp_attr(state)
        if state == api.QPS_INIT:
            # rdma_cm gives no remote rights, and the first transfer would break the queue pair.
            attributes.qp_access_flags = api.LOCAL_WRITE | api.REMOTE_WRITE | api.REMOTE_READ
        self._qp.modify(attributes, mask)
        return attributes

    def ready(self, ird: int, ord: int) -> tuple[int, int]:
        """Take the queue pair to the state in which it can send, once the data of the peer is
        known; for InfiniBand and RoCE. Returns the RDMA Read depths (in, out), which are at most
        ``ird`` and ``ord``. Raises ConnectFailed."""
        try:
            self._to(api.QPS_INIT)  # again: now with rights and path
            attributes, mask = self.identifier.init_qp_attr(api.QPS_RTR)
            attributes.max_dest_rd_atomic = ird = min(ird, attributes.max_dest_rd_atomic)
            self._qp.modify(attributes, mask)
            attributes, mask = self.identifier.init_qp_attr(api.QPS_RTS)
            attributes.max_rd_atomic = ord = min(ord, attributes.max_rd_atomic)
            self._qp.modify(attributes, mask)
        except self._error as error:
            raise ConnectFailed(self._words("the queue pair does not start", error)) from None
        return ird, ord

    def parameters(self, ird: int, ord: int, private_data: bytes) -> Any:
        """ConnParam for connect and accept, with unlimited retries when the peer has no receive
        posted yet."""
        parameters = api.pyverbs("cmid").ConnParam(
            resources=ird,
            depth=ord,
            flow_control=1,
            retry=7,
            rnr_retry=7,
            srq=0,
            qp_num=self.number,
            data_len=len(private_data),
        )
        if private_data:
            parameters.set_private_data(private_data)
        return parameters

    def register(self, address: int, length: int, access: int) -> Registration:
        """Register memory. Implements ``pool.Register``; the caller closes the region."""
        try:
            region = self._mr_type(self._domain, length, access, address=address)
        except self._error as error:
            number = getattr(error, "error_code", None) or errno.EIO
            raise OSError(
                number, f"memory cannot be registered: {api.error_words(error)}"
            ) from None
        return Registration(region, region.lkey, region.rkey)

    def make_window(self) -> Any:
        """Make a type 2 memory window, which the caller closes. Raises OSError."""
        try:
            return self._mw_type(self._domain, api.MW_TYPE_2)
        except self._error as error:
            number = getattr(error, "error_code", None) or errno.EIO
            raise OSError(number, f"no memory window: {api.error_words(error)}") from None

    def close_window(self, window: Any) -> None:
        """Close a window; safe in every state of the window. Raises OSError."""
        try:
            window.close()
        except self._error as error:
            number = getattr(error, "error_code", None) or errno.EIO
            raise OSError(
                number, f"a memory window cannot be closed: {api.error_words(error)}"
            ) from None

    def stop(self) -> None:
        """Put the queue pair into its error state: nothing more is sent, received or placed."""
        with suppress(self._error):
            attributes = self._qp_module.QPAttr(qp_state=api.QPS_ERR)
            self._qp.modify(attributes, api.QP_STATE)

    def disconnect(self) -> None:
        """Tell the peer that the connection ends. Returns at once."""
        with suppress(self._error):
            self.identifier.disconnect()

    def close(self, before: Callable[[], None] | None = None) -> None:
        """Take everything down. ``before`` is called when the queue pair has stopped and still
        exists; it closes windows and regions."""
        self.stop()
        try:
            if before is not None:
                before()
        finally:
            self._unmake()
            for thing in (self.identifier, self.channel):
                self._close(thing)

    def _unmake(self) -> None:
        close = getattr(getattr(self, "engine", None), "close", None)
        if close is not None:
            close()
        if self._empty is not None:
            self._close(self._empty[1].region)
            self._empty[0].close()
            self._empty = None
        while self._made:
            self._close(self._made.pop())

    def _close(self, thing: Any) -> None:
        try:
            thing.close()
        except self._error as error:  # of a device that is gone, for example
            log.warning("RDMA device %s: %s: %s", self.device.name, type(thing).__name__, error)
