"""scripts/outage: the parts that need no virtual machine."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lablib.command import run_command
from outagelib import __main__ as command
from outagelib import say, transactions, writer
from outagelib.__main__ import outage
from outagelib.cases import CASES, TARGETS
from outagelib.ledger import Follower, Ledger, Missing, in_file, missing
from outagelib.picture import draw, outcome
from outagelib.report import Outage, Subject, cells, read, table, write
from outagelib.services import SERVICES, istgt_configuration, listens
from outagelib.transactions import EACH, Transactions
from outagelib.work import Database, programs_of_postgresql
from outagelib.writer import BATCH, RECORD, Writer, record
from rich.console import Console

from tests.support.target import ROOT
from tests.support.until import until_blocking

SVG = "{http://www.w3.org/2000/svg}"


def ledger(*lines: str) -> Ledger:
    made = Ledger()
    for line in lines:
        made.note(line)
    return made


def writes(first: int, end: int, at: float = 0) -> list[str]:
    return [f"write {number} {at + number}" for number in range(first, end)]


class Log(io.StringIO):
    """A writer's log, which makes the file ``stop`` at its line ``last``."""

    def __init__(self, last: str, stop: Path) -> None:
        super().__init__()
        self._last = last
        self._stop = stop

    def write(self, text: str) -> int:
        if text.startswith(self._last):
            self._stop.touch()
        return super().write(text)


@pytest.fixture
def write_until(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ledger]:
    """Runs a writer on ``records`` until its log has a line that begins so."""
    monkeypatch.setattr(os, "O_DIRECT", 0)  # which a file system in memory has not
    monkeypatch.setattr(writer, "PER_SECOND", 1e9)
    monkeypatch.setattr(writer, "PAUSE_S", 0.0)

    def run(last: str) -> Ledger:
        stop = tmp_path / "stop"
        log = Log(f"{last} ", stop)
        Writer(tmp_path / "records", log, stop).run()
        return ledger(*log.getvalue().splitlines())

    return run


# --- the writer ----------------------------------------------------------------------------------


def test_what_a_writer_has_flushed_is_in_its_file(
    write_until: Callable[[str], Ledger], tmp_path: Path
) -> None:
    found = write_until(f"write {BATCH + 2}")
    count = BATCH + 3
    assert len(found.acknowledged) == count and found.flushed == set(range(count))
    assert len(found.flushes) == 2 and found.ended and not found.failed
    file = tmp_path / "records"
    assert file.stat().st_size == count * RECORD
    assert missing(found, in_file(file)) == Missing(0, 0, 0)


def test_a_record_that_is_not_in_the_file(
    write_until: Callable[[str], Ledger], tmp_path: Path
) -> None:
    """A wrong one, one that is torn, and the last, which the file is too short for."""
    found = write_until("write 4")
    with (tmp_path / "records").open("r+b") as file:
        file.write(record(7))
        file.seek(2 * RECORD + 512)
        file.write(bytes(512))
        file.truncate(4 * RECORD)
    present = in_file(tmp_path / "records")
    assert [present(number) for number in range(5)] == [False, True, False, True, False]
    assert missing(found, present) == Missing(3, 3, 0)


