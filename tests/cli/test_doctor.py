"""``iserblk doctor``: what it prints, and its exit status."""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.cli.doctor import check_file, write_report
from iserblk.errors import IserblkError, PermissionDenied
from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk
from tests.support.census import nothing_new
from tests.support.target import END_S, IQN, ROOT, TargetProcess, running_target
from tests.support.until import until_blocking

NOBODY = 65534
JSON_DOCUMENT = (ROOT / "docs/json.md").read_text()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("doctor")
    with running_target([f"{place}/disk:size=1M"], place / "log") as process:
        yield process


def documented(title: str) -> set[str]:
    """The field names in the table below ``title``."""
    section = JSON_DOCUMENT.partition("## iserblk doctor\n")[2].partition("\n## ")[0]
    rows = section.partition(f"{title}:\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def sick(status: int, *arguments: object) -> str:
    """Run ``doctor``, which must end with ``status`` and nothing on stderr; its findings."""
    done = iserblk("doctor", *arguments)
    assert (done.returncode, done.stderr) == (status, ""), done
    return done.stdout


def test_this_machine() -> None:
    text = good("doctor")
    assert text.startswith("This machine\n")
    assert "  yes      iSER over software iWARP\n" in text
    assert "Portal" not in text


def test_json_is_as_documented(target: TargetProcess) -> None:
    report = good_json("doctor", target.url)
    assert set(report) == documented("One object")
    assert set(report["works"]) == documented("`works`")
    assert set(report["machine"]) == documented("`machine`")
    assert set(report["portal"]) == documented("Each of `portals`, and `portal`")
    assert report["portals"] == [report["portal"]]
    for finding in (*report["findings"], *report["portal"]["findings"]):
        assert set(finding) == documented("A finding")
        assert finding["status"] in ("ok", "warning", "error", "skipped")
        assert finding["status"] in ("ok", "skipped") or finding["remedy"]
    small = documented("Each of `versions`, `environment`, `log`, `unread` and `processes`")
    for name in ("versions", "environment", "log", "unread", "processes"):
        for each in report[name]:
            assert set(each) <= small
    assert report["exit_status"] == 0
    assert report["portal"]["works"] is True
    assert report["portal"]["provider"] == "iwarp"
    empty = good_json("doctor")
    assert (empty["portal"], empty["portals"]) == (None, [])
    assert set(empty) == set(report)


def test_several_portals(target: TargetProcess) -> None:
    """Each is tried; the first that does not work decides about the exit status."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{reserved.getsockname()[1]}"
        text = sick(4, target.url, closed, target.listen)
        report = json.loads(sick(4, target.url, closed, "--json"))
    good, bad, again = text.splitlines()[-3:]
    assert good == again == f"iSER works towards {target.listen}"
    assert bad == f"iSER does not work towards {closed}"
    assert [each["address"] for each in report["portals"]] == [target.listen, closed]
    assert [each["exit_status"] for each in report["portals"]] == [0, 4]


# --- the report as a page ------------------------------------------------------------------------


def test_a_report_is_written_whole_and_private(target: TargetProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("an old one, which others may read")
    file.chmod(0o644)
    text = good("doctor", target.url, "--html", file)
    assert text.splitlines()[-1] == f"the report is in {file}: read it before you give it away"
    assert text.splitlines()[-2] == f"iSER works towards {target.listen}"
    assert file.stat().st_mode & 0o7777 == 0o600
    page = file.read_text()
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert target.listen in page and "REPORT LUNS" in page
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_with_a_bad_verdict_is_written_too(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{reserved.getsockname()[1]}"
        sick(4, closed, "--html", tmp_path / "report.html")
        page = sick(4, closed, "--html", "-")
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    for text in (page, (tmp_path / "report.html").read_text()):
        assert "does not work towards" in text and "start the target" in text


def test_json_beside_a_page(tmp_path: Path) -> None:
    report = good_json("doctor", "--html", tmp_path / "report.html")
    assert report["portal"] is None and (tmp_path / "report.html").exists()


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "device", "socket"])
def test_only_a_regular_file_is_replaced(kind: str, tmp_path: Path) -> None:
    """And that is known before a portal is asked."""
    file, victim = tmp_path / "report", tmp_path / "victim"
    victim.write_text("precious")
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "directory":
            file.mkdir()
        elif kind == "link":
            file.symlink_to(victim)
        elif kind == "fifo":
            os.mkfifo(file)
        elif kind == "socket":
            server.bind(os.path.relpath(file))
        else:
            file = Path("/dev/null")
        line = bad(7, "doctor", "no.such.host.invalid", "--html", file)
    assert f"--html {file}: not a regular file; name another" in line
    assert victim.read_text() == "precious"
    assert kind == "device" or sorted(tmp_path.iterdir()) == [file, victim]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--html", ""), "--html needs the name of a FILE, or -"),
        (("--html", "-", "--json"), "give --html a FILE"),
        (("--html", "/no/such/place/report"), "there is no directory /no/such/place; make it"),
        (("--html", "/etc/passwd/report"), "--html /etc/passwd/report: Not a directory; name"),
        (("--html", "iser://u%hush@h/iqn.2026-11.example:a"), "needs a FILE in front of the URL"),
        (("--html",), "requires an argument"),
    ],
)
def test_where_no_report_can_be_written(arguments: tuple[str, ...], words: str) -> None:
    line = bad(7, "doctor", *arguments)
    assert words in line and "hush" not in line


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the report, or the old one."""
    file = tmp_path / "report"
    file.write_text("the old one")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IserblkError, match="not written: No space left on device"):
        write_report(str(file), "text")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["the old one"]


