"""What every guest offers to the tests that run in it."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from tests.support.target import ROOT


def test_the_kernel_has_its_modules() -> None:
    assert Path(os.environ["LAB_MODULES"]).name == platform.release()
    modules = Path("/lib/modules") / platform.release()
    assert (modules / "kernel" / "drivers" / "block" / "nbd.ko").exists()


def test_there_are_network_block_devices() -> None:
    assert Path("/dev/nbd0").is_block_device()


def test_memory_may_be_locked_without_limit() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY


def test_the_host_s_files_can_be_changed_for_the_guest_alone() -> None:
    """tests/lab/test_lab.py looks for them on the host."""
    for directory in (ROOT, Path.home(), Path("/etc"), Path("/usr"), Path("/tmp")):
        file = directory / "written-in-the-guest"
        file.write_text("in memory")
        assert file.read_text() == "in memory"


def test_results_can_be_left() -> None:
    assert os.access(os.environ["LAB_RESULTS"], os.W_OK)