def test_what_fails_is_tried_again(
    write_until: Callable[[str], Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    errors = iter([errno.EIO, errno.EROFS])

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if offset == RECORD and (number := next(errors, 0)):
            raise OSError(number, "refused")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    found = write_until("write 3")
    assert [number for _, number in found.failed] == [errno.EIO, errno.EROFS]
    assert missing(found, in_file(tmp_path / "records")) == Missing(0, 0, 0)
    assert found.flushed == {1, 2, 3} and found.told == {0}


# --- pgbench -------------------------------------------------------------------------------------

# Two transactions in a run; the second run fails at once; the third is the last.
RUNS = """\
#!/bin/sh
here=$(dirname "$0")
for word; do
  case $word in
    --log-prefix=*) log=${word#*=} ;;
    --define=number=*) echo "${word##*=}" >>"$here/starts" ;;
  esac
done
if [ "$(wc -l <"$here/starts")" = 2 ]; then
  echo "ERROR: could not extend file: Read-only file system" >&2
  exit 2
fi
printf '0 1 900 0 2000000000 5\\n0 2 900 0 2000000000 90000\\n' >"$log.17"
[ "$(wc -l <"$here/starts")" != 3 ] || touch "$here/stop"
"""


def test_transactions_are_numbered_through_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pgbench has noted of a run that failed counts, and what failed gets its number again."""
    monkeypatch.setattr(transactions, "PAUSE_S", 0.0)
    program = tmp_path / "pgbench"
    program.write_text(RUNS)
    program.chmod(0o755)
    log = io.StringIO()
    Transactions(str(program), "/sockets", log, tmp_path / "stop").run()
    starts = (tmp_path / "starts").read_text().split()
    assert starts == ["-1", "1", "1"]  # the number before the first
    found = ledger(*log.getvalue().splitlines())
    assert len(found.acknowledged) == 4 and found.ended
    assert found.flushed == {0, 1, 2, 3} and not found.told
    assert [number for _, number in found.failed] == [errno.EROFS]
    assert found.acknowledged[1] - found.acknowledged[0] == pytest.approx(0.09, abs=0.01)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_database_and_what_is_missing_in_it() -> None:
    """Its server is killed, as by a loss of power, and starts on what is there."""
    programs = programs_of_postgresql()
    if programs is None:
        pytest.skip("no PostgreSQL below /usr/lib/postgresql")
    if os.geteuid():
        pytest.skip("PostgreSQL gets a user of its own, which needs root")
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        top.chmod(0o755)  # for that user
        work = Database(programs, top / "new")
        place, mount = top / "place", top / "files"
        place.mkdir()
        mount.mkdir()
        process = work.start(mount, place)
        try:
            follower = Follower(place / "log")
            until_blocking(lambda: len(follower.look().acknowledged) > EACH)
        finally:
            server = int((mount / "db/postmaster.pid").read_text().splitlines()[0])
            os.kill(server, signal.SIGQUIT)
            (place / "stop").touch()
            process.wait()
        found = follower.look()
        assert found.ended and found.flushed == set(range(len(found.acknowledged)))
        there, right = work.looked_at(mount, place)
        assert right and missing(found, there) == Missing(0, 0, 0)
        (mount / "db/global/pg_control").write_bytes(b"")
        shutil.rmtree(place / "sockets-at-the-target")
        there, right = work.looked_at(mount, place)
        assert not right and missing(found, there).flushed == len(found.flushed)


def test_pgbench_without_postgresql(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "programs_of_postgresql", lambda: None)
    monkeypatch.setattr("sys.argv", ["outage", "--program", "pgbench"])
    assert run_command(outage, "scripts/outage", say, "stopped") == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("outage: --program pgbench: no PostgreSQL below /usr/lib/postgresql")


# --- what was told -------------------------------------------------------------------------------


def test_a_flush_that_fails_tells_of_what_it_was_to_cover() -> None:
    """A later flush, which succeeds, says nothing of that: the kernel reports a loss once."""
    found = ledger(
        *writes(0, 3), "flush 3 3", *writes(3, 6), "failed-flush 6 6 5", "flush 6 7",
        *writes(6, 8), "flush 8 9",
    )  # fmt: skip
    assert found.flushed == {0, 1, 2, 6, 7} and found.told == {3, 4, 5}
    assert missing(found, lambda number: number not in (1, 4, 5, 7)) == Missing(2, 2, 2)


def test_what_no_flush_has_covered_may_be_missing_in_silence() -> None:
    found = ledger(*writes(0, 2), "flush 2 2", *writes(2, 5))
    assert missing(found, lambda number: number < 3) == Missing(0, 2, 0)


def test_a_write_that_fails_tells_of_what_is_not_flushed() -> None:
    """A flush that succeeds behind it is not taken for more than it is: ext4 says so although it
    has given its journal up."""
    found = ledger(*writes(0, 3), "flush 3 3", *writes(3, 5), "failed-write 5 6 5", "flush 5 7")
    assert missing(found, lambda number: number < 3) == Missing(0, 0, 2)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), False),
        (("failed-write 2 9 30",), True),
        (("failed-write 2 9 30", "flush 2 10"), True),
        (("failed-write 2 9 30", "failed-flush 2 10 5"), True),
        (("failed-write 2 9 5",), False),
        (("failed-write 2 9 30", "write 2 10"), False),
    ],
)
def test_it_is_read_only(lines: tuple[str, ...], expected: bool) -> None:
    assert ledger(*writes(0, 2), *lines).read_only is expected


def test_the_pause_is_the_longest_time_without_a_record() -> None:
    """What is flushed at the end, or fails, is no end of it."""
    found = ledger(*writes(0, 10), "failed-write 10 20 5", "flush 10 100", "write 10 101")
    assert found.pause(102) == (92, True)
    assert found.pause(300) == (199, False)
    assert Ledger().pause(5) == (5, False)


def test_rates_are_of_whole_seconds() -> None:
    found = ledger("write 0 9.9", "write 1 10.0", "write 2 10.9", "write 3 12.5", "write 4 13.1")
    assert found.rates(10, 13.2) == [2 * RECORD, 0, RECORD]


def test_a_log_that_grows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = Follower(log)
    assert not follower.look().acknowledged
    log.write_text("write 0 1.5\nwri")
    assert follower.look().acknowledged == [1.5]
    with log.open("a") as file:
        file.write("te 1 2.5\n")
    assert follower.look().acknowledged == [1.5, 2.5]
    assert len(follower.look().acknowledged) == 2


# --- targets -------------------------------------------------------------------------------------


def test_every_target_has_a_service() -> None:
    assert SERVICES.keys() == TARGETS.keys()


def test_whether_a_program_listens(tmp_path: Path) -> None:
    """At its own address and port, and not as a client of another."""
    table = tmp_path / "tcp"
    head = "  sl  local_address rem_address   st tx_queue rx_queue\n"
    for row, expected in (
        ("   0: 020A090A:0CBC 00000000:0000 0A 00000000:00000000\n", True),
        ("   0: 020A090A:0CBC 010A090A:9C40 01 00000000:00000000\n", False),
        ("   0: 020A090A:0016 00000000:0000 0A 00000000:00000000\n", False),
        ("   0: 0109090A:0CBC 00000000:0000 0A 00000000:00000000\n", False),
        ("", False),
    ):
        table.write_text(head + row)
        assert listens(table, "10.9.10.2") is expected


def test_istgt_has_a_target_for_each_disk() -> None:
    """At the array's address, and with its files in its place."""
    disks = {"a": Path("/dev/nullb0"), "b": Path("/dev/nullb1")}
    said = istgt_configuration(disks, "10.9.10.3", Path("/run/it")).splitlines()
    assert "  Portal P1 10.9.10.3:3260" in said
    assert [line.split()[-1] for line in said if "TargetName" in line] == ["a", "b"]
    assert "  LUN0 Storage /dev/nullb1 Auto" in said
    assert "  PidFile /run/it/istgt.pid" in said


# --- table and picture ---------------------------------------------------------------------------


def subject(name: str = "iserblk", **changes: Any) -> Subject:
    given: dict[str, Any] = {
        "name": name, "pause_s": 131.4, "went_on": True, "failed": 0, "first_failed_s": None,
        "errors": (), "state": "read-write", "whole": True, "acknowledged": 90,
        "missing": Missing(0, 0, 0), "rates": (65536,) * 21 + (0,) * 132,
    }  # fmt: skip
    return Subject(**{**given, **changes})


def measured(*subjects: Subject, case: str = "network", **changes: Any) -> Outage:
    return replace(Outage(case, "ext4", "6.1", 20.9, 120.0, 12.5, subjects), **changes)


DEAD = subject(
    "open-iscsi", went_on=False, failed=7, first_failed_s=130.0, errors=("Input/output error",),
    state="read-only", whole=False, missing=Missing(3, 5, 2),
)  # fmt: skip


def test_a_table_has_a_row_for_each_initiator() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(measured(subject(), DEAD)))
    rows = [line.split("│") for line in console.export_text().splitlines() if "│" in line]
    assert [[word.strip() for word in row[1:-1]] for row in rows] == [
        ["iserblk", "131 s", "0", "read-write", "0", "0", "0"],
        ["open-iscsi", "never goes on", "7", "read-only, damaged", "3", "5", "2"],
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "a pause of 131 s, no error; nothing is lost"),
        (
            {"missing": Missing(2, 2, 0)},
            "a pause of 131 s, no error; 2 records are lost without an error",
        ),
        (
            {"failed": 1, "missing": Missing(0, 0, 4)},
            "a pause of 131 s, 1 call fails; 4 records are lost, and told",
        ),
        (
            {"went_on": False, "failed": 9, "state": "read-only"},
            "it never goes on, 9 calls fail, read-only; nothing is lost",
        ),
    ],
)
def test_the_words_of_a_picture(changes: dict[str, Any], words: str) -> None:
    assert outcome(subject(**changes)) == words


