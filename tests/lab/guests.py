"""On the host: runs one guest for a group of tests, and takes its report of each test."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from lablib.host import why_not
from lablib.setups import SETUPS

from tests.lab.reporting import KERNEL, REPORTS
from tests.support.target import ROOT

_LIMIT_S = 2400
_LONG_LIMIT_S = 4 * 3600
_TEST_LIMIT_S = 600
# pytest's plugins that take time to start.
_NOT_NEEDED = ("cacheprovider", "hypothesispytest", "xdist", "xdist.looponfail", "platformdirs")
_POLL_S = 0.1
_TAIL_LINES = 40


@dataclass(frozen=True)
class Group:
    """Tests that share a guest: those of one set-up, and of the one that it contains, except
    modules with a guest of their own.

    Such a module has ``LAB_OPTIONS``, options for scripts/lab (``("--mtu", "1500")``), or
    ``LAB_OWN_GUEST = True`` where its tests need a guest that no other has used.
    """

    setup: str
    options: tuple[str, ...] = ()
    module: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.setup, *self.options, self.module)))


def setup_of(path: Path) -> str:
    """The set-up with whose name the module's begins, after ``test_``: the longest that fits."""
    stem = path.stem.removeprefix("test_") + "_"
    fitting = [name for name in SETUPS if stem.startswith(name.replace("-", "_") + "_")]
    if not fitting:
        raise pytest.UsageError(f"{path.name}: begins with no set-up's name ({', '.join(SETUPS)})")
    return max(fitting, key=len)


@cache
def larger(name: str) -> str:
    """The set-up that contains the one of this name, and can be had on this machine; else ""."""
    containing = (setup.name for setup in SETUPS.values() if setup.contains == name)
    return next((each for each in containing if why_not(each) is None), "")


def runs_in(path: Path, setup: str) -> bool:
    """Whether the guest of this set-up has what the tests of the module need."""
    return setup_of(path) in (setup, SETUPS[setup].contains)


def group_of(path: Path, module: ModuleType) -> Group:
    name = setup_of(path)
    options = tuple(getattr(module, "LAB_OPTIONS", ()))
    if getattr(module, "LAB_OWN_GUEST", False):
        return Group(name, options, path.stem)
    return Group(larger(name) or name, options)


def turn(module: ModuleType) -> int:
    """Where its tests come among those of their guest. ``LAB_FIRST = True``: before the others,
    because these keep what it takes away. ``LAB_LAST = True``: behind them, because it may leave
    the guest unusable. One module of a guest may say so of each."""
    return getattr(module, "LAB_LAST", False) - getattr(module, "LAB_FIRST", False)


@dataclass
class Guest:
    """pytest inside scripts/lab; its reports come as they are made."""

    config: pytest.Config
    group: Group
    nodeids: list[str]
    _reports: dict[str, list[pytest.TestReport]] = field(default_factory=dict)
    _complete: set[str] = field(default_factory=set)
    _partial: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="iserblk-lab-results."))
        (self.directory / "tests").write_text("\n".join(self.nodeids) + "\n")
        (self.directory / REPORTS).touch()
        self._file = (self.directory / REPORTS).open(encoding="utf-8")
        self._started = time.monotonic()
        long = self.config.getoption("--long")
        options = ["--long"] if long else []
        with (self.directory / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    # However this process ends, the guest ends with it.
                    *("setpriv", "--pdeathsig", "TERM", "--"),
                    *(ROOT / "scripts" / "lab", "--setup", self.group.setup),
                    *("--timeout", str(_LONG_LIMIT_S if long else _LIMIT_S)),
                    *("--results", self.directory),
                    # Other guests, or tests, have the other processors of this machine.
                    *([] if long else ["--in-turn", "--user-mode"]),
                    *self.group.options,
                    *("python", "-m", "pytest", "-p", "tests.lab.without_hypothesis"),
                    *("-p", "tests.lab.reporting"),
                    *(word for name in _NOT_NEEDED for word in ("-p", f"no:{name}")),
                    *("--timeout", str(_TEST_LIMIT_S), *options),
                    f"@{self.directory / 'tests'}",
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Wait for all reports of one test. The test has failed if the guest fell silent."""
        while item.nodeid not in self._complete:
            running = self._process.poll() is None
            for report in self._new():
                self._reports.setdefault(report.nodeid, []).append(report)
                if report.when == "teardown":
                    self._complete.add(report.nodeid)
            if not running and item.nodeid not in self._complete:
                return [*self._reports.get(item.nodeid, []), self._lost(item)]
            if running:
                time.sleep(_POLL_S)
        return self._reports[item.nodeid]

    def kernel(self) -> str:
        """The guest's kernel, in words; "" if the guest has not got so far."""
        file = self.directory / KERNEL
        return file.read_text() if file.exists() else ""

    def end(self) -> None:
        """End the guest: its tests have reported, or are not waited for. May be called again."""
        if self._file.closed:
            return
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self.seconds = time.monotonic() - self._started
        self._file.close()

    def forget(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _new(self) -> Iterator[pytest.TestReport]:
        # Not by lines: the guest may be in the middle of one.
        self._partial += self._file.read()
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            report = self.config.hook.pytest_report_from_serializable(
                config=self.config, data=json.loads(line)
            )
            assert isinstance(report, pytest.TestReport)
            if isinstance(report.longrepr, list):  # a skip's: JSON has no tuples
                report.longrepr = tuple(report.longrepr)
            yield report

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        output = (self.directory / "output").read_text(errors="replace").splitlines()
        words = f"the guest ({self.group}) ended before this test did; the last it said:\n"
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=words + "\n".join(output[-_TAIL_LINES:]),
            when="call",
        )
