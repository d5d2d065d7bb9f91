"""Imports point downwards only, and the data path knows neither trio nor errno."""

from __future__ import annotations

import ast
import graphlib
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "iserblk"

# What each room may import of iserblk, itself excepted: rooms that stand above it in this table, so
# that no import points up, and none goes in a circle. A package with rooms in it is no room: its
# modules are, one each. The name of such a package stands for all that is in it.
ALLOWED: dict[str, set[str]] = {
    "forms": set(),
    "loop.clock": set(),
    "loop.blocking": {"loop.clock"},
    "loop.gathering": set(),
    "loop.tasks": set(),
    "errors": set(),
    "state_tables": {"errors"},
    "printable": set(),
    "background": {"printable"},
    "crc": set(),
    "octets": set(),
    "files": set(),
    "pidfile": {"loop.clock", "errors", "files"},
    "images": set(),
    "installation": set(),
    "secret": set(),
    "endings": {"loop.clock"},
    "loop": {"endings", "loop.clock", "loop.blocking", "loop.gathering", "loop.tasks"},
    "limited_log": {"loop.clock"},
    "newcomers": set(),
    "names": {"errors"},
    "metrics": {"loop.clock", "loop.tasks", "errors", "names", "newcomers"},
    "options": {"errors", "secret", "metrics", "names"},
    "url": {"errors", "secret", "names", "options"},
    "sockets": {"errors"},
    "scsi": {"errors", "octets"},
    "iscsi": {"errors", "octets", "secret", "names", "state_tables"},
    "credentials": {"errors", "secret", "options", "url", "iscsi"},
    "named": {"errors", "files", "secret", "names", "options", "printable", "url"},
    "rcap.seam": set(),
    "rcap.stags": {"errors", "octets", "rcap.seam"},
    "rcap.iwarp": {"errors", "crc", "octets", "sockets", "rcap.seam", "rcap.stags"},
    "rcap.verbs": {
        "loop.blocking",
        "loop.clock",
        "loop.gathering",
        "errors",
        "installation",
        "rcap.seam",
    },
    "rcap.inprocess": {"errors", "rcap.seam", "rcap.stags", "rcap.iwarp"},
    "datamover": {"errors", "crc", "octets", "scsi", "iscsi", "rcap.seam", "state_tables"},
    # Between a disk and an initiator: neither imports the other here.
    "commands": {"loop.clock", "errors", "scsi", "iscsi"},
    "initiator.session": {
        *("loop.clock", "loop.gathering", "errors", "scsi", "iscsi", "datamover", "commands"),
        "state_tables",
    },
    "initiator.drivers": {"errors", "loop", "commands", "initiator.session"},
    "initiator.connecting": {
        *("errors", "names", "options", "url", "credentials", "sockets", "iscsi", "loop"),
        *("rcap.seam", "rcap.iwarp", "rcap.verbs", "datamover", "initiator.session"),
    },
    "initiator.reconnecting": {
        "errors",
        "loop",
        "commands",
        "initiator.session",
        "initiator.drivers",
    },
    "discovery.isns": {"errors", "names", "iscsi"},
    "discovery.isns_connection": {"errors", "discovery.isns"},
    "discovery.slp": {"errors", "names", "iscsi"},
    "discovery.slp_connection": {"errors", "discovery.slp"},
    "discovery.multicast": {"discovery.slp"},
    "discovery.ranking": {"iscsi"},
    "discovery.slp_client": {
        *("errors", "url", "iscsi", "initiator.connecting"),
        *("discovery.slp", "discovery.slp_connection", "discovery.multicast"),
    },
    "discovery.isns_client": {
        *("errors", "names", "options", "url", "iscsi", "loop", "initiator.connecting"),
        *("discovery.isns", "discovery.isns_connection"),
    },
    "discovery.targets": {
        *("errors", "names", "options", "url", "iscsi", "loop", "initiator.connecting"),
        *("discovery.ranking", "discovery.isns_client", "discovery.slp_client"),
    },
    "disk.seam": {"scsi", "commands"},
    "disk.ranges": {"commands"},
    "disk.durability": {
        "loop.clock",
        *("errors", "scsi", "commands"),
        *("disk.seam", "disk.ranges"),
    },
    "disk.lun": {
        "loop.clock",
        *("errors", "octets", "names", "metrics", "scsi", "iscsi", "commands"),
        *("disk.seam", "disk.ranges", "disk.durability"),
    },
    "disk.resume": {"errors", "commands", "disk.seam", "disk.lun"},
    "disk.settling": {"errors", "commands", "disk.lun"},
    "disk.ending": {"loop.clock", "errors", "initiator.session"},
    "disk.wish": {"files"},
    "disk.multipath": {
        "loop.clock",
        "loop.tasks",
        *(
            "errors",
            "names",
            "options",
            "url",
            "credentials",
            "scsi",
            "iscsi",
            "commands",
            "initiator",
        ),
        "discovery",
        *("disk.seam", "disk.lun", "disk.resume", "disk.settling"),
    },
    "disk.opening": {
        *(
            "errors",
            "names",
            "options",
            "url",
            "credentials",
            "scsi",
            "commands",
            "initiator",
            "loop",
        ),
        *("disk.seam", "disk.lun", "disk.resume", "disk.settling", "disk.multipath"),
    },
    "disk.writers": {"metrics", "disk.seam", "disk.lun", "disk.multipath"},
    "disk.file": {"errors", "disk.seam"},
    "disk.metered": {
        "loop.clock",
        "metrics",
        "commands",
        "disk.seam",
        "disk.lun",
        "disk.file",
    },
    "disk.metrics_ports": {
        "loop.clock",
        "metrics",
        "commands",
        "initiator.session",
        "disk.lun",
        "disk.multipath",
    },
    "disk.aio": {"errors", "commands", "initiator", "disk"},
    "disk.disk_thread": {
        *("errors", "loop", "commands", "disk.aio", "disk.ending", "disk.seam"),
    },
    "disk.blocking": {"errors", "disk.aio", "disk.disk_thread", "disk.file", "disk.seam"},
    "disk.asyncio": {"errors", "loop", "disk.aio", "disk.disk_thread", "disk.seam"},
    "disk.request_queue": {"errors", "loop", "commands", "disk.seam"},
    "doctor": {
        "loop.clock",
        "loop.tasks",
        *("forms", "errors", "installation", "names", "options", "url", "printable", "secret"),
        *("rcap.iwarp", "rcap.verbs", "scsi"),
        *("commands", "initiator.connecting", "initiator.drivers"),
    },
    "nbd.messages": {"errors", "octets"},
    "nbd.buffers": set(),
    "nbd.limited_log": {"loop.clock", "errors", "limited_log"},
    "nbd.long_changes": {"loop"},
    "nbd.exports": {"errors", "disk.seam", "nbd.messages", "nbd.long_changes"},
    "nbd.handshake": {"errors", "nbd.messages", "nbd.exports", "state_tables"},
    "nbd.transmission": {
        *("errors", "commands", "disk.seam", "nbd.messages", "nbd.buffers"),
    },
    "nbd.listening": {"errors", "metrics"},
    "nbd.tls": {"errors", "credentials", "sockets"},
    "nbd.client": {
        *("errors", "sockets", "loop", "disk.seam", "nbd.messages", "nbd.buffers"),
        *("nbd.exports", "nbd.handshake", "nbd.transmission", "nbd.tls", "nbd.limited_log"),
        "nbd.long_changes",
    },
    "nbd.server": {
        "errors",
        "limited_log",
        "newcomers",
        "loop",
        "nbd.buffers",
        "nbd.exports",
        "nbd.handshake",
        "nbd.limited_log",
        "nbd.transmission",
        "nbd.client",
    },
    "nbd.serving": {
        *("errors", "loop", "disk.aio", "disk.ending", "disk.multipath"),
        *("disk.seam", "nbd.exports", "nbd.handshake", "nbd.client", "nbd.server"),
    },
    "nbd.kernel": {
        *("endings", "errors", "installation", "names", "background", "credentials", "metrics"),
        *("files", "pidfile", "limited_log", "disk.seam", "disk.writers", "nbd.messages"),
        *("nbd.buffers", "loop", "disk.ending", "disk.wish", "state_tables"),
        *("nbd.listening", "nbd.client", "nbd.server", "nbd.serving"),
    },
    "nbd.nbdkit": {
        "loop.blocking",
        "loop.clock",
        "endings",
        "errors",
        "credentials",
        "disk.blocking",
        "nbd.kernel",
    },
    "csi": {
        "loop.blocking",
        "loop.clock",
        "errors",
        "files",
        "metrics",
        "options",
        "url",
        "nbd.kernel",
    },
    "target.store": {"loop.clock", "errors", "files", "images"},
    "target.ports": {"errors", "files", "names", "scsi"},
    "target.task_set": {"scsi"},
    "target.seam": {"scsi", "target.ports", "target.task_set"},
    "target.scsi": {
        "loop.clock",
        *("errors", "names", "scsi"),
        *("target.store", "target.ports", "target.seam", "target.task_set"),
    },
    "target.iscsi": {
        "loop.tasks",
        *("errors", "scsi", "iscsi", "sockets", "rcap.seam", "rcap.iwarp", "rcap.verbs"),
        *("datamover", "target.ports", "target.seam", "target.task_set"),
    },
    "target.announcing": {
        "loop.tasks",
        *("errors", "newcomers", "iscsi", "discovery.isns", "discovery.isns_connection"),
        *("discovery.slp", "discovery.slp_connection", "discovery.multicast"),
    },
    "target.access": {"errors", "files", "names", "url"},
    "target.lunspec": {"errors", "options", "url", "target.store", "target.scsi"},
    "target.lunlist": {"errors", "files", "url", "target.lunspec", "target.scsi"},
    "target.config": {
        *("errors", "options", "url", "iscsi"),
        *("target.access", "target.lunspec", "target.ports"),
    },
    "target.config_file": {
        *("errors", "secret", "names", "options", "url", "iscsi", "credentials"),
        *("target.access", "target.config", "target.lunspec", "target.ports"),
    },
    "target.attempts": set(),
    "target.keeping": set(),
    "target.figures": {
        *("limited_log", "metrics", "newcomers"),
        *("target.attempts", "target.keeping", "target.iscsi"),
    },
    "target.pump": {"errors", "loop", "target.iscsi"},
    "target.places": {"errors", "newcomers", "target.iscsi"},
    "target.offloading": {
        *("errors", "loop", "target.iscsi", "target.places"),
        *("target.scsi", "target.seam", "target.store"),
    },
    "target.attending": {
        *("errors", "loop", "newcomers", "target.figures", "target.iscsi"),
        *("target.offloading", "target.places", "target.pump"),
    },
    "target.open_portals": {
        *("errors", "iscsi", "loop", "rcap.seam", "target.ports", "target.iscsi")
    },
    "target.server": {
        *("errors", "limited_log", "metrics", "newcomers", "loop", "iscsi", "sockets"),
        *("rcap.seam", "datamover"),
        *(
            "target.access",
            "target.announcing",
            "target.config",
            "target.attempts",
            "target.figures",
            "target.keeping",
            "target.lunlist",
            "target.lunspec",
            "target.attending",
            "target.offloading",
            "target.open_portals",
            "target.places",
            "target.ports",
            "target.scsi",
            "target.seam",
            "target.store",
            "target.iscsi",
        ),
    },
    "gateway": {
        *("errors", "loop", "scsi", "commands"),
        *("disk.seam", "disk.aio", "disk.multipath", "target.store", "target.scsi"),
    },
    "aio": {"disk.aio", "disk.request_queue"},
    "asyncio": {"disk.asyncio"},
    "cli": {
        *(
            "background",
            "endings",
            "errors",
            "files",
            "images",
            "installation",
            "limited_log",
            "pidfile",
            "printable",
            "loop",
            "names",
            "options",
            "url",
            "credentials",
            "iscsi",
        ),
        *("secret", "scsi", "named"),
        *("metrics", "disk", "discovery", "doctor", "nbd", "csi", "target", "gateway"),
    },
    "__main__": {"cli"},
}
# Only the drivers, the shells and the command line wait.
TRIO_ALLOWED = {
    "loop",
    "cli",
    "initiator.connecting",
    "initiator.reconnecting",
    "initiator.drivers.tasks",
    "discovery.targets",
    "discovery.isns_client",
    "discovery.isns_connection",
    "discovery.slp_client",
    "discovery.slp_connection",
    "disk.aio",
    "disk.disk_thread",
    "disk.request_queue",
    "disk.metrics_ports",
    "disk.multipath.discovering",
    "disk.multipath.failback",
    "disk.multipath.first_session",
    "disk.multipath.proving",
    "disk.multipath.recognising",
    "doctor.portal",
    "gateway",
    "metrics.joining",
    "metrics.serving",
    "nbd.client",
    "nbd.kernel.channel",
    "nbd.kernel.succession",
    "nbd.server",
    "nbd.serving",
    "target.announcing.isns",
    "target.announcing.slp",
    "target.attending",
    "target.iscsi.accepting",
    "target.iscsi.listening",
    "target.offloading",
    "target.open_portals",
    "target.server",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def everywhere() -> list[Path]:
    """The modules, and what else is ours and is not a script."""
    return [*modules(), *ROOT.glob("fuse_mount/*.py"), *ROOT.glob("nbd_plugin/*.py")]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room_of(name: str) -> str | None:
    """The room that a module or one of its names is in; None: a package that is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (room := ".".join(parts[:count])) in ALLOWED:
            return room
    return None


@cache
def names_of_modules() -> set[str]:
    return {name_of(path) for path in modules()}


def imported(path: Path) -> Iterator[str]:
    """Modules of iserblk that a module imports, for types alone included."""
    known = names_of_modules()
    for name in imports_of(path):
        inner = name.removeprefix("iserblk.")
        if inner != name and inner in known:
            yield inner


def test_the_table_has_every_module_and_points_down() -> None:
    rooms = list(ALLOWED)
    for path in modules():
        name = name_of(path)
        whole = any(room.startswith(f"{name}.") for room in rooms)  # a package with rooms in it
        assert whole or room_of(name), f"{name}: in which room is it?"
    for index, (room, allowed) in enumerate(ALLOWED.items()):
        for other in allowed:
            inside = [each for each in rooms if each == other or each.startswith(f"{other}.")]
            assert inside, f"{room} may import {other}, which there is not"
            assert rooms.index(inside[0]) < index, f"{room} may import {other}, which is above it"


# What is asked of each of 400 modules is one test: a test takes longer than the answer.


def test_imports_point_downwards() -> None:
    assert [each for path in modules() for each in not_downwards(path)] == []


def not_downwards(path: Path) -> Iterator[str]:
    name = name_of(path)
    room = room_of(name)
    for other in imported(path):
        there = room_of(other)
        if there is None:  # a package that has rooms in it, on the way to one of them
            continue
        allowed = room is not None and (
            there == room
            or any(there == each or there.startswith(f"{each}.") for each in ALLOWED[room])
        )
        if not allowed:
            yield f"{name} imports {other}"
        elif room is not None and list(ALLOWED).index(there) > list(ALLOWED).index(room):
            yield f"{name} imports {other}, which is above it"


# How iSCSI sends a command. Above the initiator there is only ``iserblk.commands``, so that another
# initiator can stand below a disk.
OF_ISCSI = {"TaskSlot", "SendQueue"}


def names_iscsi_slots(source: str) -> set[str]:
    """The names of OF_ISCSI that ``source`` imports, or reads from a module."""
    found: set[str] = set()
    if not any(name in source for name in OF_ISCSI):
        return found  # without parsing it
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found & OF_ISCSI


def test_nothing_above_the_initiator_knows_its_slots() -> None:
    above = [path for path in everywhere() if not path.is_relative_to(PACKAGE / "initiator")]
    known = {str(path): names_iscsi_slots(path.read_text()) for path in above}
    assert {path: names for path, names in known.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from iserblk.initiator.session.slots import TaskSlot",
        "from iserblk.initiator.session.slots import INDEX_BITS, TaskSlot as Slot",
        "from iserblk.initiator.session import slots\nslots.TaskSlot(0)",
    ],
)
def test_knowledge_of_slots_is_found(source: str) -> None:
    assert names_iscsi_slots(source) == {"TaskSlot"}


def test_no_circles() -> None:
    graph = {name_of(path): set(imported(path)) - {name_of(path)} for path in modules()}
    # ``from a.b import c`` names the package on the way to the module.
    graph = {
        name: {each for each in others if not name.startswith(f"{each}.")}
        for name, others in graph.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def packages_of(path: Path) -> set[str]:
    """The first words of what it imports."""
    return {module.split(".")[0] for module in imports_of(path)}


def test_only_shells_import_trio() -> None:
    importing = [name_of(path) for path in modules() if "trio" in packages_of(path)]
    shells = [
        name
        for name in importing
        if any(name == allowed or name.startswith(f"{allowed}.") for allowed in TRIO_ALLOWED)
    ]
    assert shells == importing != []


def test_protocol_layers_open_no_sockets() -> None:
    """scsi, iscsi and datamover are sans-IO. Connections are made above them.

    proves: ISER-4.2-1, ISER-GEN-8.1.6-2
    """
    layers = ("scsi", "iscsi", "datamover")
    used = {
        name: packages_of(path) & {"socket", "select", "os", "trio", "errno"}
        for path in modules()
        if (name := name_of(path)).split(".")[0] in layers
    }
    assert {name.split(".")[0] for name in used} == {*layers}
    assert {name: packages for name, packages in used.items() if packages} == {}


# What ``time`` has that reads no clock, where it is given a time.
_NO_CLOCKS = {"strftime": 2, "localtime": 1, "gmtime": 1}
# Clocks, sleeps and waits for descriptors, beside all that ``time`` and ``select`` have.
_OF_THE_LOOP = {
    *("trio.sleep", "trio.sleep_until", "trio.current_time", "asyncio.sleep"),
    *("trio.lowlevel.wait_readable", "trio.lowlevel.wait_writable"),
    *("datetime.now", "datetime.today", "datetime.utcnow", "date.today"),
    *("datetime.datetime.now", "datetime.datetime.today", "datetime.date.today"),
}


def waits(source: str) -> Iterator[str]:
    """What in ``source`` reads a clock, sleeps or waits for a descriptor."""
    tree = ast.parse(source)
    given = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.module in ("time", "select", "selectors"):
                yield f"from {node.module} import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & _OF_THE_LOOP
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            yield from names & {"select", "selectors"}
            yield from (
                f"{each.name} as" for each in node.names if each.asname and each.name == "time"
            )
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text in _OF_THE_LOOP:
                yield text
            module, _, name = text.partition(".")
            clock = module == "time" and hasattr(time, name)
            if clock and given.get(id(node), 0) < _NO_CLOCKS.get(name, 9):
                yield text


def test_only_the_loop_reads_clocks_and_waits() -> None:
    """Else a test, or a simulated world, could not make up the time, nor the order of events. (What
    is waited for in trio, such as its events and the deadlines of its scopes, trio itself does; it
    is the loop's guest.)"""
    others = [path for path in everywhere() if not path.is_relative_to(PACKAGE / "loop")]
    found = {str(path): list(waits(path.read_text())) for path in others}
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from time import monotonic",
        "import time\ntime.sleep(1)",
        "import time\nf(time.time)",
        "import time\ntime.localtime()",
        "import time\ntime.strftime('%H')",
        "import time as t",
        "import select",
        "import trio\nasync def f():\n    await trio.sleep(1)",
        "import trio\nasync def f():\n    await trio.lowlevel.wait_readable(3)",
        "from trio import sleep",
        "from datetime import datetime\ndatetime.now()",
    ],
)
def test_what_waits_is_found(source: str) -> None:
    assert list(waits(source))


