"""Servers: waiting for them, reasons when they fail, and nothing left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from benchlib import proc, servers
from benchlib.servers import Absent, Server


def said(server: Server, word: str) -> bool:
    return word in server.said()


def test_ready_server_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 0.3)
    program = "sleep 60 & sleep 60 & echo ready; wait"
    with Server("shell", ["sh", "-c", program], tmp_path) as server:
        assert server.wait_until(lambda: said(server, "ready"))
        family = server.pids
        assert len(family) == 3
        assert server.processes("shell") == {"shell": family}
        server.starter = "starter"
        assert server.processes("shell") == {"starter": family[:1], "shell": family[1:]}
    assert not server.running()
    assert not [pid for pid in family if proc.lives_in(family[0], pid)]


def test_children_that_ignore_the_signal_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 0.3)
    program = "trap '' TERM; (echo ready; sleep 60; sleep 60) & wait; wait"
    with Server("shell", ["sh", "-c", program], tmp_path) as server:
        server.wait_until(lambda: said(server, "ready"))
        family = server.pids
    assert not server.running()
    assert not [pid for pid in family if proc.lives_in(family[0], pid)]


def test_server_that_dies_is_quoted(tmp_path: Path) -> None:
    program = "echo starting; echo address in use >&2; echo; exit 4"
    with (
        Server("shell", ["sh", "-c", program], tmp_path) as server,
        pytest.raises(Absent, match=r"^shell ended with status 4: address in use$"),
    ):
        server.wait_until(lambda: None)


def test_server_that_is_never_ready_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "start_timeout_s", 0.1)
    with (
        Server("shell", ["sleep", "60"], tmp_path) as server,
        pytest.raises(Absent, match=r"shell was not ready after .* it said nothing"),
    ):
        server.wait_until(lambda: None)


def test_program_that_is_missing_is_named(tmp_path: Path) -> None:
    with (
        Server("peer", ["no-such-program"], tmp_path) as server,
        pytest.raises(Absent, match="no-such-program"),
    ):
        server.wait_until(lambda: None)


def test_second_server_of_a_name_does_not_speak_for_the_first(tmp_path: Path) -> None:
    for word in ("first", "second"):
        with Server("shell", ["sh", "-c", f"echo {word}; exec sleep 60"], tmp_path) as server:
            server.wait_until(lambda server=server, word=word: said(server, word))  # type: ignore[misc]
            assert server.last_words() == word


def test_stop_signal_is_the_servers_own(tmp_path: Path) -> None:
    program = "trap 'echo bye; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    command = ["bash", "-c", program]
    with Server("shell", command, tmp_path, stop_signal=signal.SIGINT) as server:
        server.wait_until(lambda: said(server, "ready"))
    assert server.last_words() == "bye"


def test_run_returns_output_or_says_why_not() -> None:
    assert servers.run("echo", ["echo", "hello"]) == "hello\n"
    assert servers.run("sh", ["sh", "-c", "echo $WORD"], {"WORD": "seen"}) == "seen\n"
    with pytest.raises(Absent, match="tool ended with status 2: broken"):
        servers.run("tool", ["sh", "-c", "echo fine; echo broken >&2; exit 2"])
    with pytest.raises(Absent, match="tool: no-such-program is not installed"):
        servers.run("tool", ["no-such-program"])