def test_a_picture_has_a_line_for_each_initiator_and_says_what_became_of_it() -> None:
    picture = ET.fromstring(draw(measured(subject(), DEAD, subject("qemu-nbd"))).svg())
    lines = picture.findall(f"{SVG}polyline")
    assert [line.get("class") for line in lines] == ["line-ours", "line-peer", "line-other"]
    words = [each.text for each in picture.findall(f"{SVG}text")]
    assert f"open-iscsi: {outcome(DEAD)}" in words
    assert "120 s" in words and words.count("the target is away") == 3
    width = float(picture.get("width", "0"))
    for line in lines:
        points = [pair.split(",") for pair in line.get("points", "").split()]
        assert len(points) == 2 * 51
        assert all(0 <= float(x) <= width for x, _ in points)
        assert points[2 * 7][1] != points[2 * 6][1]  # nothing is written from then on


# --- the command ---------------------------------------------------------------------------------


def test_what_was_measured_can_be_shown_again(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    write(file, [measured(subject(), DEAD), measured(subject(), case="reboot")])
    assert read(file) == [measured(subject(), DEAD), measured(subject(), case="reboot")]
    done = CliRunner().invoke(
        outage, ["--from", str(file), "--case", "reboot", "--plot", str(tmp_path / "plots")]
    )
    assert done.exit_code == 0, done.output
    assert CASES["reboot"].about in done.output and CASES["network"].about not in done.output
    assert [each.name for each in (tmp_path / "plots").iterdir()] == ["outage-reboot.svg"]


def test_results_from_before_there_were_other_targets(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    write(file, [measured(subject())])
    file.write_text(file.read_text().replace(', "target": "LIO"', ""))
    assert read(file) == [measured(subject())]


def test_the_name_says_what_is_not_as_usual() -> None:
    assert measured().name == "network"
    other = measured(file_system="xfs", target="istgt")
    assert other.name == "network-xfs-istgt" and other.title.endswith("(xfs, istgt)")
    other = measured(program="pgbench")
    assert other.name == "network-pgbench" and other.title.endswith("(ext4, pgbench, LIO)")


def test_a_picture_of_a_database() -> None:
    found = subject(rates=(10,) * 21 + (0,) * 132)
    picture = ET.fromstring(draw(measured(found, program="pgbench")).svg())
    words = [each.text or "" for each in picture.findall(f"{SVG}text")]
    assert any(each.startswith("transactions of pgbench in a second: 10") for each in words)
    (line,) = picture.findall(f"{SVG}polyline")
    heights = {float(pair.split(",")[1]) for pair in line.get("points", "").split()}
    assert len(heights) > 1 and max(heights) - min(heights) == pytest.approx(60)


def test_the_list() -> None:
    done = CliRunner().invoke(outage, ["--list"])
    assert [line.split()[0] for line in done.output.splitlines()] == [*CASES]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "not written by scripts/outage"),
        (
            '[{"case": "network", "file_system": "ext4", "kernel": "6", "before_s": 1, "away_s": 1,'
            ' "after_s": 1, "subjects": [], "target": "SCST"}]',
            "no target is called SCST",
        ),
        (
            '[{"case": "network", "file_system": "ext4", "kernel": "6", "before_s": 1, "away_s": 1,'
            ' "after_s": 1, "subjects": [], "program": "dbench"}]',
            "no program is called dbench",
        ),
        ('[{"case": "network"}]', "not written by scripts/outage"),
        ("[1]", "not written by scripts/outage"),
        ("no JSON", "Expecting value"),
        ("\N{LATIN SMALL LETTER A WITH DIAERESIS}", "'utf-8' codec"),
    ],
)
def test_a_file_that_is_not_ours(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "file"
    file.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr("sys.argv", ["outage", "--from", str(file)])
    assert run_command(outage, "scripts/outage", say, "stopped") == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"outage: --from {file}: {words}")


