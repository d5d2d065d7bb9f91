"""Every decoder of bytes from the network, with random and mutated bytes; and no decoder without.

A few thousand sequences each; a million with ``--long``. A failure names what runs it again.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, FunctionType

import pytest

from iserblk.nbd import messages as nbd
from iserblk.rcap.iwarp import frames
from tests.fuzz import engine, rows_nbd
from tests.fuzz.engine import Row
from tests.fuzz.table import ALL, ROWS
from tests.nbd.conversation import EXTENDED, export

FEW = 4000
MILLION = 1_000_000
PARTS = 4  # of a million, for each processor: they do not take equally long
PACKAGE = Path(__file__).resolve().parents[2] / "iserblk"

# Decoders that no row reaches, and the tests that give them any bytes instead.
ELSEWHERE = {
    "rcap/verbs/queuepair.py:VerbsQueuePair._verdict": "tests/rcap/verbs/test_ending.py",
    "datamover/iser_initiator.py:IserInitiator.deallocate_task_resources":
        "tests/initiator/session/test_session_hostile.py",
    "initiator/session/sending.py:SendQueue.send_again":
        "tests/initiator/session/test_session_level_1.py",
    "initiator/connecting/login.py:Login.control_notify": "tests/faults/test_hostile_target.py",
    "target/iscsi/tasks/slots.py:TaskSlots.make_more":
        "tests/target/iscsi/tasks/test_tasks_slots.py",
    "target/iscsi/accepting.py:is_iwarp": "tests/target/iscsi/test_accepting.py",
    "initiator/connecting/login.py:at_portal": "tests/faults/test_hostile_target.py",
    "discovery/slp_connection.py:ask_by_stream": "tests/target/announcing/test_announcing_slp.py",
    "discovery/slp_connection.py:named": "tests/target/announcing/test_announcing_slp.py",
    "discovery/isns_client.py:_look": "tests/discovery/test_isns_client.py",
    "discovery/isns_client.py:ask_isns": "tests/integration/test_isns_server.py",
    "nbd/kernel/succession.py:Taker.take": "tests/nbd/kernel/test_succession.py",
    "nbd/kernel/channel.py:PacketSocket.receive_with_sockets":
        "tests/nbd/kernel/test_channel.py",
    "nbd/kernel/channel.py:check_peer": "tests/nbd/kernel/test_channel.py",
    "metrics/scraping.py:_ask": "tests/metrics/test_serving.py",
    "metrics/scraping.py:scrape": "tests/metrics/test_serving.py",
    "metrics/scraping.py:_connected": "tests/metrics/test_scraping.py",
    "metrics/records.py:_read": "tests/metrics/test_records.py",
    "metrics/joining.py:_Room.take": "tests/metrics/test_joining.py",
    "metrics/joining.py:_connected": "tests/metrics/test_joining.py",
}  # fmt: skip

# What takes numbers out of bytes that no peer has sent.
OURS = {
    "datamover/tcp_recovering_initiator.py:RecoveringTcpInitiator.reassign": "a command of ours",
    "datamover/tcp_plain_target.py:PlainTcpTarget._data_in": "a response of ours",
    "discovery/multicast.py:destination": "ancillary data of the kernel",
    "discovery/slp_connection.py:answers": "a request of ours",
    "disk/lun/reservation.py:host_key": "a hash",
    "initiator/session/deadlines.py:Ladder._end_reset": "a task management request of ours",
    "initiator/session/sending.py:SendQueue.number_of": "a PDU of ours",
    "initiator/session/sending.py:SendQueue.plug_gap": "a ping of ours",
    "metrics/records.py:_is_held": "the kernel's answer",
    "nbd/kernel/netlink.py:exchange": "the kernel's answer",
    "nbd/kernel/netlink.py:family_number": "the kernel's answer",
    "nbd/server.py:_origin": "credentials of the kernel",
    "target/scsi/block.py:_xor_into": "data: tests/target/scsi/test_block.py has it",
}


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


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """As many as there are processors. Each imports the rows once."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield pool