def test_a_directory_that_this_user_may_not_write_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda name, mode: False)
    with pytest.raises(PermissionDenied, match="you may not write into "):
        check_file(str(tmp_path / "report"))


@pytest.mark.parametrize("kind", ["portal", "url", "lun"])
def test_a_good_target(kind: str, target: TargetProcess) -> None:
    where = {"portal": target.listen, "url": target.url, "lun": f"{target.url}/0"}[kind]
    text = good("doctor", where)
    assert text.endswith(f"iSER works towards {target.listen}\n")
    assert re.search(r"ok +login +accepted", text)


@pytest.mark.parametrize("iqn", [f"/{IQN}", ""])
def test_traditional_iscsi(iqn: str, target: TargetProcess) -> None:
    text = good("doctor", f"iscsi://{target.listen}{iqn}")
    assert text.endswith(f"Traditional iSCSI works towards {target.listen}\n")
    report = good_json("doctor", f"iscsi://{target.listen}{iqn}")
    assert (report["portal"]["provider"], report["portal"]["works"]) == ("tcp", True)


def test_traditional_iscsi_without_a_target() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        text = sick(4, f"iscsi://127.0.0.1:{reserved.getsockname()[1]}")
    assert "Traditional iSCSI does not work towards" in text


def test_it_leaves_no_session_behind(target: TargetProcess) -> None:
    good("doctor", target.url)  # what the target makes once exists now
    before = target.census()
    for _ in range(3):
        good("doctor", target.url)
    until_blocking(lambda: nothing_new(target.census(), before))


def test_no_such_target(target: TargetProcess) -> None:
    url = target.url.replace(IQN, "iqn.2026-11.example:other")
    text = sick(21, url)
    assert "error" in text and "correct the target's name" in text
    assert text.endswith(f"iSER does not work towards {target.listen}\n")
    report = json.loads(sick(21, url, "--json"))
    assert (report["exit_status"], report["portal"]["works"]) == (21, False)


def test_a_closed_port() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        text = sick(4, f"127.0.0.1:{reserved.getsockname()[1]}")
    assert "Connection refused" in text and "→ start the target" in text


@pytest.mark.long  # tests/doctor/test_portal.py has it, with shorter limits
def test_a_port_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        text = sick(8, f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - began < END_S
    assert "no MPA Reply within 5 s" in text


@pytest.mark.long  # as well
def test_a_web_server() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = iserblk("doctor", f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    # The server waits for the end of a line, or finds one in the request and complains.
    assert done.returncode in (4, 8)
    assert "correct the port: a web server answers there" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("host:99999",), 7, "port"),
        (("ho st",), 7, "host"),
        (("host/lun",), 7, "HOST[:PORT]"),
        (("user%hush@host",), 7, "HOST[:PORT]"),
        (("isns://host",), 7, "discover asks servers and agents"),
        (("slp://",), 7, "discover asks servers and agents"),
        (("iscsi://host", "--rcap", "iwarp"), 27, "means TCP"),
        (("host", "--rcap", "tcp"), 7, "auto, verbs, iwarp or iwarp-sctp"),
        (("host", "--queue-depth", "0"), 7, "queue-depth"),
        (("host", "ho st"), 7, "host"),
        (("iser://user@host/iqn.2026-11.example:a?target_password=hush",), 7, "without a secret"),
    ],
)
def test_refusals(arguments: tuple[str, ...], status: int, words: str) -> None:
    line = bad(status, "doctor", *arguments)
    assert words in line
    assert "hush" not in line


def test_no_such_host() -> None:
    text = sick(23, "no.such.host.invalid")
    assert "cannot resolve no.such.host.invalid" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_as_somebody_else(target: TargetProcess, tmp_path: Path) -> None:
    try:
        done = subprocess.run(
            [*COMMAND, "doctor", target.url, "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=environment(HOME=str(tmp_path)),
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            timeout=END_S,
        )
    except PermissionError:
        pytest.skip("others cannot run this checkout's interpreter")
    if "Permission denied" in done.stderr:
        pytest.skip("others cannot read this checkout")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["works"]["iwarp"] is True
