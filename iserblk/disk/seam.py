"""The disk seam: a byte-addressed LUN, as the front-ends and the command line see it.

It has two interfaces with the same names, each with more for those that need more:

    BlockingDisk          any thread; it does not hold the GIL while it waits: nbdkit's plugin
      BlockingLun         and SCSI commands, and a file object: ``iserblk.disk.blocking.open_disks``
    AsyncDisk             tasks of trio: FUSE, copying
      DirectDisk          and requests that no coroutine waits for: the NBD server, a gateway
        AsyncLun          and SCSI commands: ``iserblk.disk.aio.open_disks``

The face for asyncio (``iserblk.disk.asyncio``) has the names of AsyncLun, without DirectDisk's, and
one FlushClient.

Offsets and lengths are bytes, of any alignment. A block that a change covers in part is read,
modified and written back under a range lock, which cannot protect against other hosts. A length of
0 does nothing. A range that leaves the disk raises OutOfRange and transfers nothing. Writes to a
read-only LUN raise WriteProtected. All other failures are those of ``iserblk.errors``: CommandError
leaves the session usable, TransportError ends it. A lost connection does not end the session: the
connection is made again, and requests wait for it until their deadlines. After a failed write, trim
or zero the range holds old data, new data, or a mix of both by block.

The disk uses a buffer from the call to its return (also by exception), and not longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, Final, NamedTuple, Protocol

from iserblk.commands.command import Command, Waiter
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.scsi.inquiry import Designator
from iserblk.scsi.sense import Sense

# Flags of an extent, with the meaning of NBD's base:allocation.
EXTENT_DATA = 0
EXTENT_HOLE = 1
EXTENT_ZERO = 2

Extent = tuple[int, int, int]  # offset, length, flags


@dataclass(slots=True, frozen=True)
class LunInfo:
    """Identity, geometry and abilities of a LUN, as it tells them at each login, without what it
    has refused since."""

    name: str  # lun0, or IQN:lun0 where two URLs would clash
    url: str  # without user info
    target: str  # IQN
    lun: int
    size: int  # bytes
    block_size: int  # logical block, bytes
    physical_block_size: int
    read_only: bool
    rotational: bool
    write_cache: bool  # WCE: a flush is needed before data is durable
    fua: bool  # DPOFUA; False also where LIO says so, whose FUA hides losses
    can_trim: bool  # UNMAP
    can_zero: bool  # WRITE SAME(16)
    zero_by_unmap: bool  # LBPRZ and LBPWS: WRITE SAME with UNMAP deallocates and reads as zeroes
    can_extents: bool  # GET LBA STATUS
    vendor: str
    product: str
    revision: str
    serial: str
    # VPD 83h, as "naa.6001…", "eui.…", "uuid.…", "t10.…", "name.…"
    identifiers: tuple[str, ...]
    max_transfer: int  # bytes of the largest READ or WRITE that is sent
    optimal_transfer: int  # bytes, 0 unknown
    designators: tuple[Designator, ...] = ()  # VPD 83h, those of the LUN only
    unmap_granularity: int = 0  # blocks, 0 unknown
    unmap_alignment: int = 0  # the first block where a granule begins
    gateway_to: tuple[str, ...] = ()  # IQNs behind ``target`` if that is a gateway, nearest first
    connection: dict[str, object] = field(default_factory=dict)  # provider, negotiated values
    paths: tuple[dict[str, object], ...] = ()  # with several portals, each as it was at login


class CommandResult(NamedTuple):
    """How a SCSI command ended. ``str`` tells it in words."""

    status: int  # SAM status: 0 GOOD, 2 CHECK CONDITION, 8 BUSY, 0x18 RESERVATION CONFLICT, …
    sense: bytes  # sense data as it came; b"" without
    residual: int  # bytes that moved less than the buffer has; negative: there were more to move
    residual_in: int = 0  # of ``data_in`` where there is ``data_out``, too

    @property
    def decoded(self) -> Sense:
        """The sense data: ``key``, ``asc``, ``ascq`` and more. All 0 without."""
        return sense_data.decode(self.sense)

    def __str__(self) -> str:
        words = sam.words(self.status)
        return f"{words}: {self.decoded}" if self.sense else words


class LossCount(NamedTuple):
    """``losses``: how often the LUN has lost writes. ``told``: of how many of these a client was
    told."""

    losses: int = 0
    told: int = 0


class FlushClient(Protocol):
    """Who asks for flushes of a LUN, and hears of each loss of writes once; see
    ``iserblk.disk.durability.losses``. Of a BlockingDisk any thread may call its methods."""

    @property
    def owed(self) -> bool:
        """There is a loss of which it has to be told: its next flush fails."""
        ...

    @property
    def count(self) -> LossCount: ...

    def told(self, losses: int) -> None:
        """Its flush has failed, and the answer has reached it. ``losses``: those of the error
        (``IserblkError.losses``); 0: the error tells of none."""
        ...

    def unheard(self) -> None:
        """After all, the last answer that it was told of a loss with has not reached it."""
        ...

    def lost_elsewhere(self, losses: int) -> None:
        """Another process has counted so many losses more, of which it was not told. For an
        ``only_client``."""
        ...

    def ended(self) -> None:
        """It does not flush any more, or may have gone without a word. What it was not told of is
        left to clients that begin later."""
        ...


class _NoClient:
    """Implements FlushClient, for flushes that no client has asked for. They fail by their own
    fault only, and take no loss from a client."""

    owed = False
    count = LossCount()

    def told(self, losses: int) -> None:
        """It hears of nothing."""

    def unheard(self) -> None:
        """The same."""

    def lost_elsewhere(self, losses: int) -> None:
        """It is no only client."""

    def ended(self) -> None:
        """It leaves nothing."""


NO_CLIENT: Final[FlushClient] = _NoClient()


class BlockingDisk(Protocol):
    """One LUN for threads. Every method may be called from any thread at any time."""

    @property
    def info(self) -> LunInfo:
        """As the LUN told it last: after a reconnection, or when it has refused something that it
        said it can do, it may be another."""
        ...

    @property
    def size(self) -> int:
        """Bytes, as last known. A change at the target can show only after the next command has
        ended."""
        ...

    @property
    def dirty(self) -> bool:
        """Something was changed through this object and no flush has succeeded since, or a client
        was not told of a loss of writes, and ended. For the flush at the end: a LUN that was only
        read needs none."""
        ...

    @property
    def unflushed(self) -> int | None:
        """Bytes that were acknowledged, and that no flush has covered since; None: not known, as
        without a journal."""
        ...

    def refresh(self) -> int:
        """Ask the target for the size; returns it, in bytes."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the whole ``buffer`` (writable, contiguous bytes) from ``offset`` on."""
        ...

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        """Write the whole ``buffer``; with ``fua`` it is on stable storage at return. Losses of
        other writes are no error of this one."""
        ...

    @property
    def client(self) -> FlushClient:
        """The client of the LUN that the disk itself is; see ``flush``."""
        ...

    def new_client(self) -> FlushClient:
        """One more client of the LUN, for a front-end that has several; its ``ended`` is to be
        called."""
        ...

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        """The client of a front-end that has one, and has had it longer than the disk. ``before``:
        losses that were counted until now, in other processes. ``changed``: called when the
        client's ``count`` may have changed, in any thread; it must not raise."""
        ...

    def flush(self, client: FlushClient | None = None) -> None:
        """Put on stable storage all writes, trims and zeroes that returned before the call, of all
        clients.

        Raises WritesLost, once for each client, when the LUN has lost writes since the client was
        told of losses, whose writes they were. The flush was carried out, too. ``client``: who asks
        for it; the caller tells it, with the ``losses`` of the error. None: the disk's own
        ``client``, which is told by the exception. NO_CLIENT: no client does; no loss is raised.
        """
        ...

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        """Tell the target that the range is not needed. Only whole blocks inside it are affected;
        their content is undefined afterwards. Raises NotSupported where the LUN cannot trim.

        ``patient``: ``io-timeout`` is the time for each step, not for the whole request, which for
        a large range may have thousands of steps. Not for callers that repeat a request which takes
        too long, as the kernel's NBD client does: the first request may then end after a later
        write.
        """
        ...

    def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        """Make the range read as zeroes. ``may_trim``: the LUN may deallocate it. ``fast``: raise
        NotSupported, with nothing done, where this would be no faster than writing. ``patient``:
        see ``trim``."""
        ...

    def extents(self, offset: int, length: int) -> list[Extent]:
        """Return the allocation of the range: ascending, adjoining extents from ``offset`` on, at
        least one. They may end before the range does. One EXTENT_DATA extent where the LUN cannot
        tell."""
        ...

    def cache(self, offset: int, length: int) -> None:
        """Ask the LUN to read the range ahead (PRE-FETCH). This is a hint: a refusal is no
        error."""
        ...


