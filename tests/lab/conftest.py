"""Tests in tests/lab/guest run inside virtual machines: see docs/lab.md.

On the host pytest collects them as any other tests. Where one of them is to run, the guest of its
group is booted with all tests of that group; their reports appear under their own names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# scripts/lablib is not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from lablib.host import why_not

from tests.lab.guests import Group, Guest, group_of, runs_in, setup_of, turn

_GUEST_TESTS = Path(__file__).resolve().parent / "guest"
_INSIDE = os.environ.get("LAB_SETUP")
_groups: dict[pytest.Item, Group] = {}
_guests = pytest.StashKey[dict[Group, Guest]]()


@pytest.fixture
def lab_url() -> str:
    """The URL of the set-up's LUN."""
    return os.environ["LAB_URL"]


# Last: tests/conftest.py has marked what is skipped, and for that alone no guest need be booted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests by guest: a guest ends before the next one starts."""
    ours = [item for item in items if item.path.is_relative_to(_GUEST_TESTS)]
    if _INSIDE:
        for item in ours:
            if not runs_in(item.path, _INSIDE):
                reason = f"runs in the set-up {setup_of(item.path)}, and this is {_INSIDE}"
                item.add_marker(pytest.mark.skip(reason=reason))
        return
    absent: dict[str, str | None] = {}
    for item in ours:
        if config.getoption("--no-lab"):
            item.add_marker(pytest.mark.skip(reason="needs a virtual machine, and --no-lab"))
        elif not config.getoption("--collect-only") and not item.get_closest_marker("skip"):
            name = setup_of(item.path)
            if name not in absent:
                absent[name] = why_not(name)
            if absent[name] is not None:
                item.add_marker(pytest.mark.skip(reason=f"no virtual machine: {absent[name]}"))
    config.stash[_guests] = {}
    functions = [item for item in ours if isinstance(item, pytest.Function)]
    for item in sorted(functions, key=lambda item: turn(item.module)):
        if not item.get_closest_marker("skip") and not config.getoption("--collect-only"):
            _groups[item] = group_of(item.path, item.module)
            # The guest limits each test's time; on the host the first one would include booting.
            item.add_marker(pytest.mark.timeout(0), append=False)
    order = list(dict.fromkeys(_groups.values()))
    grouped = sorted(_groups, key=lambda item: order.index(_groups[item]))
    items[:] = [item for item in items if item not in _groups] + grouped


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    group = _groups.get(item)
    if group is None:
        return None
    guests = item.config.stash[_guests]
    if group not in guests:
        _end(guests)
        nodeids = [other.nodeid for other, its_group in _groups.items() if its_group == group]
        guests[group] = Guest(item.config, group, nodeids)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in guests[group].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _end(guests: dict[Group, Guest]) -> None:
    for guest in guests.values():
        guest.end()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    _end(session.config.stash.get(_guests, {}))
    yield


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    guests = config.stash.get(_guests, {})
    failed = {report.nodeid for report in terminalreporter.stats.get("failed", [])}
    for guest in guests.values():
        kept = failed.intersection(guest.nodeids)
        terminalreporter.write_line(
            f"lab: {guest.group} ({guest.kernel() or 'no kernel'}): "
            f"{len(guest.nodeids)} tests in {guest.seconds:.0f} s"
            + (f"; its console and output are in {guest.directory}" if kept else "")
        )
        if not kept:
            guest.forget()