def test_words_for_a_given_time_read_no_clock() -> None:
    assert not list(waits("import time\ntime.strftime('%H', time.localtime(3))"))


def test_nobody_keeps_the_state_of_a_thread() -> None:
    """CPython's states of threads are for the code that made the threads: one that another thread
    keeps or deletes aborts CPython 3.13."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "nbd_plugin").rglob("*.py")]
    sources += (ROOT / "fuse_mount").rglob("*.py")
    assert len(sources) > 100
    kept = ("PyGILState_", "PyThreadState_")
    for source in sources:
        text = source.read_text()
        if not any(words in text for words in kept):
            continue  # without parsing it
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith(kept), source


# What belongs to the thread of one loop. (The two ends of a pair in memory may have one each, and
# the queue pair of a device has locks still.)
ONE_THREAD = (
    *("initiator", "disk", "nbd.client", "nbd.server", "nbd.transmission", "gateway"),
    *("datamover", "rcap.iwarp.queuepair", "rcap.iwarp.transmit", "rcap.stags"),
)
# Threads of their own: what they share is theirs.
FACES = {"disk.blocking", "disk.disk_thread", "disk.asyncio"}


def test_what_belongs_to_one_thread_has_no_lock() -> None:
    found = {
        name: list(locks(path.read_text()))
        for path in modules()
        if (name := name_of(path)) not in FACES
        and any(f"{name}.".startswith(f"{room}.") for room in ONE_THREAD)
    }
    assert found
    assert {name: made for name, made in found.items() if made} == {}


def locks(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            made = node.func
            called = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
            if called in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"):
                yield called


def test_locks_are_found() -> None:
    assert list(locks("import threading\nmine = threading.Lock()")) == ["Lock"]
    assert list(locks("from threading import RLock\nmine = RLock()")) == ["RLock"]