def test_a_case_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["outage", "--case", "fire"])
    assert run_command(outage, "scripts/outage", say, "stopped") == 7
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("able", "status"), [(["network", "reboot"], 0), (["reboot"], 1)])
def test_a_guest_that_measures_nothing(
    able: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The other cases are run and shown all the same."""

    def guest(words: list[str]) -> int:
        wish = json.loads(words[-1])
        if (name := wish["case"]) not in able:
            return 1
        results = Path(words[words.index("--results") + 1]) / "outage.json"
        write(results, [measured(subject(), case=name, file_system=each)
                        for each in wish["file_systems"]])  # fmt: skip
        return 0

    monkeypatch.setattr(command, "to_its_end", guest)
    words = ["--case", "network", "--case", "reboot", "--json", str(tmp_path / "file")]
    words += ["--file-system", "xfs", "--file-system", "ext4"]
    monkeypatch.setattr("sys.argv", ["outage", *words])
    assert run_command(outage, "scripts/outage", say, "stopped") == status
    assert [(each.case, each.file_system) for each in read(tmp_path / "file")] == [
        (name, file_system) for name in able for file_system in ("xfs", "ext4")
    ]
    missed = "outage: network: the guest has ended with status 1, and measured nothing"
    assert (missed in capsys.readouterr().err) == bool(status)


def test_who_is_interrupted_lets_the_guest_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Interrupted:
        def __init__(self, *_words: object, **_more: object) -> None:
            pass

        def wait(self) -> int:
            calls.append("wait")
            if calls == ["wait"]:
                raise KeyboardInterrupt
            return 130

        def terminate(self) -> None:
            calls.append("terminate")

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.to_its_end(["guest"])
    assert calls == ["wait", "terminate", "wait"]


# --- the documents --------------------------------------------------------------------------------

PICTURES = ROOT / "docs/pictures"


def test_pictures_of_the_documents(tmp_path: Path) -> None:
    """They are what the command draws of the samples beside them."""
    words = ["--from", str(PICTURES / "outages.json"), "--plot", str(tmp_path)]
    assert CliRunner().invoke(outage, words).exit_code == 0
    drawings = {path.name: path.read_text() for path in tmp_path.iterdir()}
    pages = [ROOT / "README.md", ROOT / "docs/outages.md"]
    text = "".join(page.read_text() for page in pages)
    kept = {path.name: path.read_text() for path in PICTURES.glob("outage-*.svg")}
    assert kept and kept == {name: drawings[name] for name in kept}
    assert all(f"pictures/{name}" in text for name in kept)


def test_the_table_of_the_documents() -> None:
    """It is that of the samples; what its cases are is told before."""
    text = (ROOT / "docs/outages.md").read_text()
    assert all(f"| `{case.name}` | {case.about} |\n" in text for case in CASES.values())
    for each in read(PICTURES / "outages.json"):
        for subject in each.subjects:
            words = [each.case, each.target, each.place, *cells(subject)]
            assert f"| {' | '.join(words)} |\n" in text
