"""The two forms of the data path: compiled, and as it is written.

setup.py compiles MODULES (with mypyc), each into an extension module beside its source, which
Python's import prefers, and all of them into one library. The source stays the only one, and runs
by itself with the same behaviour, at about two thirds of the speed. It does so

- where nothing was compiled for this interpreter;
- with ISERBLK_PLAIN=1 in the environment: for debuggers, coverage and tests;
- in a checkout whose sources are newer than the library. So an edited module is never ignored; and
  as compiled modules know each other's layout, all of them run as they are written then.

What Cython has compiled (OF_CYTHON) is looked at by itself: in a checkout, a module that is older
than its source is not imported, and its stand-in does the work.

``iserblk/__init__.py`` chooses, before any of them is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec

MODULES = (
    "iserblk.commands.command",
    "iserblk.commands.running",
    "iserblk.datamover.arrivals",
    "iserblk.datamover.data_in",
    "iserblk.datamover.iser",
    "iserblk.datamover.iser_initiator",
    "iserblk.datamover.iser_target",
    "iserblk.datamover.kept",
    "iserblk.datamover.seam",
    "iserblk.datamover.tcp_initiator",
    "iserblk.datamover.tcp_plain_initiator",
    "iserblk.datamover.tcp_plain_target",
    "iserblk.datamover.tcp_recovering_initiator",
    "iserblk.datamover.tcp_recovering_target",
    "iserblk.datamover.tcp_stream",
    "iserblk.datamover.tcp_target",
    "iserblk.disk.disk_thread",
    "iserblk.disk.durability.block_sets",
    "iserblk.disk.durability.comparing",
    "iserblk.disk.durability.journal",
    "iserblk.disk.durability.promise",
    "iserblk.disk.durability.replay",
    "iserblk.disk.lun.checked_identity",
    "iserblk.disk.lun.operations",
    "iserblk.disk.metered",
    "iserblk.disk.ranges",
    "iserblk.initiator.drivers.tasks",
    "iserblk.initiator.session.connection",
    "iserblk.initiator.session.deadlines",
    "iserblk.initiator.session.fair_queue",
    "iserblk.initiator.session.life",
    "iserblk.initiator.session.sending",
    "iserblk.initiator.session.session",
    "iserblk.initiator.session.several",
    "iserblk.initiator.session.slots",
    "iserblk.initiator.session.unsolicited",
    "iserblk.iscsi.bhs",
    "iserblk.iscsi.serial",
    "iserblk.iscsi.unexpected",
    "iserblk.nbd.buffers",
    "iserblk.nbd.client",
    "iserblk.nbd.messages",
    "iserblk.nbd.transmission",
    "iserblk.rcap.iwarp.checks",
    "iserblk.rcap.iwarp.ddp",
    "iserblk.rcap.iwarp.llp",
    "iserblk.rcap.iwarp.markers",
    "iserblk.rcap.iwarp.mpa",
    "iserblk.rcap.iwarp.queuepair",
    "iserblk.rcap.iwarp.rdmap",
    "iserblk.rcap.iwarp.reads",
    "iserblk.rcap.iwarp.receive",
    "iserblk.rcap.iwarp.transmit",
    "iserblk.rcap.seam",
    "iserblk.rcap.stags",
    "iserblk.scsi.cdb",
    "iserblk.scsi.luns",
    "iserblk.sockets.stream",
    "iserblk.sockets.wire",
    "iserblk.target.iscsi.buffers",
    "iserblk.target.iscsi.connection",
    "iserblk.target.iscsi.numbers",
    "iserblk.target.iscsi.session",
    "iserblk.target.iscsi.tasks.acknowledgements",
    "iserblk.target.iscsi.tasks.commands",
    "iserblk.target.iscsi.tasks.slot",
    "iserblk.target.iscsi.tasks.slots",
    "iserblk.target.ports",
    "iserblk.target.pump",
    "iserblk.target.scsi.block",
    "iserblk.target.scsi.commands",
    "iserblk.target.scsi.device",
    "iserblk.target.scsi.guard",
    "iserblk.target.scsi.reservations",
    "iserblk.target.scsi.task",
    "iserblk.target.scsi.unflushed",
    "iserblk.target.scsi.unit",
    "iserblk.target.seam",
    "iserblk.target.store.lunfile",
    "iserblk.target.store.store",
    "iserblk.target.store.volatile",
    "iserblk.target.task_set",
    "iserblk.loop.clock",
    "iserblk.loop.blocking",
    "iserblk.loop.gathering",
    "iserblk.loop.busy_polling",
    "iserblk.loop.epoll",
    "iserblk.loop.timers",
    "iserblk.loop.work",
    "iserblk.loop.workers",
)

# Modules that are not compiled, and have constants (Final) that MODULES take from them: mypyc
# writes the values of these into the code.
OF_CONSTANTS = (
    "iserblk.datamover.hello",
    "iserblk.disk.lun.identity",
    "iserblk.disk.lun.refusals",
    "iserblk.disk.seam",
    "iserblk.initiator.session.driving",
    "iserblk.initiator.session.logout",
    "iserblk.initiator.session.recovery",
    "iserblk.metrics.counting",
    "iserblk.scsi.limits",
    "iserblk.scsi.tasks",
    "iserblk.target.iscsi.control",
    "iserblk.target.iscsi.login",
)

# What Cython compiles, where its libraries are, and its sources. All works without.
OF_CYTHON = {
    "iserblk._crc": ("iserblk/_crc.pyx",),
    "iserblk._files": ("iserblk/_files.pyx",),
    "iserblk._octets": ("iserblk/_octets.pyx",),
    "iserblk.disk.durability._copies": (
        "iserblk/disk/durability/copies.py",
        "iserblk/disk/durability/_copies.pxd",
    ),
    "iserblk.rcap.iwarp._frames": ("iserblk/rcap/iwarp/_frames.pyx",),
    "iserblk.rcap.verbs._gaps": ("iserblk/rcap/verbs/_gaps.pyx",),
    "iserblk.sockets._syscalls": ("iserblk/sockets/_syscalls.pyx",),
}

LIBRARY = "iserblk__mypyc"  # the extension module, at the top level, that has the code of all

NOT_COMPILED = "it is not compiled for this Python"
STALE = "what was compiled is older than its sources"
UNWANTED = "ISERBLK_PLAIN is set"

_TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def source_of(module: str) -> str:
    return os.path.join(_TOP, *module.split(".")) + ".py"


def made() -> Iterator[tuple[str, str]]:
    """The files that are compiled in a checkout, each with one of its sources."""
    suffix = EXTENSION_SUFFIXES[0]
    library = os.path.join(_TOP, LIBRARY + suffix)
    yield library, __file__
    for module in (*MODULES, *OF_CONSTANTS):
        yield library, source_of(module)
    for module, sources in OF_CYTHON.items():
        for source in sources:
            yield source_of(module)[:-3] + suffix, os.path.join(_TOP, source)


def is_older(made: str, source: str) -> bool:
    """Raises OSError where there is no such file."""
    return os.stat(made).st_mtime_ns < os.stat(source).st_mtime_ns


def _old() -> set[str]:
    """The compiled files that are there, and older than a source. Where a package manager has put
    them, their times mean nothing."""
    if not os.path.exists(os.path.join(_TOP, "setup.py")):
        return set()
    pairs = list(made())
    there = {path for path in {path for path, _ in pairs} if os.path.exists(path)}
    return {path for path, source in pairs if path in there and is_older(path, source)}


def _why_plain(old: set[str]) -> str:
    if os.environ.get("ISERBLK_PLAIN", "0") not in ("", "0"):
        return UNWANTED
    library = os.path.join(_TOP, LIBRARY + EXTENSION_SUFFIXES[0])
    if not os.path.exists(library):
        return NOT_COMPILED
    return STALE if library in old else ""


class _AsWritten:
    """A finder that prefers the sources: of MODULES, and of what was compiled once, and is none of
    MODULES any more."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("iserblk.") or not os.path.exists(source := source_of(name)):
            return None
        compiled = source[:-3] + EXTENSION_SUFFIXES[0]
        if name not in MODULES and not os.path.exists(compiled):
            return None  # there is nothing to be preferred to: other finders may have it
        from importlib.util import spec_from_file_location  # noqa: PLC0415 (rarely needed)

        return spec_from_file_location(name, source)


class _WithoutOld:
    """A finder that refuses modules."""

    def __init__(self, refused: frozenset[str]) -> None:
        self._refused = refused

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._refused:
            raise ModuleNotFoundError(f"{name} is older than its source", name=name)


why_plain = ""
"""Why the plain form runs; empty: the compiled one does."""


def choose() -> None:
    global why_plain  # noqa: PLW0603
    old = _old()
    why_plain = _why_plain(old)
    if why_plain:
        sys.meta_path.insert(0, _AsWritten())
    suffix = EXTENSION_SUFFIXES[0]
    refused = frozenset(name for name in OF_CYTHON if source_of(name)[:-3] + suffix in old)
    if refused:
        sys.meta_path.insert(0, _WithoutOld(refused))
