"""The page of the Python API, made from docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import api
import pytest

import iserblk
from iserblk.disk import aio, asyncio, blocking, request_queue, seam

from ..support.target import ROOT

PAGE = api.document()


def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/api.py"), "--output", str(tmp_path / "new")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "new/api-reference.md").read_text(encoding="utf-8") == PAGE


def test_what_has_no_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(Exception):
        __module__ = iserblk.errors.__name__
        __doc__ = None

    def bare() -> None: ...

    assert api.undocumented() == []
    monkeypatch.setattr(iserblk.errors, "Bare", Bare, raising=False)
    monkeypatch.setattr(api, "SECTIONS", [*api.SECTIONS, ("T", bare, "iserblk.bare")])
    text, wrong = api.made()
    assert (text, wrong[0]) == ("", "iserblk.bare has no docstring")


def test_every_method_is_there() -> None:
    """Of the disks that are opened, whatever the interfaces have."""
    kinds = (blocking.ThreadDisk, aio.TrioDisk, asyncio.AsyncioDisk, seam.BlockingLun)
    for kind in (*kinds, request_queue.RequestQueue):
        for name, each in vars(kind).items():
            if not name.startswith("_") and callable(each):
                assert f"def {name}(" in PAGE, name


def test_every_public_name_is_there() -> None:
    for name in dir(iserblk):
        kind = getattr(iserblk, name)
        if isinstance(kind, type) and issubclass(kind, iserblk.IserblkError):
            assert name in PAGE
    for name in (
        "open_disks",
        "aio.open_disks",
        "aio.open_queue",
        "asyncio.open_disks",
        "CommandResult",
    ):
        assert f"iserblk.{name}" in PAGE
    assert 'mode: str = "rb"' in PAGE
