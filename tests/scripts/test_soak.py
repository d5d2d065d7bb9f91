"""scripts/soak: what it judges, with made-up samples and blocks; and short runs of all of it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from soaklib import plan, report
from soaklib.area import BLOCK, COMES, Area, Ledger, content
from soaklib.judging import judged
from soaklib.latencies import Latencies
from soaklib.picture import draw
from soaklib.relay import Relay
from soaklib.sampling import Sample, sample
from soaklib.tried import Counts, Replays, Tried, ask, replays
from soaklib.work import DURABLE, FLUSH, READ, Step, Worker

from iserblk.disk import blocking
from tests.support.target import running_target
from tests.support.until import until_blocking

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / "scripts" / "soak"
MIB = 1 << 20
RESTARTS = [("kill", "target"), ("term", "target"), ("term", "nbd")]
VISITORS = ["api", "nbd", "file"]


# --- what happens ---------------------------------------------------------------------------------


def test_the_same_seed_does_the_same() -> None:
    first = [*plan.events(7, 3600, RESTARTS, VISITORS)]
    assert first == [*plan.events(7, 3600, RESTARTS, VISITORS)]
    assert first != [*plan.events(8, 3600, RESTARTS, VISITORS)]
    assert first == [*plan.events(7, 7200, RESTARTS, VISITORS)][: len(first)]
    assert all(early.at_s < late.at_s for early, late in itertools.pairwise(first))


def test_all_happens_and_processes_live_long_enough_to_be_judged() -> None:
    events = [*plan.events(1, 2 * plan.CYCLE_S, RESTARTS, VISITORS)]
    assert {each.whom for each in events if each.kind == plan.GROW} == {"0", "1", "2"}
    assert {each.whom for each in events if each.kind == plan.VISIT} == {*VISITORS}
    assert {each.what for each in events if each.kind == plan.PORTAL} == {"cut", "away", "stall"}
    restarts = [each for each in events if each.kind == plan.RESTART]
    assert {(each.what, each.whom) for each in restarts} == {*RESTARTS}
    assert all(each.at_s % plan.CYCLE_S < plan.RESTARTS_S for each in restarts)
    assert any(each.at_s > plan.CYCLE_S for each in restarts)


@pytest.mark.parametrize("seed", range(20))
def test_also_a_short_run_has_a_whole_round(seed: int) -> None:
    """In which the target loses its cache twice."""
    events = [*plan.events(seed, 60, RESTARTS, VISITORS)]
    kinds = [(each.what, each.whom) for each in events if each.kind == plan.RESTART]
    assert {*kinds} == {*RESTARTS}
    assert kinds.count(plan.LOSS) >= 2


def test_each_round_has_the_same_events_in_another_order() -> None:
    kinds = plan.kinds_of_a_round(RESTARTS, VISITORS)
    assert kinds.count((plan.RESTART, *plan.LOSS)) == 2
    events = [
        (each.kind, each.what, each.whom)
        for each in plan.events(3, plan.RESTARTS_S, RESTARTS, VISITORS)
    ]
    assert events[: len(kinds)] != kinds
    assert sorted(events[: len(kinds)]) == sorted(kinds)


# --- the data -------------------------------------------------------------------------------------


class Disk:
    """``loses``: writes that are not carried out, by number."""

    def __init__(self, size: int, loses: frozenset[int] = frozenset()) -> None:
        self.bytes = bytearray(size)
        self._loses = loses
        self._writes = 0

    def do(self, step: Step) -> bytes:
        end = step.offset + (step.length or len(step.data))
        if step.kind == READ:
            return bytes(self.bytes[step.offset : end])
        if step.data:
            self._writes += 1
            if self._writes not in self._loses:
                self.bytes[step.offset : end] = step.data
        return b""


def _play(disk: Disk, steps: int) -> list[str]:
    wrong: list[str] = []
    worker = Worker(Area(3, 2 * BLOCK, 8), "seed", wrong.append)
    for _ in range(steps):
        step = worker.next()
        worker.ended(step, disk.do(step))
    for step in worker.last():
        worker.ended(step, disk.do(step))
    return wrong


def test_a_disk_that_keeps_all() -> None:
    disk = Disk(10 * BLOCK)
    assert _play(disk, 200) == []
    assert not any(disk.bytes[: 2 * BLOCK]) and any(disk.bytes[2 * BLOCK :])


def test_a_lost_write_is_found() -> None:
    wrong = _play(Disk(10 * BLOCK, frozenset(range(20, 24))), 60)
    assert wrong and all("generation" in each for each in wrong)


def test_blocks_that_are_wrong() -> None:
    area = Area(3, 8 * BLOCK, 4)
    area.begin(1, 2)
    area.written(1, 2)
    assert [*area.wrong(1, content(3, 1, 1) + content(3, 2, 1))] == []
    (text,) = area.wrong(1, bytes(BLOCK))
    assert text == f"the block at {9 * BLOCK}: generation 0, and not 1"
    (text,) = area.wrong(1, content(3, 2, 1))
    assert text.endswith("it is block 2 of worker 3, not 1 of 3")
    (text,) = area.wrong(1, content(4, 1, 1))
    assert text.endswith("it is block 1 of worker 4, not 1 of 3")
    (text,) = area.wrong(1, content(3, 1, 1)[:-1] + b"x")
    assert "no block as anyone writes it" in text
    (text,) = area.wrong(0, content(3, 0, 1))
    assert text.endswith("generation 1, and not 0")


def test_what_may_be_read_behind_a_loss() -> None:
    """What was flushed, and all that was written later, also a write that has not ended."""
    area = Area(3, 0, 2)
    for _ in range(2):
        area.begin(0, 1)
        area.written(0, 1)
        area.was_flushed(area.acknowledged())
    area.begin(0, 1)
    area.written(0, 1)
    area.begin(0, 1)
    area.may_have_lost()
    for generation in (2, 3, 4):
        assert [*area.wrong(0, content(3, 0, generation))] == []
    (text,) = area.wrong(0, content(3, 0, 1))
    assert text.endswith("generation 1, and not 2 to 4")


def test_a_flush_covers_what_was_acknowledged_before_it() -> None:
    area = Area(3, 0, 1)
    area.begin(0, 1)
    area.written(0, 1)
    covered = area.acknowledged()
    area.begin(0, 1)
    area.written(0, 1)
    area.was_flushed(covered)
    assert area.flushed == [1]
    area.begin(0, 1)
    area.written(0, 1, durable=True)
    assert area.flushed == [3]


def test_the_ledger_of_a_client_that_was_killed() -> None:
    wrong: list[str] = []
    lines: list[str] = []
    worker = Worker(Area(3, 0, 8), "seed", wrong.append, lines.append)
    disk = Disk(8 * BLOCK)
    kinds = set()
    for _ in range(100):
        step = worker.next()
        kinds.add(step.kind)
        worker.ended(step, disk.do(step))
    assert {DURABLE, FLUSH} < kinds
    text = "".join(f"{line}\n" for line in [*lines, "begin 0 1"])
    area = Ledger(Area(3, 0, 8), f"{text}writ".encode()).area
    assert area.flushed == worker.area.flushed == area.floor
    assert area.newest == [worker.area.newest[0] + 1, *worker.area.newest[1:]]


def test_a_flush_covers_nothing_of_a_client_that_was_killed_before() -> None:
    """The target may have lost it between the two."""
    text = b"begin 0 2\nwritten 0 2\nflushed\nbegin 1 2\nwritten 1 2\nwrit"
    area = Ledger(Area(3, 0, 4), text + f"\n{COMES}\n".encode() + b"flushed\n").area
    assert area.floor == area.flushed == [1, 1, 0, 0]
    assert area.newest == [1, 2, 1, 0]


# --- whether it is flat ---------------------------------------------------------------------------


def _samples(
    minutes: float, memory: float = 0.0, descriptors: float = 0.0, threads: float = 0.0,
    pid: int = 1, start_s: float = 0.0,
) -> list[Sample]:  # fmt: skip
    """Growth by the minute; behind much that is taken in the first ten minutes."""
    found = []
    for second in range(0, int(minutes * 60) + 1, 5):
        minute = second / 60
        warm = min(minute, 9.0)
        found.append(
            Sample(
                start_s + second,
                pid,
                int((40 + 10 * warm + memory * minute) * MIB),
                int(20 + 3 * warm + descriptors * minute) + second % 3,
                int(4 + warm + threads * minute),
            )
        )
    return found


def _findings(samples: list[Sample]) -> list[str]:
    return [text for life in judged({"nbd": samples}) for text in life.findings()]


def test_a_flat_process() -> None:
    assert _findings(_samples(60)) == []


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (_samples(60, memory=0.5), "memory grew from 138.1 to 156.9 MiB in 60 minutes"),
        (_samples(30, memory=1.0), "memory grew"),
        (_samples(60, descriptors=0.2), "descriptors grew from 49 to 57"),
        (_samples(120, threads=0.05), "threads grew from 13 to 17"),
    ],
)
def test_a_leak_is_found(samples: list[Sample], said: str) -> None:
    (found,) = _findings(samples)
    assert found.startswith("nbd (process 1): ") and said in found


def test_what_comes_and_goes_is_no_leak() -> None:
    samples = [
        each._replace(descriptors=each.descriptors + (6 if number % 4 else 0))
        for number, each in enumerate(_samples(60))
    ]
    assert _findings(samples) == []


def test_processes_that_were_restarted_are_judged_each_for_itself() -> None:
    """And those that lived too short are not judged."""
    samples = _samples(5, memory=9.0)
    samples += _samples(30, pid=2, start_s=301)
    samples += _samples(30, descriptors=0.5, pid=3, start_s=2200)
    lives = judged({"nbd": samples})
    assert [life.begin is None for life in lives] == [True, False, False]
    (found,) = (text for life in lives for text in life.findings())
    assert found.startswith("nbd (process 3): descriptors grew")
    text = "\n".join(report.processes(lives))
    assert (
        text.count("flat\n") == 1 and text.count("grows\n") == 1 and text.count("not judged") == 1
    )


def test_a_short_run_says_that_flatness_was_not_judged() -> None:
    text = "\n".join(report.processes(judged({"nbd": _samples(19, memory=9.0)})))
    assert "Flatness was not judged" in text and "grows" not in text


def test_a_sample_of_this_process() -> None:
    found = sample(os.getpid(), 3.0)
    assert found is not None and (found.at_s, found.pid) == (3.0, os.getpid())
    assert found.memory > MIB and found.descriptors > 2 and found.threads > 0
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert sample(child.pid, 0.0) is None  # a zombie
    child.wait()
    assert sample(child.pid, 0.0) is None


# --- what was tried -------------------------------------------------------------------------------


def test_the_numbers_of_processes_with_one_name_are_added_up() -> None:
    tried = Tried()
    tried.note("nbd", 1, Counts(reconnections=1, flushes=10))
    tried.note("nbd", 1, Counts(reconnections=2, resent=3, flushes=20))
    tried.note("nbd", 2, Counts(recoveries=1, flushes=5))
    tried.note("nbd", 2, None)  # it did not answer
    tried.note("mount", 3, Counts(flushes=1))
    assert tried.total() == {"nbd": Counts(2, 1, 3, 25), "mount": Counts(flushes=1)}
    lines = [*report.initiators(tried.total(), {"nbd": Replays(2, 30), "gateway": Replays(1, 4)})]
    assert [line.split() for line in lines[-4:]] == [
        ["nbd", "2", "1", "3", "25", "2", "30"],
        ["mount", "0", "0", "0", "1", "0", "0"],
        ["gateway", "0", "0", "0", "0", "1", "4"],
        ["all", "2", "1", "3", "26", "3", "34"],
    ]


def test_replays_are_counted_in_a_log() -> None:
    log = (
        b"iserblk: iser://h/t/0: sending 17 unflushed changes again\n"
        b"iserblk: 127.0.0.1:3: connected again after 1.2 s, 2 commands sent again\n"
        b"iserblk: iser://h/t/0: sending 3 unflushed changes again\n"
    )
    assert replays(log) == Replays(2, 20)
    assert replays(b"") == Replays(0, 0)


def test_what_a_disk_serves_is_counted(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    assert ask(place) is None
    options = {"metrics": str(place)}
    image = tmp_path / "lun"
    image.write_bytes(bytes(MIB))
    with (
        running_target([str(image)], tmp_path / "log") as target,
        blocking.open_disks([target.url], options) as disks,
    ):
        disk = disks.disks[disks.default]
        disk.write(memoryview(bytes(BLOCK)), 0)
        disk.flush()
        disk.flush()
        assert ask(place) == Counts(flushes=2)
    assert ask(place) is None


# --- what is printed and drawn --------------------------------------------------------------------


def test_latencies() -> None:
    found = Latencies()
    assert found.percentile(50) == 0
    for milliseconds in range(1, 101):
        found.add(milliseconds / 1000)
    again = Latencies(json.loads(json.dumps(found.counts)))
    again.merge(found)
    assert again.count == 200
    for percent in (50, 99, 100):
        assert percent <= again.percentile(percent) <= 1.1 * percent


def test_the_table_has_a_row_for_each_minute_or_for_several() -> None:
    def minutes(count: int) -> dict[int, Latencies]:
        return {minute: Latencies({"80": 1}) for minute in range(count)}

    lines = [*report.latencies({"client nbd": minutes(3), "client api": {}})]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "all"]
    assert lines[-1].split() == ["all", "3:", *["1.0"] * 3]
    assert len([*report.latencies({"client nbd": minutes(600)})]) == 33
    assert [*report.latencies({})] == []


def test_the_picture() -> None:
    minutes = {"client nbd": {0: Latencies({"80": 3}), 2: Latencies({"120": 1})}}
    drawn = ElementTree.fromstring(draw({"nbd": _samples(60)}, minutes, "A soak").svg())
    words = "".join(drawn.itertext())
    for each in ("resident memory in MiB", "descriptors", "threads", "percentile 99", "nbd"):
        assert each in words
    assert len(drawn.findall("{*}polyline")) == 5


# --- a portal -------------------------------------------------------------------------------------


@contextmanager
def _relayed() -> Iterator[tuple[Relay, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        with closing(Relay(listener.getsockname()[1])) as relay:
            yield relay, listener


@contextmanager
def _connected(relay: Relay, listener: socket.socket) -> Iterator[list[socket.socket]]:
    with socket.create_connection(("127.0.0.1", relay.port), 30) as client:
        server, _ = listener.accept()
        with server:
            server.settimeout(30)
            yield [client, server]


def test_a_portal_that_is_cut() -> None:
    with _relayed() as (relay, listener):
        with _connected(relay, listener) as (client, server):
            client.sendall(b"there")
            assert server.recv(9) == b"there"
            server.sendall(b"back")
            assert client.recv(9) == b"back"
            relay.cut()
            assert client.recv(9) == server.recv(9) == b""
        with _connected(relay, listener) as (client, server):
            client.close()
            assert server.recv(9) == b""


def test_a_portal_that_is_away() -> None:
    with _relayed() as (relay, listener):
        with _connected(relay, listener) as (client, server):
            relay.away()
            assert client.recv(9) == server.recv(9) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", relay.port), 30)
        relay.back()
        with _connected(relay, listener) as (client, server):
            client.sendall(b"again")
            assert server.recv(9) == b"again"


def test_what_a_portal_had_when_it_stalled_never_arrives() -> None:
    with _relayed() as (relay, listener):
        with _connected(relay, listener) as (client, server):
            relay.stall()
            client.sendall(b"late")
            relay.go_on()
            assert server.recv(9) == b""
        with _connected(relay, listener) as (client, server):
            client.sendall(b"again")
            assert server.recv(9) == b"again"


# --- all of it ------------------------------------------------------------------------------------


def _begin(directory: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, "--output", str(directory), "--seed", "1", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _nothing_is_left(directory: Path) -> bool:
    """No process of the soak, and no mount."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes()
        except OSError:
            continue
        if os.fsencode(directory) in words:
            return False
    return str(directory) not in Path("/proc/self/mounts").read_text()


