"""Options, marks and profiles that all tests share."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from iserblk import forms
from iserblk.initiator.connecting import reach
from iserblk.initiator.connecting.styles import Styles
from tests.support import clocks, interop
from tests.support.own_mounts import have_own_mounts

try:
    import hypothesis
except ImportError:
    pass  # in a guest, because of tests/lab/without_hypothesis.py
else:
    # The reference machine is slow and shared: hypothesis must not judge by the clock. In
    # continuous integration the examples are the same in every run.
    hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# Where tests start processes, or wait: single modules take minutes. Where workers take modules one
# after the other, these come first; else the last one would have the others wait.
LONGEST = (
    *("tests/scripts/test_scripts.py", "tests/integration", "tests/nbd/kernel", "tests/scripts"),
    *("tests/faults", "tests/model", "tests/cli", "tests/bench"),
)

_rows = interop.Rows()
_failures: list[tuple[str, str]] = []  # node, and why
_status = int(pytest.ExitCode.INTERNAL_ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long`, too")
    parser.addoption("--no-lab", action="store_true", help="boot no virtual machines")
    parser.addoption(
        "--interop", metavar="FILE", help="write what peers passed (scripts/interop.py)"
    )
    parser.addoption("--failures", metavar="FILE", help="append a line for each test that failed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs with --long only")
    config.addinivalue_line(
        "markers", "plain(reason): needs the data path as it is written (iserblk/forms.py)"
    )
    config.addinivalue_line("markers", "logs(pattern, ...): what it may log as a warning")
    # pytest-xdist would begin with the modules that have most tests, which are the shortest ones.
    config.option.loadscopereorder = False
    # A shell's background job ignores SIGINT, and so would every program that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        have_own_mounts()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="takes minutes: runs with --long only")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    if not forms.why_plain:
        for item in items:
            mark = item.get_closest_marker("plain")
            if mark is not None:
                item.add_marker(
                    pytest.mark.skip(reason=f"runs in the plain form only: {mark.args[0]}")
                )


def _turn(item: pytest.Item) -> int:
    first = (turn for turn, place in enumerate(LONGEST) if item.nodeid.startswith(place))
    return next(first, len(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end. Garbage is collected thousands of times meanwhile, and
    looked at all of it each time. (The last call is for the interpreter's count of what there is:
    it goes through everything only when a quarter as much is new.)"""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _keep_what_stays()


def _keep_what_stays() -> None:
    gc.collect()
    gc.freeze()
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What pytest and libraries remember of the tests of a module stays, too: without this, a
    collection in a worker that has run ten thousand tests takes ten times as long as in a new
    process."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_stays()
    return done


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own has the name of the test in it, and tests make Unix sockets there, whose paths
    have 107 bytes at most."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> interop.Record:
    """Call it at the end of a test that a peer passed: a row of interop-results (docs/made.md)."""

    def record(**values: object) -> None:
        record_property(interop.PROPERTY, interop.row(**values))  # type: ignore[arg-type]

    return record


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failures.append((report.nodeid, _crash(report)))
    _rows.take(report.nodeid, report.when or "", report.failed, report.user_properties)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failures.append((report.nodeid, _crash(report)))


def _crash(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What was raised, in a line of at most 200 characters; else the report's last line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = crash.message.splitlines()[:1] if crash else report.longreprtext.splitlines()[-1:]
    return "".join(lines)[:200]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A test that failed may have left a thread that waits for ever, and Python at its end waits
    for that."""
    deadline = time.monotonic() + 10
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon:
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            print(f"tests: not waited for: {thread}", file=sys.__stderr__, flush=True)
            os._exit(_status)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    global _status  # noqa: PLW0603
    yield
    _status = int(session.exitstatus)
    if hasattr(session.config, "workerinput"):  # its reports all come to the one that has no such
        return
    file = session.config.getoption("--interop")
    if file:
        Path(file).write_text(json.dumps(_rows.by_test, indent=1), encoding="utf-8")
    file = session.config.getoption("--failures")
    if file:
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.writelines(f"{test}: {why}\n" for test, why in _failures)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> clocks.Clock:
    """The clock that iserblk reads in this test, instead of the real one."""
    made = clocks.Clock()
    clocks.give(monkeypatch, made)
    return made


class _Warnings(logging.Handler):
    """Keeps what is told at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture(autouse=True)
def _no_style_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of an earlier test may be another target's now."""
    monkeypatch.setattr(reach, "STYLES", Styles())


@pytest.fixture(autouse=True)
def _announced_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test's own process logs as a warning, or worse, is announced: by
    ``@pytest.mark.logs(PATTERN, ...)``, or by looking at it with ``caplog``."""
    patterns = [each for mark in request.node.iter_markers("logs") for each in mark.args]
    handler = _Warnings()
    loggers = [logging.getLogger(name) for name in ("iserblk", "fuse_mount")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    if "caplog" in request.fixturenames:
        return
    unannounced = [
        text for text in handler.texts if not any(re.search(each, text) for each in patterns)
    ]
    assert not unannounced, f"logged, and not announced: {unannounced[:5]}"


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """Who serves until a signal comes ignores it from then on, as the process is to end. The next
    tests of this process are interrupted in earnest."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    ignored = [
        number.name
        for number, handler in before.items()
        if signal.getsignal(number) is signal.SIG_IGN is not handler
    ]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not ignored, f"ignored from now on, by this test: {ignored}"
