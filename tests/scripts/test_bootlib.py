"""scripts/boot: the parts that need no virtual machine. tests/lab/test_boot.py runs it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bootlib.agent import Agent, Failed
from bootlib.cases import CASES, Outcome, need_no_damage, need_patience, write_report
from bootlib.guest.records import BLOCK, record
from bootlib.storage import Ledger, check_digest, check_records, content, whole_file_system

from tests.support.nbdkit import need
from tests.support.target import ROOT

Answer = Callable[[dict[str, Any]], Any]


class Guest:
    """The guest's end of the agent's port: answers each request by ``answer``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.answer: Answer = lambda _request: {}
        self.before = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line.lstrip(b"\xff"))
                reply = json.dumps(self.answer(request)).encode() + b"\n"
                delimiter = b"\xff" if line.startswith(b"\xff") else b""
                connection.sendall(self.before + delimiter + reply)
                self.before = b""

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[tuple[Guest, Agent]]:
    guest = Guest(tmp_path / "agent")
    agent = Agent(guest.place)
    yield guest, agent
    agent.close()
    guest.close()


def answering(status: dict[str, Any]) -> Answer:
    """guest-exec gets the process 7, which ends with ``status`` when it is asked a second time."""
    asked: list[int] = []

    def answer(request: dict[str, Any]) -> Any:
        if request["execute"] == "guest-exec":
            return {"return": {"pid": 7}}
        assert request["arguments"] == {"pid": 7}
        asked.append(1)
        return {"return": {"exited": len(asked) > 1, **(status if len(asked) > 1 else {})}}

    return answer


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_script_and_its_output(guest: tuple[Guest, Agent]) -> None:
    end, agent = guest
    end.answer = answering({"exitcode": 0, "out-data": coded("a\nb\n")})
    assert agent.run("true") == "a\nb\n"


def test_a_script_that_fails(guest: tuple[Guest, Agent]) -> None:
    end, agent = guest
    end.answer = answering({"exitcode": 3, "err-data": coded("no\n"), "out-data": coded("yes\n")})
    with pytest.raises(Failed, match=r"^first: status 3: no yes$"):
        agent.run("first\nsecond")
    end.answer = answering({"signal": 9})
    with pytest.raises(Failed, match="status signal 9"):
        agent.run("first")
    end.answer = lambda _request: {"error": {"desc": "disabled"}}
    with pytest.raises(Failed, match="guest-exec: disabled"):
        agent.run("first")


def test_what_the_agent_said_before_does_not_count(guest: tuple[Guest, Agent]) -> None:
    """An answer to an earlier question comes first, and half a line."""
    end, agent = guest
    end.before = b'{"return": 99}\n{"ret'
    end.answer = lambda request: {"return": request["arguments"]["id"]}
    assert agent.answers(60)


def test_a_guest_that_ends(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        agent = Agent(tmp_path / "agent")
        listener.accept()[0].close()
        with pytest.raises(Failed, match="the guest has ended"):
            agent.run("true")
        agent.close()


# --- what must be on the LUNs ------------------------------------------------------------------


def test_records() -> None:
    data = b"".join(map(record, range(5)))
    assert len(data) == 5 * BLOCK
    check_records("a", data, 4)
    check_records("a", data, -1)
    with pytest.raises(Failed, match="record 5 was flushed, and is not there"):
        check_records("a", data, 5)
    lost = data[:BLOCK] + bytes(BLOCK) + data[2 * BLOCK :]
    with pytest.raises(Failed, match="record 1 was flushed"):
        check_records("a", lost, 4)
    with pytest.raises(Failed, match="written before the shutdown"):
        check_digest("a", data, "0" * 64)


def test_a_ledger_counts_whole_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.last() == -1
    ledger.file.write_text("0\n1\n2")
    assert ledger.last() == 1


def test_a_damaged_file_system_is_noticed(tmp_path: Path) -> None:
    for program in ("mke2fs", "e2fsck", "debugfs"):
        need(program)
    tree, lun = tmp_path / "tree", tmp_path / "a.lun"
    tree.mkdir()
    (tree / "records").write_bytes(record(0))
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, lun, "8M"], check=True)
    assert content(whole_file_system(lun, tmp_path), "records") == record(0)
    assert content(whole_file_system(lun, tmp_path), "other") == b""
    with lun.open("r+b") as file:
        file.seek(1024 + 16)  # of the superblock: the number of free inodes
        file.write(b"\xff\0\0\0")
        file.seek(2 << 20)
        file.write(b"\xff" * (1 << 20))
    with pytest.raises(Failed, match="the file system is damaged"):
        whole_file_system(lun, tmp_path)


# --- what systemd and the kernel say -----------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "data.mount: Unmounting timed out. Terminating.",
        "luns.mount: Mount process still around after SIGKILL. Killing process 9 (umount)",
        "iserblk-attach@data.service: State 'stop-sigterm' timed out. Killing.",
        "records-files.service: Killing process 345 (python3) with signal SIGKILL.",
    ],
)
def test_what_systemd_gives_up(line: str) -> None:
    with pytest.raises(Failed, match="systemd has not waited"):
        need_patience(f"[  7.1] systemd[1]: Reached target\n[  7.2] systemd[1]: {line}\n")


def test_what_systemd_may_end() -> None:
    need_patience(
        "systemd[1]: data.mount: Deactivated successfully.\n"
        "systemd[1]: dev-vda.device: Job dev-vda.device/start timed out.\n"
        "systemd[1]: records-data.service: Failed with result 'exit-code'.\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (nbd0): Remounting filesystem read-only",
        "blk_update_request: I/O error, dev nbd0, sector 2 op 0x1:(WRITE)",
        "Aborting journal on device loop0-8.",
    ],
)
def test_what_harms_a_file_system(line: str) -> None:
    with pytest.raises(Failed, match="the kernel says"):
        need_no_damage(f"EXT4-fs (nbd0): mounted filesystem\n{line}\n")
    need_no_damage("block nbd0: Possible stuck request\n")


# --- the command -------------------------------------------------------------------------------


def boot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "bootlib", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
    )


def test_the_list_names_every_case() -> None:
    done = boot("--list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(CASES)


@pytest.mark.parametrize("arguments", [("--case", "never"), ("--release", "sid"), ("--so",)])
def test_wrong_arguments_do_nothing(arguments: tuple[str, ...]) -> None:
    done = boot(*arguments)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert line.startswith("boot: ") and arguments[0] in line


def test_a_report(tmp_path: Path) -> None:
    outcomes = [
        Outcome("mounted", "there", True, 2.5),
        Outcome("late", "it comes", False, 3.5, "not"),
    ]
    write_report(outcomes, tmp_path / "report")
    passed, failed = map(json.loads, (tmp_path / "report").read_text().splitlines())
    assert passed["passed"] and not failed["passed"]
    assert (failed["name"], failed["took_s"], failed["text"]) == ("late", 3.5, "not")
