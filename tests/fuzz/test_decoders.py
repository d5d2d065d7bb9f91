"""Every decoder of bytes from the network, with random and mutated bytes; and no decoder without.

A few thousand sequences each; a million with ``--long``. A failure names what runs it again.
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.fuzz import (
    engine,
    rows_iscsi,
    rows_nbd,
    rows_recovery,
    rows_scsi,
    rows_services,
    rows_stack,
)
from tests.fuzz.engine import Row

ALL = (
    *rows_scsi.ROWS,
    *rows_iscsi.ROWS,
    *rows_stack.ROWS,
    *rows_recovery.ROWS,
    *rows_services.ROWS,
    *rows_nbd.ROWS,
)
ROWS = {row.name: row for row in ALL}
FEW = 4000
MILLION = 1_000_000
PACKAGE = Path(__file__).resolve().parents[2] / "iserblk"

# Decoders that no row reaches, and the tests that give them any bytes instead.
ELSEWHERE = {
    "rcap/verbs/queuepair.py:VerbsQueuePair._verdict": "tests/rcap/verbs/test_ending.py",
    "datamover/iser_initiator.py:IserInitiator.deallocate_task_resources":
        "tests/initiator/session/test_session_hostile.py",
    "initiator/connecting/login.py:Login.control_notify": "tests/faults/test_hostile_target.py",
    "target/iscsi/accepting.py:is_iwarp": "tests/target/iscsi/test_accepting.py",
    "initiator/connecting/login.py:at_portal": "tests/faults/test_hostile_target.py",
    "discovery/slp_connection.py:ask_by_stream": "tests/target/announcing/test_announcing_slp.py",
    "discovery/slp_connection.py:named": "tests/target/announcing/test_announcing_slp.py",
    "discovery/isns_client.py:ask_isns": "tests/integration/test_isns_server.py",
    "nbd/kernel/succession.py:Taker._offered": "tests/nbd/kernel/test_succession.py",
    "nbd/kernel/succession.py:_sockets": "tests/nbd/kernel/test_succession.py",
    "nbd/kernel/succession.py:check_peer": "tests/nbd/kernel/test_succession.py",
    "metrics/scraping.py:_ask": "tests/metrics/test_serving.py",
    "metrics/scraping.py:scrape": "tests/metrics/test_serving.py",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A log line for each of a million would be kept by pytest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_names_are_unique() -> None:
    assert len(ROWS) == len(ALL)


# shows: SYSTEM-44
@pytest.mark.parametrize("name", ROWS)
def test_few(name: str) -> None:
    engine.run(ROWS[name], FEW if ROWS[name].each == 1 else FEW // 4)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ROWS)
def test_a_million(name: str) -> None:
    engine.run(ROWS[name], MILLION)


# -- every decoder has a row -----------------------------------------------------------------------


def decoders(path: Path) -> list[str]:
    """Functions that end in ``_untrusted``, or raise RemoteProtocolError themselves."""
    found: list[str] = []

    def raises(node: ast.AST) -> bool:
        return any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id in ("RemoteProtocolError", "MissingKey", "protocol_error")
            for each in ast.walk(node)
        )

    def walk(node: ast.AST, prefix: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                if each.name.endswith("_untrusted") or raises(each):
                    found.append(f"{path.relative_to(PACKAGE)}:{prefix}{each.name}")
            elif isinstance(each, ast.ClassDef):
                walk(each, f"{prefix}{each.name}.")
            else:
                walk(each, prefix)

    walk(ast.parse(path.read_text()), "")
    return found


def reached() -> set[str]:
    """The functions that a short run of all rows calls."""
    called: set[str] = set()
    root = f"{PACKAGE}/"

    def watch(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            called.add(f"{code.co_filename.removeprefix(root)}:{code.co_qualname}")

    sys.setprofile(watch)
    try:
        for row in ROWS.values():
            engine.run(row, 120 if row.each == 1 else 50 * row.each, seed=7)
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.plain("sees the calls of Python functions")
def test_every_decoder_has_a_row() -> None:
    """A function that refuses bytes from the network is called by a row, or is known to be tried
    elsewhere: who adds one adds a row."""
    known = {name for path in PACKAGE.rglob("*.py") for name in decoders(path)}
    called = reached()
    assert len(known) > 50
    missing = sorted(known - called - set(ELSEWHERE))
    assert not missing, f"no row of tests/fuzz reaches {missing}"
    stale = sorted(name for name in ELSEWHERE if name not in known or name in called)
    assert not stale, f"a row reaches these, or they are gone: {stale}"
    for place in ELSEWHERE.values():
        assert (PACKAGE.parent / place).exists()


# -- and the engine itself -------------------------------------------------------------------------


def fragile(case: engine.Case) -> None:
    data = case.data
    if data[4:6] == b"ha" and len(data) == 7:
        raise IndexError("found")


def test_the_engine_finds_what_is_there_and_finds_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = Row("fragile", fragile, (b"alphabet",))
    with pytest.raises(AssertionError, match="found; again with") as caught:
        engine.run(row, 100_000, seed=3)
    words = str(caught.value).rpartition(f"{engine.REPLAY}=")[2]
    monkeypatch.setenv(engine.REPLAY, words)
    with pytest.raises(AssertionError, match=words):
        engine.run(row, 1)


def test_the_registry_knows_a_decoder_by_what_it_raises() -> None:
    found = decoders(PACKAGE / "scsi" / "capacity.py")
    assert "scsi/capacity.py:decode16" in found
    assert "scsi/capacity.py:encode16" not in found
    assert "iscsi/chap.py:ChapInitiator._respond" in decoders(PACKAGE / "iscsi" / "chap.py")
