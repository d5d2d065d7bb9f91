"""The page of HTML: what it has, that it needs nothing else, and that no name gets out of its
place."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from typing import Any

import pytest

from iserblk.doctor.page import page

USES = {"iwarp": "iSER over software iWARP", "verbs": "iSER over RDMA devices"}
FINDING = {"name": "TCP 10.0.0.1:3260", "status": "ok", "text": "takes connections", "remedy": "",
           "seconds": 0.0125}  # fmt: skip
BAD = {"name": "login", "status": "error", "text": "refused", "remedy": "ask", "seconds": 2.5}
PORTAL = {
    "address": "10.0.0.1:3260", "url": "iser://10.0.0.1:3260/iqn.2026-11.example:disk",
    "findings": [FINDING, BAD], "provider": "iwarp", "traditional": False, "works": False,
    "exit_status": 5,
}  # fmt: skip
USE = {
    "state": "not connected", "bad": True, "what": "attach", "where": "/dev/nbd0", "name": "disk",
    "url": "iser://h/iqn.x/0", "target": "iqn.x", "lun": 0, "size": 1 << 30,
    "unflushed_bytes": 4096, "since": 1795000000, "pid": 77, "uid": 0, "metrics": None,
    "session_count": 1, "sessions": [{"initiator": "iqn.a", "address": "10.0.0.9:1"}],
    "remedy": "look for the reason",
}  # fmt: skip
REPORT: dict[str, Any] = {
    "time": 1795000000, "user": "root", "findings": [{**FINDING, "name": "module nbd"}],
    "works": {"iwarp": True, "verbs": False}, "portal": PORTAL, "portals": [PORTAL],
    "exit_status": 5,
    "machine": {
        "host": "storage-1", "distribution": "Debian", "kernel": "6.1", "architecture": "x86_64",
        "processors": 2, "processor": "A", "memory": 1 << 30, "available": 1 << 29,
        "uptime": 3661, "container": "", "virtual": "QEMU", "rdma_devices": ["rxe0"],
    },
    "versions": [{"name": "iserblk", "version": "1.2"}, {"name": "nbdkit", "version": None},
                 {"name": "pyverbs", "version": ""}],
    "uses": [USE],
    "unseen": [{"user": "alice", "places": ["/dev/nbd3"], "why": "root can look"}],
    "named": [
        {"name": "disk", "file": "/f", "urls": ["iser://h/iqn.x/0"], "devices": ["/dev/nbd0"],
         "mountpoint": None, "options": ["io-timeout=9"], "users": [], "error": ""},
        {"name": "broken", "error": "it has no URL"},
    ],
    "environment": [{"name": "ISERBLK_PLAIN", "value": "1"}],
    "log": [{"time": 1795000000.5, "source": "iserblk-nbd0", "text": "reconnected"},
            {"time": 0, "source": "/var/log/syslog", "text": "an old line"}],
    "unread": [{"what": "/etc/iserblk/x.chap", "why": "Permission denied"}],
    "processes": [{"pid": 77, "user": "root", "command_line": ["iserblk", "attach"]}],
}  # fmt: skip
VOID = ("meta", "br")
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "id", "href", "class", "scope",
              "style"}  # fmt: skip


class Tree(HTMLParser):
    """Reads a page, and fails where it is not well-formed. ``elements``, ``attributes``: all that
    there are; ``text``: what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += f"{data} "


def test_all_of_the_report_is_on_the_page() -> None:
    text = Tree(page(REPORT, USES)).text
    for words in (
        "storage-1", "Debian", "6.1, x86_64", "1.0 GiB, 512.0 MiB available", "1 h 1 min", "rxe0",
        "iSER does not work towards", "12.5 ms", "2.50 s", "→ ask", "takes connections",
        "not connected", "/dev/nbd0", "look for the reason", "iqn.a", "4.0 KiB", "module nbd",
        "not installed", "the version is not known", "it has no URL", "io-timeout=9", "alice",
        "reconnected", "an old line", "Permission denied", "iserblk attach", "ISERBLK_PLAIN",
        "iSER over RDMA devices",
    ):  # fmt: skip
        assert words in text, words


def test_a_report_with_nothing_in_it() -> None:
    report = {**REPORT, "portals": [], "uses": [], "unseen": [], "named": [], "log": [],
              "processes": [], "environment": [], "unread": []}  # fmt: skip
    text = Tree(page(report, USES)).text
    for words in ("every check was good", "No portal was given", "Nothing of iserblk runs here"):
        assert words in text


def test_it_fetches_and_runs_nothing() -> None:
    """No script, no style or picture from elsewhere, no link that leads away."""
    text = page(REPORT, USES)
    tree = Tree(text)
    assert not tree.elements & {"script", "link", "img", "iframe", "form", "object", "embed", "a:"}
    assert {name for name, _ in tree.attributes} <= ATTRIBUTES
    assert {value[0] for name, value in tree.attributes if name == "href"} == {"#"}
    targets = {value for name, value in tree.attributes if name == "id"}
    assert {value[1:] for name, value in tree.attributes if name == "href"} == targets
    for word in ("url(", "@import", "http:", "https:", "expression("):
        assert word not in text
    assert "default-src 'none'" in text
    for word in ("prefers-color-scheme:dark", "@media print", "color-scheme:light dark"):
        assert word in text


HOSTILE = ["<script>alert(1)</script>", '"><b onclick=x>', "'&amp;</td></table>", "\x1b[2J\u202e"]


def poisoned(value: Any, text: str) -> Any:
    """The report with ``text`` in place of every text that is not one of ours."""
    if isinstance(value, dict):
        return {key: each if key in ("status", "provider") else poisoned(each, text)
                for key, each in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [poisoned(each, text) for each in value]
    return text if isinstance(value, str) and value else value


@pytest.mark.parametrize("text", HOSTILE)
def test_every_name_is_escaped(text: str) -> None:
    good = Tree(page(REPORT, USES))
    report = poisoned(copy.deepcopy(REPORT), text)
    made = page(report, USES)
    tree = Tree(made)
    assert tree.elements <= good.elements
    assert {name for name, _ in tree.attributes} <= ATTRIBUTES
    assert "\x1b" not in made and "\u202e" not in made
    if text.isprintable():
        assert tree.text.count(text) > 30
