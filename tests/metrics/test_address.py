"""Where metrics are served, in all the ways to say it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, Busy
from iserblk.metrics import address
from iserblk.metrics.address import (
    MOST_LEFT,
    answers,
    default_option,
    directory,
    make_room,
    parse_address,
    place_of,
    served,
    socket_of,
    words,
)
from iserblk.options import Options


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("/run/some/socket", Path("/run/some/socket")),
        ("127.0.0.1:9100", ("127.0.0.1", 9100)),
        ("127.9.9.9:1", ("127.9.9.9", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("localhost:80", ("127.0.0.1", 80)),
    ],
)
def test_addresses(text: str, meant: address.Address) -> None:
    assert parse_address(text, "metrics") == meant
    assert Options.from_pairs([("metrics", text)]).metrics == text
    if not text.startswith("localhost"):
        assert words(meant) == text


@pytest.mark.parametrize("text", ["off", "no", "OFF"])
def test_off(text: str) -> None:
    assert Options.from_pairs([("metrics", text)]).metrics == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.0.0.0:9100", "loopback interface only"),
        ("192.168.1.1:9100", "loopback interface only"),
        ("[::]:9100", "loopback interface only"),
        ("example.com:9100", "loopback interface only"),
        (":9100", "loopback interface only"),
        ("127.0.0.1:0", "whole path"),
        ("127.0.0.1:65536", "whole path"),
        ("127.0.0.1:9100000000000000000000", "whole path"),
        ("127.0.0.1", "whole path"),
        ("127.0.0.1:²", "whole path"),
        ("relative/socket", "whole path"),
        ("9100", "whole path"),
        ("/" + "long/" * 22, "107 bytes"),
        ("/nul\0", "a path cannot contain a NUL"),
    ],
)
def test_no_addresses(text: str, said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        parse_address(text, "metrics")
    with pytest.raises(BadArgument, match="metrics"):
        Options.from_pairs([("metrics", text)])


@given(st.text())
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        parse_address(text, "metrics")
    except BadArgument as error:
        assert "\n" not in str(error)


# --- places --------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_a_place_is_found_again(place: str) -> None:
    path = socket_of(place, Path("/run/x"))
    assert path.parent == Path("/run/x")
    assert not set(path.name) & set("\\, /")
    assert place_of(path) == place or len(path.name) == 16 + len(".metrics")


def test_places_that_are_no_text() -> None:
    place = os.fsdecode(b"/mnt/\xff")
    assert place_of(socket_of(place, Path("/run/x"))) == place


def test_long_places_have_short_names() -> None:
    places = [f"/mnt/{'deep/' * 40}{end}" for end in "ab"]
    one, other = (socket_of(place, Path("/run/x")) for place in places)
    assert one != other
    assert len(str(one)) < 50


def test_the_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert directory() == Path("/run/user/7/iserblk")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert directory() is None
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert directory() is None
    assert default_option("/mnt") == {}
    assert served() == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert directory() == Path("/run/iserblk")


def test_the_default(tmp_path: Path) -> None:
    where = tmp_path / "run"
    option = default_option("/mnt/luns", where)
    assert option == {"metrics": str(where / "%2Fmnt%2Fluns.metrics")}
    assert stat.S_IMODE(where.stat().st_mode) == 0o755
    assert served(where) == []
    (where / "%2Fmnt%2Fluns.metrics").touch()
    (where / "nbd0.lock").touch()
    assert [place_of(path) for path in served(where)] == ["/mnt/luns"]


def test_no_default_is_no_reason_not_to_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert default_option("/mnt", tmp_path / "file") == {}
    assert default_option("/mnt", tmp_path / "missing" / "run") == {}
    assert default_option("/mnt", tmp_path / ("x" * 100)) == {}
    path = socket_of("/mnt", tmp_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert default_option("/mnt", tmp_path) == {}
    assert default_option("/mnt", tmp_path) == {"metrics": str(path)}


def test_no_default_in_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A unit with ProtectSystem=strict, for example, sees /run/iserblk so."""
    script = "import sys, pathlib, iserblk.metrics.address as address\n"
    script += "print(address.default_option('/mnt', pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    if os.geteuid() == 0:  # to whom modes say nothing
        if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
            pytest.skip("root has no right to mount here")
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), *command]
    else:
        tmp_path.chmod(0o500)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr


# --- sockets that are there already --------------------------------------------------------------


def test_room_where_nobody_listens_any_more(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    make_room(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        assert answers(path)
        # Its queue is full now: one that is too busy to answer is alive, too.
        with pytest.raises(Busy, match="already"):
            make_room(path)
    assert not answers(path)
    make_room(path)
    assert not path.exists()


def test_no_room(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadArgument, match="no socket"):
        make_room(tmp_path / "file")
    with pytest.raises(BadArgument, match="Not a directory"):
        make_room(tmp_path / "file" / "socket")
    assert (tmp_path / "file").exists()


def test_killed_processes_do_not_fill_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each at a place of its own. What can be cleaned up still is told of the longest; a process
    that serves is never forgotten."""
    run, mounted = tmp_path / "r", "/"  # its socket's whole path must not become too long
    run.mkdir()
    monkeypatch.chdir(run)
    places = [mounted, *(f"127.0.0.1:{port}" for port in range(20_000, 20_400))]
    with socket.socket(socket.AF_UNIX) as serving:
        for number, place in enumerate(places):
            path = socket_of(place, Path())
            with socket.socket(socket.AF_UNIX) as killed:
                server = serving if place == places[1] else killed
                server.bind(str(path))
                server.listen()
            os.utime(path, (number, number))
        assert default_option("/new", run)
    there = {place_of(path) for path in served(run)}
    assert there == {places[0], places[1], *places[-MOST_LEFT + 1 :]}
    assert default_option("/new", run)
    assert len(served(run)) == MOST_LEFT + 1