class BlockingLun(BlockingDisk, Protocol):
    """What ``iserblk.open_disks`` opens: a disk, a file object of it, and SCSI commands to it."""

    def open(
        self,
        mode: str = "rb",
        buffering: int = -1,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> BinaryIO:
        """Return a binary file object of the disk, or of ``length`` bytes of it from ``offset`` on
        (None: to its end).

        ``mode``: ``rb``, ``wb`` or ``r+b``. Nothing is emptied: a disk keeps its size and its
        content. ``buffering``: bytes of buffer; 0: none, each call is a request; -1: 128 KiB.
        ``flush`` is SYNCHRONIZE CACHE, and ``close`` flushes. Close the file before the disks: it
        cannot write what is in its buffer afterwards. Its methods raise OSError with the errno of
        the IserblkError, which is its ``__cause__``.

        Raises BadArgument, OutOfRange where the range leaves the disk, WriteProtected.
        """
        ...

    def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        """Send one SCSI command to the LUN, and return how it ended, whatever its status is.

        ``cdb``: 6, 10, 12 or 16 bytes, as its operation code demands. ``data_in`` takes the bytes
        that the command reads, ``data_out`` has those that it writes; each of up to 1 MiB, and not
        to be touched before the call returns or raises. With both, the command is bidirectional.
        ``timeout_s``: seconds that the command may take; None: ``io-timeout``.

        The command is sent once: no status has it sent again. Only after the loss of a connection
        one that changes nothing (INQUIRY, READ, …) is. Any other runs alone, behind a flush where
        there is something to flush, and raises ConnectionLost: it may have been carried out. What
        it wrote is on stable storage after ``flush``. It must not change the size of blocks.

        Raises BadArgument and NotSupported before anything is sent; CommandTimeout when it was
        aborted; ScsiError where the target has no status; TransportError.
        """
        ...


class AsyncDisk(Protocol):
    """One LUN for trio tasks of the loop that opened it. The methods are those of ``BlockingDisk``.

    A cancelled operation aborts its commands at the target; its buffer is free when Cancelled is
    raised.
    """

    @property
    def info(self) -> LunInfo: ...

    @property
    def size(self) -> int: ...

    @property
    def dirty(self) -> bool: ...

    @property
    def unflushed(self) -> int | None: ...

    @property
    def client(self) -> FlushClient: ...

    def new_client(self) -> FlushClient: ...

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient: ...

    async def refresh(self) -> int: ...

    async def read_into(self, buffer: memoryview, offset: int) -> None: ...

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None: ...

    async def flush(self, client: FlushClient | None = None) -> None: ...

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None: ...

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None: ...

    async def extents(self, offset: int, length: int) -> list[Extent]: ...

    async def cache(self, offset: int, length: int) -> None: ...


class Rest(NamedTuple):
    """What is left of a request whose command has ended, and was not enough. ``begun``: when the
    request began, in nanoseconds; ``deadline``: until when it is to be done, in seconds; both of
    the clock of the loop."""

    begun: int
    deadline: float


class DirectDisk(AsyncDisk, Protocol):
    """An AsyncDisk for event-driven front-ends, which submit commands without a coroutine that
    waits for them.

    ``begin_read`` and ``begin_write`` send the one command of a request, if one is enough and a
    slot is free, and return its slot; None: nothing was done, call ``read_into`` or ``write``.
    ``waiter.task_done`` is called when the command has ended. The caller then calls ``end_read`` or
    ``end_write`` once. It returns None when the request is done; else ``read_into`` or ``write``
    goes on with what it returns. It raises the error of the request.

    ``take_over``, called before ``end_write``, may save a copy of the data: a disk that keeps what
    is not flushed keeps ``buffer``, in which the data is, and returns another one of the same size,
    which is the caller's from then on. None: ``buffer`` stays the caller's. Nothing else may use
    any of ``buffer``, whatever is in it beside the data.
    """

    async def read_into(
        self, buffer: memoryview, offset: int, rest: Rest | None = None
    ) -> None: ...

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None: ...

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter, /) -> Command | None: ...

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter, /) -> Command | None: ...

    def end_read(self, slot: Command, /) -> Rest | None: ...

    def end_write(self, slot: Command, /) -> Rest | None: ...

    def take_over(self, slot: Command, buffer: bytearray, /) -> bytearray | None: ...

    def begin_batch(self) -> bool:
        """Have commands that are begun from now on leave together, at ``end_batch``. Returns the
        argument of ``end_batch``."""
        ...

    def end_batch(self, held: bool, /) -> None: ...

    def abandon(self, mine: Callable[[Waiter], bool], /) -> int:
        """Begin to abort at the target the commands whose waiter is ``mine``; returns how many.
        ``task_done`` is called for each when it has ended: only then its buffer is free."""
        ...

    def check_here(self) -> None:
        """Raises LocalProtocolError in another thread than that of the loop that opened the disk.
        The methods of an AsyncDisk look by themselves; those here do not."""
        ...


class AsyncLun(DirectDisk, Protocol):
    """What ``iserblk.aio.open_disks`` opens: a disk, and SCSI commands to it."""

    async def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        """See ``BlockingLun.command``. A cancelled command is aborted at the target."""
        ...