def test_half_a_minute(tmp_path: Path) -> None:
    directory = tmp_path / "soak"
    process = _begin(directory, "--minutes", "0.4")
    said, errors = process.communicate()
    assert process.returncode == 0, said + errors
    assert (directory / "soak.txt").read_text() == said
    assert said.startswith("A soak of 0.") and said.endswith("\nnothing was wrong\n")
    assert "Flatness was not judged" in said
    (row,) = (line for line in said.splitlines() if line.startswith("all ") and ":" not in line)
    reconnections, _, _, flushes, times, changes = map(int, row.split()[1:])
    assert min(reconnections, flushes, times) > 0 and changes >= times
    for name in ("target", "nbd", "gateway", "client blocking", "client trio", "client gateway"):
        assert f"\n{name} " in said
    assert ("no mount: " in said) is ("\nmount " not in said)
    assert len((directory / "events.txt").read_text().splitlines()) > 5
    assert ElementTree.parse(directory / "soak.svg").getroot().tag.endswith("svg")
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert {"nbd", "target"} <= {each["process"] for each in samples}
    assert _nothing_is_left(directory)


def test_data_that_was_lost_is_told_and_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    """The blocks of the Python API's clients become zeroes behind the target's back."""
    directory = tmp_path / "soak"
    process = _begin(directory, "--minutes", "60")
    lun = directory / "lun2"
    try:
        until_blocking(lambda: (lun.exists() and lun.stat().st_blocks > 800)
                       or process.poll() is not None)  # fmt: skip
        os.truncate(lun, 0)
        os.truncate(lun, 64 * MIB)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGINT, said + errors
    assert "data is wrong: " in said and "generation 0, and not " in said
    assert "nothing was wrong" not in said
    assert "Traceback" not in errors
    assert _nothing_is_left(directory)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say for how long"),
        (("--hours", "0"), "say for how long"),
        (("--hours", "x"), "invalid float value"),
        (("--minutes", "1", "--output", str(TOP)), "not empty"),
        (("--minutes", "1", "--frobnicate"), "unrecognized arguments"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 7 and done.stdout == ""
    assert done.stderr.startswith("soak: ") and said in done.stderr
    assert len(done.stderr.splitlines()) == 1
