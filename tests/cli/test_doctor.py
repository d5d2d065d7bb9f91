"""``iserblk doctor``: what it prints, and its exit status."""

from __future__ import annotations

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

from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk
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
    assert set(report["portal"]) == documented("`portal`")
    for finding in (*report["findings"], *report["portal"]["findings"]):
        assert set(finding) == documented("A finding")
        assert finding["status"] in ("ok", "warning", "error", "skipped")
        assert finding["status"] in ("ok", "skipped") or finding["remedy"]
    assert report["exit_status"] == 0
    assert report["portal"]["works"] is True
    assert report["portal"]["provider"] == "iwarp"
    assert good_json("doctor")["portal"] is None


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
    until_blocking(lambda: target.census() == before)


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
        (("a", "b"), 7, "unexpected extra argument"),
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
