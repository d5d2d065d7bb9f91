"""What of iserblk runs here: processes that answer, those that do not, and what is not seen."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from iserblk.cli import here
from iserblk.cli.here import (
    Here,
    NamedLun,
    Unseen,
    Use,
    all_named,
    look_around,
    lun_name,
    luns_of,
    uses_of,
)
from iserblk.cli.states import AWAY, CONNECTED, DEGRADED, KILLED, RUNNING, SERVING, SILENT, WRONG
from iserblk.metrics import records
from iserblk.metrics.address import socket_of
from iserblk.metrics.process import read_process
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.records import Recorded, RecordedLun
from iserblk.metrics.serving import Listener, serve
from iserblk.metrics.target_reading import SessionReading, TargetReading
from iserblk.named.files import Named
from iserblk.nbd.kernel.device import Directories
from tests.cli.test_stats_rows import reading

IQN = "iqn.2026-11.example:disk"
URL = f"iser://host/{IQN}/0"
UID = str(os.geteuid())


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path, for names of sockets."""
    with tempfile.TemporaryDirectory(prefix="iserblk.") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of this machine that has sockets or records."""
    path = tmp_path / "iserblk"
    path.mkdir()
    monkeypatch.setattr(here, "directories", lambda: [path])
    monkeypatch.setattr(here, "directory", lambda: path)
    monkeypatch.setattr(here, "of_others", list)
    monkeypatch.setattr(here, "ANSWER_S", 60.0)
    monkeypatch.setattr(here, "DIRECTORIES", Directories(sys=tmp_path / "sys"))
    monkeypatch.setattr(records, "directories", lambda: [path])
    monkeypatch.setattr(records, "directory", lambda: path)
    monkeypatch.setattr(records, "of_others", list)
    return path


@pytest.fixture
def answering(directory: Path) -> Iterator[Callable[[str, ProcessReading], Path]]:
    """Begins to answer at a place, in a thread."""
    tokens: list[trio.lowlevel.TrioToken] = []
    scopes: list[trio.CancelScope] = []
    threads: list[threading.Thread] = []

    async def body(listener: Listener, told: ProcessReading, ready: threading.Event) -> None:
        with trio.CancelScope() as scope:
            tokens.append(trio.lowlevel.current_trio_token())
            scopes.append(scope)
            ready.set()
            await serve(listener, lambda: told)

    def begin(place: str, told: ProcessReading) -> Path:
        ready = threading.Event()
        path = socket_of(place, directory)
        threads.append(threading.Thread(target=trio.run, args=(body, Listener(path), told, ready)))
        threads[-1].start()
        ready.wait()
        return path

    yield begin
    for token, scope in zip(tokens, scopes, strict=True):
        token.run_sync_soon(scope.cancel)
    for thread in threads:
        thread.join()


def test_a_lun_in_use(answering: Callable[[str, ProcessReading], Path]) -> None:
    luns = (reading(unflushed=512), reading(lun=1, connected=False), reading(lun=2, wanted=2))
    path = answering("/mnt/a", ProcessReading(7, "1", luns, (), "mount", 1234))
    found = look_around()
    assert [each.state for each in found.uses] == [CONNECTED, AWAY, DEGRADED]
    assert [each.bad for each in found.uses] == [False, True, True]
    assert found.unseen == []
    assert found.uses[0] == Use(
        CONNECTED, "mount", "/mnt/a", "iqn.x", 0, "iser://host/iqn.x/0", 1 << 20, 512, 1234, 7,
        UID, str(path), "host:3260",
    )  # fmt: skip
    (answer,) = found.answers
    assert answer.reading is not None and answer.reading.luns == luns


def test_a_target_with_its_sessions(answering: Callable[[str, ProcessReading], Path]) -> None:
    sessions = (SessionReading("iqn.h", "10.0.0.1"),)
    target = TargetReading(IQN, f"iser://h:3260/{IQN}", sessions=2, named_sessions=sessions)
    answering(IQN, ProcessReading(7, "1", (), (target,), "gateway", 1234))
    (use,) = look_around(sessions=True).uses
    assert (use.state, use.what, use.where, use.target) == (SERVING, "gateway", "h:3260", IQN)
    assert (use.session_count, use.sessions, use.lun) == (2, sessions, None)
    (use,) = look_around().uses
    assert use.sessions == ()


def test_a_process_of_an_older_version(
    answering: Callable[[str, ProcessReading], Path], tmp_path: Path
) -> None:
    """It does not say what it is, nor since when: its socket does."""
    target = ProcessReading(7, "1", (), (TargetReading(IQN, f"iser://h/{IQN}"),))
    paths = [answering(IQN, target)]
    for place in ("/dev/nbd3", str(tmp_path), "127.0.0.1:10809", str(tmp_path / "socket")):
        paths.append(answering(place, ProcessReading(7, "1", (reading(),))))
    whats = {use.metrics: use.what for use in look_around().uses}
    assert [whats[str(path)] for path in paths] == ["target", "attach", "mount", "nbd", "nbd"]
    for use in look_around().uses:
        assert use.since == int(os.stat(use.metrics).st_mtime)


def test_a_process_that_was_killed(directory: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_of(str(tmp_path), directory)))
        (use,) = look_around().uses
    assert (use.where, use.state, use.what) == (str(tmp_path), KILLED, "mount")
    assert use.bad


def test_a_process_that_does_not_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_of("/s", directory)))
        silent.listen()
        (use,) = look_around().uses
    assert (use.where, use.state, use.what, use.bad) == ("/s", SILENT, "nbd", True)


def test_a_process_that_hangs_makes_only_the_first_look_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_of("/s", directory)))
        silent.listen()
        before = look_around()
        monkeypatch.setattr(here, "ANSWER_S", 3600.0)
        monkeypatch.setattr(here, "AGAIN_S", 0.05)
        (use,) = look_around(before=before).uses
    assert (use.where, use.state) == ("/s", SILENT)


@pytest.mark.parametrize("place", ["/mnt/a", "/mnt/" + "long" * 30])
def test_a_process_that_hangs_is_told_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """With what its record tells; that of another process is told beside it."""
    monkeypatch.setattr(here, "ANSWER_S", 0.1)
    with (
        Recorded("mount", place) as recorded,
        socket.socket(socket.AF_UNIX) as hangs,
    ):
        recorded.use([RecordedLun(URL, 4096, True)])
        hangs.bind(str(socket_of(place, directory)))
        hangs.listen()
        (use,) = look_around().uses
        assert (use.state, use.what, use.where, use.lun) == (SILENT, "mount", place, 0)
        assert (use.pid, use.size, use.url) == (os.getpid(), 4096, URL)
    with Recorded("nbd", "/run/other"), socket.socket(socket.AF_UNIX) as hangs:
        socket_of(place, directory).unlink()
        hangs.bind(str(socket_of(place, directory)))
        hangs.listen()
        found = {(use.state, use.where) for use in look_around().uses}
        assert len(found) == 2 and (RUNNING, "/run/other") in found


def test_another_program_answers(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as wrong:
        wrong.bind(str(socket_of("127.0.0.1:1", directory)))
        wrong.listen()

        def answer() -> None:
            client, _ = wrong.accept()
            with client:
                client.recv(4096)
                client.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (use,) = look_around().uses
        thread.join()
    assert (use.where, use.state, use.what, use.bad) == ("127.0.0.1:1", WRONG, "nbd", True)


def test_a_record_without_metrics(answering: Callable[[str, ProcessReading], Path]) -> None:
    """Of a process that serves none; one that does is there once, at the place of its record."""
    with Recorded("copy") as recorded:
        recorded.use([RecordedLun(URL, 4096, True)])
        (use,) = look_around().uses
        assert (use.state, use.what, use.where) == (RUNNING, "copy", "")
        assert (use.target, use.lun, use.size, use.pid) == (IQN, 0, 4096, os.getpid())
        assert not use.bad
    with Recorded("target", IQN):
        assert [use.target for use in look_around().uses] == [IQN]
    with Recorded("nbd", "/a/long/path"):
        answering("hash", read_process([reading()]))
        (use,) = look_around().uses
        assert (use.state, use.where) == (CONNECTED, "/a/long/path")


# --- what is not seen ----------------------------------------------------------------------------


def test_what_other_users_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    theirs, hidden, empty = (tmp_path / name for name in ("theirs", "hidden", "empty"))
    for each in (theirs, hidden, empty):
        each.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(socket_of("/dev/nbd0", theirs)))
    monkeypatch.setattr(here, "of_others", lambda: [theirs, hidden, empty, tmp_path / "gone"])
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        if path == hidden:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    me = here.user_name(UID)
    monkeypatch.setattr(here, "user_name", lambda uid: f"user {uid}")
    (unseen,) = look_around().unseen
    assert unseen == Unseen(f"user {UID}", ("/dev/nbd0",), unseen.why)
    assert "root can look" in unseen.why and me


def test_without_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "directory", lambda: None)
    (unseen,) = look_around().unseen
    assert unseen.words.startswith("XDG_RUNTIME_DIR is not set")


def test_many_places_are_not_all_named() -> None:
    words = Unseen("root", tuple(f"/p{number}" for number in range(20)), "why").words
    assert words == "root: " + ", ".join(f"/p{number}" for number in range(8)) + ", 12 more: why"


def test_users() -> None:
    assert here.user_name("0") == "root"
    assert here.user_name("4000000000") == "user 4000000000"
    assert here.user_name("") == "user "


# --- by name -------------------------------------------------------------------------------------


def test_the_luns_of_a_name() -> None:
    named = Named("db", (URL, f"iscsi://other:3261/{IQN}?io-timeout=5", "nonsense"))
    assert luns_of(named) == [
        NamedLun("db", IQN, 0, "host:3260"), NamedLun("db", IQN, None, "other:3261"),
    ]  # fmt: skip


def test_what_a_name_means() -> None:
    at = f"iser://host:3260/{IQN}/7"
    whole = NamedLun("all", IQN, None, "host:3260")
    assert whole.has(IQN.upper(), 7, at)
    assert not whole.has(IQN, None, at) and not whole.has("iqn.x", 7, at)
    assert not NamedLun("db", IQN, 0, "host:3260").has(IQN, 1, at)
    other = f"iser://other:3260/{IQN}/7"  # another target may have the name there
    assert not whole.has(IQN, 7, other) and whole.has(IQN, 7, other, "host:3260")


def test_what_uses_a_name_and_what_it_is_called() -> None:
    one = Use(CONNECTED, "mount", "/mnt", IQN, 0, f"iser://host:3260/{IQN}/0")
    other = Use(CONNECTED, "nbd", "/s", IQN, 1, f"iser://host:3260/{IQN}/1")
    target = Use(SERVING, "target", "h:3260", IQN)
    found = Here(uses=[one, other, target])
    db, whole = NamedLun("db", IQN, 0, "host:3260"), NamedLun("all", IQN, None, "host:3260")
    assert uses_of([db], found) == [one]
    assert uses_of([whole], found) == [one, other]
    assert [lun_name(each, [db]) for each in found.uses] == ["db", f"{IQN}/1", IQN]
    assert lun_name(other, [whole]) == "all/1"


def test_all_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path / "named"))
    assert all_named() == []
    (tmp_path / "named").mkdir()
    for name, text in (("db", f"URL={URL}\n"), ("wrong", "nonsense")):
        path = tmp_path / "named" / f"{name}.conf"
        path.write_text(text)
        path.chmod(stat.S_IRUSR)
    assert all_named() == [NamedLun("db", IQN, 0, "host:3260")]