def a_part(name: str, first: int, sequences: int, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    engine.run(ROWS[name], sequences, seed, first)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ROWS)
def test_a_million(name: str, processes: ProcessPoolExecutor) -> None:
    row = ROWS[name]
    if os.environ.get(engine.REPLAY):
        engine.run(row, MILLION)
        return
    seed = engine.fresh_seed()
    cases = MILLION // row.each
    step = -(-cases // (PARTS * (os.cpu_count() or 1)))
    parts = [
        processes.submit(a_part, name, first, min(step, cases - first) * row.each, seed)
        for first in range(0, cases, step)
    ]
    for part in parts:
        part.result()


# -- every decoder has a row -----------------------------------------------------------------------

# How numbers are taken out of bytes.
_TAKES = ("unpack", "unpack_from", "iter_unpack", "from_bytes")


def refuses(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """It ends in ``_untrusted``, or raises RemoteProtocolError itself."""
    return node.name.endswith("_untrusted") or any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name)
        and each.func.id in ("RemoteProtocolError", "MissingKey", "protocol_error")
        for each in ast.walk(node)
    )


def reads(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """It takes numbers out of bytes, whether it refuses any or not. (``Class.unpack`` is another
    function, which is one of these itself.)"""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in _TAKES
        and not re.search(r"\b[A-Z][a-z]\w*$", ast.unparse(each.func.value))
        for each in ast.walk(node)
    )


def decoders(
    path: Path, is_one: Callable[[ast.FunctionDef | ast.AsyncFunctionDef], bool] = refuses
) -> list[str]:
    """The functions of a module that ``is_one`` is true of."""
    found: list[str] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                if is_one(each):
                    found.append(f"{path.relative_to(PACKAGE)}:{prefix}{each.name}")
            elif isinstance(each, ast.ClassDef):
                walk(each, f"{prefix}{each.name}.")
            else:
                walk(each, prefix)

    walk(ast.parse(path.read_text()), "")
    return found


@functools.cache
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
            engine.run(
                row, (50 if row.each > 1 else 120 + 20 * len(row.samples)) * row.each, seed=7
            )
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
    assert not missing, f"no row of tests/fuzz (ROWS in rows_….py) reaches {missing}"
    stale = sorted(name for name in ELSEWHERE if name not in known or name in called)
    assert not stale, f"a row reaches these, or they are gone: {stale}"
    for place in ELSEWHERE.values():
        assert (PACKAGE.parent / place).exists()


@pytest.mark.plain("sees the calls of Python functions")
def test_what_takes_numbers_out_of_bytes_has_a_row() -> None:
    """Also where it refuses none. What no row reaches has bytes of our own, of this machine's
    kernel, or of a test elsewhere: OURS says which."""
    known = {name for path in PACKAGE.rglob("*.py") for name in decoders(path, reads)}
    if not isinstance(frames.look, FunctionType):  # Cython's has its place
        known.remove("rcap/iwarp/frames.py:_look")
    called = reached()
    assert len(known) > 100
    missing = sorted(known - called - set(OURS) - set(ELSEWHERE))
    assert not missing, f"no row of tests/fuzz (ROWS in rows_….py) reaches {missing}"
    stale = sorted(name for name in OURS if name not in known or name in called)
    assert not stale, f"a row reaches these, or they are gone: {stale}"


def test_an_nbd_client_says_every_command_that_there_is() -> None:
    for mode, samples in rows_nbd.SAMPLES.items():
        layout = nbd.EXTENDED_REQUEST if mode == EXTENDED else nbd.REQUEST
        missing = set(nbd.FLAGS) - {layout.unpack_from(sample)[2] for sample in samples}
        assert not missing, f"_requests of tests/fuzz/rows_nbd.py has no request of {missing}"
    offered = export(rotational=True).flags(structured=True) | nbd.BLOCK_STATUS_PAYLOAD
    assert offered == rows_nbd.EVERY_FLAG, f"EVERY_FLAG of rows_nbd.py is to be {offered:#x}"


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
