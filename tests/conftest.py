"""Options, marks and profiles that all tests share."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import interop

# The reference machine is slow and shared: hypothesis must not judge by the clock. In continuous
# integration the examples are the same in every run.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

_rows = interop.Rows()
_status = int(pytest.ExitCode.INTERNAL_ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long`, too")
    parser.addoption("--no-lab", action="store_true", help="boot no virtual machines")
    parser.addoption(
        "--interop", metavar="FILE", help="write what peers passed (scripts/interop.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs with --long only")
    # A shell's background job ignores SIGINT, and so would every program that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        skip = pytest.mark.skip(reason="takes minutes: runs with --long only")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> interop.Record:
    """Call it at the end of a test that a peer passed: a row of docs/interop.md."""

    def record(**values: object) -> None:
        record_property(interop.PROPERTY, interop.row(**values))  # type: ignore[arg-type]

    return record


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _rows.take(report.nodeid, report.when or "", report.failed, report.user_properties)


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
    file = session.config.getoption("--interop")
    if file and not hasattr(session.config, "workerinput"):  # whose reports all come here
        Path(file).write_text(json.dumps(_rows.by_test, indent=1), encoding="utf-8")
