"""Imports point downwards only, and the data path knows neither trio nor errno."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "iserblk"

# What each layer may import of iserblk, itself excepted.
ALLOWED = {
    "errors": set(),
    "crc": {"_crc"},
    "files": set(),
    "sockets": {"errors"},
    "waiting": set(),
    "secret": set(),
    "metrics": {"errors"},
    "names": {"errors"},
    "options": {"errors", "secret", "metrics", "names"},
    "url": {"errors", "secret", "names", "options"},
    "credentials": {"errors", "secret", "options", "url", "iscsi"},
    "rcap": {"errors", "crc", "sockets"},
    "scsi": {"errors"},
    "iscsi": {"errors", "secret"},
    "datamover": {"errors", "crc", "rcap", "iscsi"},
    "initiator": {
        *("errors", "sockets", "rcap", "scsi", "iscsi", "datamover", "waiting"),
        *("names", "options", "url", "credentials"),
    },
    "discovery": {"errors", "names", "options", "url", "iscsi", "initiator"},
    "disk": {
        *("errors", "datamover", "scsi", "iscsi", "initiator", "credentials", "metrics"),
        *("names", "options", "url", "discovery"),
    },
    "target": {
        *("errors", "files", "sockets", "rcap", "scsi", "iscsi", "datamover", "waiting"),
    },
    "doctor": {"errors", "names", "options", "url", "rcap", "initiator"},
    "nbd": {"errors", "credentials", "metrics"},
    "cli": {
        "errors",
        "files",
        "credentials",
        "nbd",
        "names",
        "options",
        "url",
        "disk",
        "target",
        "scsi",
        "iscsi",
        "doctor",
        "discovery",
        "metrics",
        "waiting",
    },
}
# Beside the drivers, the shells and the command line, nobody waits.
TRIO_ALLOWED = {
    "waiting",
    "cli",
    "initiator.connecting",
    "initiator.reconnecting",
    "initiator.drivers.tasks",
    "discovery.targets",
    "discovery.isns_client",
    "disk.aio",
    "disk.blocking",
    "disk.metered",
    "disk.multipath.discovering",
    "disk.multipath.failback",
    "disk.multipath.first_session",
    "doctor.portal",
    "metrics.serving",
    "target.iscsi.accepting",
    "target.iscsi.listening",
    "target.server",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    layer = name_of(path).split(".", maxsplit=1)[0]
    for name in imports_of(path):
        if name.startswith("iserblk.") and not name.startswith("iserblk.__"):
            other = name.split(".")[1]
            assert other == layer or other in ALLOWED[layer], f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_shells_import_trio(path: Path) -> None:
    name = name_of(path)
    if any(name == allowed or name.startswith(f"{allowed}.") for allowed in TRIO_ALLOWED):
        return
    assert not any(module.split(".")[0] == "trio" for module in imports_of(path))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_protocol_layers_open_no_sockets(path: Path) -> None:
    """scsi, iscsi and datamover are sans-IO."""
    if name_of(path).split(".")[0] in ("scsi", "iscsi", "datamover"):
        used = {module.split(".")[0] for module in imports_of(path)}
        assert not used & {"socket", "select", "os", "trio", "errno"}


def test_nobody_keeps_the_state_of_a_thread() -> None:
    """CPython's states of threads are for the code that made the threads: one that another thread
    keeps or deletes aborts CPython 3.13."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "nbd_plugin").rglob("*.py")]
    sources += (ROOT / "fuse_mount").rglob("*.py")
    assert len(sources) > 100
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith(("PyGILState_", "PyThreadState_")), source
