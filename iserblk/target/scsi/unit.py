"""A logical unit: a store with a block size, an identity and limits."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from iserblk.errors import BadArgument
from iserblk.scsi import alua, inquiry, sense, third_party
from iserblk.scsi.capacity import Capacity
from iserblk.scsi.inquiry import BlockLimits, Designator, Provisioning
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.scsi.copy_results import Copies
from iserblk.target.scsi.guard import RangeGuard
from iserblk.target.scsi.reservations import Reservations
from iserblk.target.scsi.traits import Traits
from iserblk.target.scsi.unflushed import Unflushed, always
from iserblk.target.seam import Nexus, NexusName
from iserblk.target.store.statefile import Damaged, StateFile
from iserblk.target.store.store import LoopStore, Store

log = logging.getLogger(__name__)

VENDOR: Final = "ISERBLK"
PRODUCT: Final = "FILE"
REVISION: Final = "0001"
MAXIMUM_SERIAL: Final = 64

# Limits of one command, in bytes. A task keeps all of its data in memory.
MAX_TRANSFER: Final = 16 << 20
OPTIMAL_TRANSFER: Final = 1 << 20
MAX_UNMAP: Final = 512 << 20
MAX_WRITE_SAME: Final = 2 << 30
MAX_VERIFY: Final = 2 << 30
# Of XDWRITEREAD: what the blocks held before is kept beside the data, which no account has.
MAX_EXCLUSIVE_OR: Final = 1 << 20
MAX_PREFETCH: Final = 64 << 20
MAX_UNMAP_DESCRIPTORS: Final = 256
MAX_COMPARE_AND_WRITE_BLOCKS: Final = 255

THRESHOLD_SET: Final = 1 << 20  # bytes: the unit of thresholds, and of what LOG SENSE tells of use

# Of EXTENDED COPY. A segment of 65,535 blocks of 4096 bytes, the longest there is, is not too long.
COPY_LIMITS: Final = third_party.Limits(
    cscds=16, segments=256, segment_length=256 << 20, concurrent=16, granularity=9
)

SENSE_LENGTH: Final = 18  # bytes: fixed format

_MODES: Final = {True: b"wce=1\n", False: b"wce=0\n"}  # a state file with mode parameters
_PAGE: Final = 4096  # bytes; files are allocated and cached in pages


def _restored(modes: StateFile) -> bool | None:
    """WCE as it was saved; None: it was not. Of a damaged file, False: a host that has turned the
    write cache off counts on that. Raises BadArgument for a file that may not be read."""
    try:
        content = modes.load()
    except Damaged as error:
        problem = str(error)
    else:
        if content is None or content in _MODES.values():
            return next((on for on, text in _MODES.items() if text == content), None)
        problem = "these are no mode parameters"
    log.error(
        "%s: %s: what its LUN had saved is lost, and its write cache begins turned off; MODE SELECT"
        " with SP saves anew, or remove the file",
        modes.path,
        problem,
    )
    return False


def _refuse_to_save(problem: str) -> None:
    raise OSError(errno.EINVAL, f"the next start would not read it: {problem}")


class UnitServer(Protocol):
    """The device server, as one of its units and the commands of that use it. Any thread may call
    ``tell_others`` and ``is_there_for``, and only the thread that begins commands the others."""

    def renewed(self) -> None:
        """INQUIRY data has changed: tell every nexus."""
        ...

    def end_tasks(self, names: Sequence[NexusName], ended: Callable[[], None]) -> int:
        """End tasks of I_T nexuses, as ``NexusTasks.end_tasks`` does."""
        ...

    def tell_others(self, by: Nexus, code: int) -> None:
        """Set a unit attention for every I_T nexus but ``by``."""
        ...

    def set_port_states(self, by: Nexus, states: Mapping[int, int]) -> None:
        """Set states of port groups, by a command of ``by``."""
        ...

    def tpgs(self, nexus: Nexus) -> int:
        """What INQUIRY data tells a nexus of ALUA (TPGS)."""
        ...

    def siblings(self, nexus: Nexus) -> list[LogicalUnit]:
        """The LUNs that there are for a nexus."""
        ...

    def is_there_for(self, nexus: Nexus) -> bool:
        """Whether a nexus has access to this LUN now."""
        ...


class _Unserved:
    """In place of a device server until there is one. Implements UnitServer."""

    def __init__(self, unit: LogicalUnit) -> None:
        self._unit = unit

    def renewed(self) -> None:
        pass

    def end_tasks(self, names: Sequence[NexusName], ended: Callable[[], None]) -> int:
        return 0

    def tell_others(self, by: Nexus, code: int) -> None:
        pass

    def set_port_states(self, by: Nexus, states: Mapping[int, int]) -> None:
        pass

    def tpgs(self, nexus: Nexus) -> int:
        return nexus.port.ports.tpgs

    def siblings(self, nexus: Nexus) -> list[LogicalUnit]:
        return [self._unit]

    def is_there_for(self, nexus: Nexus) -> bool:
        return True


class LogicalUnit:
    """One disk. The unit owns ``store``, and closes it.

    ``block``: bytes of a logical block. ``write_cache`` (WCE) False: every write is durable before
    its GOOD; None: as it was saved, or True; MODE SELECT may change it. ``write_through``: write
    durably, also where ``write_cache`` does not say so yet. ``serial``: 1 to 64 characters of
    printable ASCII. All identifiers are made from it, so it must be the same after a restart, and
    different for every LUN that an initiator may see. ``soft_threshold``: bytes that the store may
    occupy before hosts are told; 0: they are not. ``tas``: a task that another initiator's action
    ends is answered with TASK ABORTED; False: it is not answered at all, and a unit attention tells
    of it. ``loop``: ``store``, where that needs no threads.
    ``traits``: None for a unit of a file. ``lacks``: see ``Traits.lacks``. ``state``: keeps
    persistent reservations (APTPL); None: they end with the process. ``modes``: keeps mode
    parameters that are saved; None: they cannot be. What a damaged state file had kept is lost, as
    the log says. Raises BadArgument for a bad ``serial``, or a state file that may not be read;
    ``store`` stays open then.
    """

    def __init__(
        self,
        store: Store,
        *,
        serial: str,
        block: int = 512,
        read_only: bool = False,
        write_cache: bool | None = None,
        soft_threshold: int = 0,
        tas: bool = True,
        state: StateFile | None = None,
        modes: StateFile | None = None,
        loop: LoopStore | None = None,
        traits: Traits | None = None,
    ) -> None:
        if traits is None and (
            not 0 < len(serial) <= MAXIMUM_SERIAL
            or not serial.isascii()
            or not serial.isprintable()
        ):
            raise BadArgument(
                f"serial {serial!r}: it must be 1 to {MAXIMUM_SERIAL} printable ASCII characters"
            )
        self.store = store
        self.loop = loop
        self.traits = traits
        self.lacks: frozenset[int] = frozenset() if traits is None else traits.lacks()
        self.serial = serial
        self.block = block
        self.blocks = store.size // block
        self.read_only = read_only
        self.tas = tas
        self._modes = modes
        saved = None if modes is None else _restored(modes)
        self._saved_write_cache: bool | None = saved
        self.default_write_cache = write_cache is not False
        if write_cache is None:
            write_cache = saved is not False
        self._mode_lock = threading.Lock()
        self._write_cache = write_cache
        self.write_through = not write_cache
        self._cached = write_cache  # since the start there have been writes into a cache
        self.soft_threshold = -(-soft_threshold // THRESHOLD_SET)  # threshold sets
        self._above_threshold = False
        self.guard = RangeGuard()
        self.unflushed = Unflushed()
        store.on_loss = self.unflushed.failed
        self.reservations = Reservations()
        self.copies = Copies()
        self._state = state
        if state is not None:
            self._restore(state)
        self.server: UnitServer = _Unserved(self)  # the device server sets its own
        self._reading = threading.Lock()
        self._closed = False
        self.max_transfer_blocks = MAX_TRANSFER // block
        self.capacity = self._capacity()
        self.limits = self._limits()

    def _limits(self) -> BlockLimits:
        block, traits = self.block, self.traits
        limits = BlockLimits(
            max_compare_and_write_length=MAX_COMPARE_AND_WRITE_BLOCKS,
            optimal_granularity=max(block, _PAGE) // block,
            max_transfer_length=self.max_transfer_blocks,
            optimal_transfer_length=OPTIMAL_TRANSFER // block,
            max_prefetch_length=MAX_PREFETCH // block,
            max_unmap_lba_count=MAX_UNMAP // block,
            max_unmap_descriptor_count=MAX_UNMAP_DESCRIPTORS,
            unmap_granularity=max(block, _PAGE) // block,
            max_write_same_length=MAX_WRITE_SAME // block,
        )
        if traits is None:
            return limits
        unmaps = traits.provisioning.lbpu
        return limits._replace(
            max_compare_and_write_length=MAX_COMPARE_AND_WRITE_BLOCKS if traits.atomic else 0,
            optimal_granularity=max(block, traits.physical_block) // block,
            optimal_transfer_length=(traits.optimal_transfer or OPTIMAL_TRANSFER) // block,
            max_unmap_lba_count=MAX_UNMAP // block if unmaps else 0,
            max_unmap_descriptor_count=MAX_UNMAP_DESCRIPTORS if unmaps else 0,
            unmap_granularity=traits.granularity,
            unmap_alignment=traits.alignment,
        )

    def renew(self, traits: Traits, read_only: bool) -> None:
        """Say this of itself from now on, and tell every nexus where it is something else. In the
        thread that begins commands."""
        if traits == self.traits and read_only == self.read_only:
            return
        self.traits, self.read_only = traits, read_only
        self.lacks = traits.lacks()
        self.limits = self._limits()
        self.capacity = self._capacity()
        self.server.renewed()

    def _restore(self, state: StateFile) -> None:
        self.reservations.can_persist = True
        try:
            content = state.load()
            if content is not None:
                self.reservations.restore(content)
        except (Damaged, ValueError) as error:
            log.error(
                "%s: these are no reservations (%s): those of its LUN are lost, and the LUN is"
                " served without; its hosts have to reserve it anew, or remove the file",
                state.path,
                error,
            )

    @property
    def can_save_modes(self) -> bool:
        return self._modes is not None

    @property
    def saved_write_cache(self) -> bool:
        """WCE as it was saved; where nothing was, the default."""
        saved = self._saved_write_cache
        return self.default_write_cache if saved is None else saved

    def write_cache_to_save(self, on: bool) -> Callable[[], None]:
        """Note that WCE is to be saved for later starts of the target, in the thread that begins
        commands: of two changes the later one is saved, whichever has its thread first. The result
        is for a thread; it saves, and raises OSError."""
        assert self._modes is not None
        return partial(self._save_modes, self._modes, self._modes.to_save(_MODES[on]))

    def _save_modes(self, modes: StateFile, save: Callable[[], None] | None) -> None:
        if save is not None:
            save()
        self._saved_write_cache = modes.saved == _MODES[True]

    def reservations_to_save(self) -> Callable[[], None] | None:
        """Call this after a change of the persistent reservations. The result is for a thread: it
        saves what has to survive the target, and raises OSError. None: there is nothing to do."""
        if self._state is None:
            return None
        try:
            return self._state.to_save(self.reservations.snapshot())
        except ValueError as error:
            return partial(_refuse_to_save, str(error))

    def _capacity(self) -> Capacity:
        traits = self.traits
        if traits is None:
            return Capacity(self.blocks, self.block, max(self.block, _PAGE), True, True)
        thin = traits.provisioning.lbpu or traits.provisioning.lbpws
        lbprz = thin and traits.provisioning.lbprz
        return Capacity(self.blocks, self.block, traits.physical_block, thin, lbprz)

    def grow(self) -> bool:
        """Check the size of the file. True: it has grown, and the unit with it, by whole blocks.
        Raises OSError."""
        blocks = self.store.measure() // self.block
        if blocks <= self.blocks:
            return False
        self.blocks = blocks
        self.capacity = self._capacity()
        return True

    @property
    def must_sync(self) -> bool:
        """Whether there may be bytes that only a flush makes durable, or a failed flush of them to
        report."""
        return self._cached and not self.read_only

    @property
    def write_cache(self) -> bool:
        return self._write_cache

    @write_cache.setter
    def write_cache(self, on: bool) -> None:
        with self._mode_lock:
            self._write_cache = on
            self.write_through = not on
            self._cached = self._cached or on

    def drain_cache(self, nexus: Nexus) -> None:
        """Turn the write cache off for ``nexus``: flush, then say that it is off. Before,
        ``write_through`` has been set, so a write that is under way flushes by itself when it finds
        that it was too late. If the cache is turned on meanwhile, it stays on. Raises OSError if
        the flush fails: the cache is on then, so that no host relies on what it has lost."""
        try:
            if self.must_sync:
                self.unflushed.bring_all(nexus, self.store.flush)
        except OSError:
            self.write_cache = True
            raise
        with self._mode_lock:
            if not self.write_through or not self._write_cache:
                return
            self._write_cache = False
        self.server.tell_others(nexus, sense.MODE_PARAMETERS_CHANGED)

    def flush(self, nexus: Nexus, wanted: Callable[[], bool] = always) -> None:
        """Flush for ``nexus``. Raises OSError if anything that it wrote may be lost. ``wanted``:
        as of ``Unflushed.flush``."""
        self.unflushed.flush(nexus, self.store.flush, wanted)

    def passes_threshold(self) -> bool:
        """Whether the store has come to occupy the soft threshold since the last call. It has to
        be below it again before this happens once more. Raises OSError."""
        if not self.soft_threshold:
            return False
        usage = self.store.usage()
        if usage is None:
            return False
        before, self._above_threshold = (
            self._above_threshold,
            usage[0] >= self.soft_threshold * THRESHOLD_SET,
        )
        return self._above_threshold and not before

    def settle(self, nexus: Nexus, since: int) -> None:
        """Finish a change: without a write cache, make it durable now. ``since``:
        ``unflushed.failures`` before it. Raises OSError if it may be lost."""
        if self._cached:
            self.unflushed.wrote(nexus, since)
        # Only now: the flush that goes with turning the cache off may have come before the change.
        if self.write_through:
            self.unflushed.bring(self.store.flush, since)

    def read_for_other(self, buffer: memoryview, offset: int) -> None:
        """Read for a task of another LUN, which ``close`` does not wait for otherwise. Raises
        OSError, also when the unit is closed."""
        with self._reading:
            if self._closed:
                raise OSError(errno.ENODEV, "the LUN was removed")
            self.store.read_into(buffer, offset, False)

    @property
    def names(self) -> list[tuple[int, int, int, bytes]]:
        """(association, designator type, code set, designator) of each name of the LUN."""
        return [(each[0], each[1], each[2], each[3]) for each in self._designators()]

    def _designators(self) -> tuple[Designator, ...]:
        """The names of the LUN, without those of ports and of the target."""
        if self.traits is not None:
            return self.traits.designators
        return (
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_NAA,
                inquiry.BINARY,
                inquiry.naa_locally_assigned(self.serial),
            ),
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_T10,
                inquiry.ASCII,
                VENDOR.ljust(8).encode() + self.serial.encode(),
            ),
            # World-wide, as the others are not: several target names of the LUN are seen to be
            # paths of one LUN. Behind them, so that udev's names stay.
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_UUID,
                inquiry.BINARY,
                inquiry.uuid_of_serial(self.serial),
            ),
        )

    def vpd_pages(self, iqn: str, port: TargetPort = ONLY_PORT) -> dict[int, bytes]:
        """The VPD pages by page code, as an initiator of target ``iqn`` reads them at ``port``."""
        identifiers = (
            *self._designators(),
            *alua.port_designators(port.relative, port.tag),
            Designator(
                inquiry.ASSOCIATION_TARGET,
                inquiry.TYPE_NAME,
                inquiry.UTF8,
                inquiry.name_string(iqn),
            ),
        )
        pages = (
            {}
            if self.serial == ""
            else {inquiry.UNIT_SERIAL_NUMBER: inquiry.encode_serial(self.serial)}
        )
        traits = self.traits
        provisioning = (
            Provisioning(lbpu=True, lbpws=True, lbpws10=True, lbprz=True)
            if traits is None
            else traits.provisioning
        )
        pages |= {
            inquiry.DEVICE_IDENTIFICATION: inquiry.encode_identifiers(identifiers),
            inquiry.EXTENDED_INQUIRY_DATA: inquiry.encode_extended(
                not self.read_only, SENSE_LENGTH
            ),
            inquiry.MODE_PAGE_POLICY: inquiry.encode_mode_page_policy(),
            third_party.VPD_PAGE: third_party.encode_vpd(COPY_LIMITS),
            inquiry.BLOCK_LIMITS: inquiry.encode_block_limits(self.limits),
        }
        if traits is None or not traits.rotational:
            pages[inquiry.BLOCK_DEVICE_CHARACTERISTICS] = inquiry.encode_characteristics()
        if provisioning.lbpu or provisioning.lbpws:
            # Of threshold sets; 0 where the store does not know what it occupies.
            exponent = (THRESHOLD_SET // self.block).bit_length() - 1 if traits is None else 0
            pages[inquiry.LOGICAL_BLOCK_PROVISIONING] = inquiry.encode_provisioning(
                provisioning, exponent
            )
        if traits is not None and traits.gateway_to:
            pages[inquiry.GATEWAY] = inquiry.encode_gateway(traits.gateway_to)
        supported = inquiry.encode_supported_pages((inquiry.SUPPORTED_PAGES, *pages))
        return {inquiry.SUPPORTED_PAGES: supported, **pages}

    def close(self) -> None:
        """Write back the cache, bring what was written to stable storage, and close the file: no
        initiator can ask for a flush any more. No task of this LUN may be running. Raises OSError,
        also where a flush has failed, and an initiator was not told; the file is closed then,
        too."""
        with self._reading:
            self._closed = True
        try:
            if self.loop is None and not self.read_only:  # what has a loop flushes by itself
                self.store.flush()
        finally:
            self.store.close()
        if self.unflushed.owed:
            raise OSError(errno.EIO, "a flush has failed before, and an initiator was not told")
