"""The exporter's page: whole, escaped, and without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.cli.watch.history import History, Look, Seen, Silent, in_order
from iserblk.cli.watch.page import MOST_LUNS, POLICY, chosen_untrusted, id_of, page
from tests.support.watched import example, lun

_VOID = {"meta", "link", "rect", "br"}


class Parsed(HTMLParser):
    """``tags``: with their attributes; ``words``: by the tag that they are in. An end tag that
    does not fit fails."""

    def __init__(self, document: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(document.decode())
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(
            " ".join(words) for tag, words in self.words.items() if tag not in ("style", "script")
        )


@cache
def history() -> History:
    return example()


def query_of(where: str) -> bytes:
    (found,) = [each for each in history().luns.values() if each.seen.where == where]
    return f"lun={id_of(found.seen.key)}".encode()


PAGES = ["", "/dev/nbd0", "10.0.0.9:10809"]


def document(of: str) -> bytes:
    return page(history(), query_of(of) if of else b"", "storage1")


@pytest.mark.parametrize("of", PAGES)
def test_it_is_whole_and_needs_nothing_else(of: str) -> None:
    found = Parsed(document(of))
    assert document(of).startswith(b"<!doctype html>")
    for tag, attributes in found.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style", (tag, name)
            if name in ("src", "href", "action", "srcset", "xlink:href"):
                assert re.fullmatch(r"/|/metrics|/\?lun=[0-9a-f]{16}|data:,", value or ""), value
    assert not found.all_of("form") and not found.all_of("button") and not found.all_of("input")
    assert not re.search(rb"https?://|//[a-z]|@import|url\(", document(of))
    names = [each["id"] for _, each in found.tags if "id" in each]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("of", PAGES)
def test_the_policy_allows_what_is_there_and_no_more(of: str) -> None:
    found = Parsed(document(of))
    for tag in ("style", "script"):
        assert len(found.all_of(tag)) == len(found.words[tag]) == 1
        digest = hashlib.sha256(found.words[tag][0].encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in POLICY
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY and "*" not in POLICY
    assert "form-action 'none'" in POLICY and "frame-ancestors 'none'" in POLICY


def test_it_is_read_without_scripts() -> None:
    text = Parsed(document("")).text
    for words in ("/dev/nbd0", "not connected", "degraded", "killed", "connection lost",
                  "failed over to", "iqn.2026-11.example:array/0", "p99", "5m00s ago", "in use",
                  "iserblk: storage1"):  # fmt: skip
        assert words in text, words
    refresh = re.search(rb'<noscript><meta http-equiv="refresh" content="\d+"></noscript>',
                        document(""))  # fmt: skip
    assert refresh is not None


def test_the_page_of_one_lun() -> None:
    text = Parsed(document("/dev/nbd0")).text
    for words in ("read", "p99.9", "iser://10.0.1.1:3260 (iwarp)", "in use", "failed 2 times",
                  "failed over to", "32", "all LUNs", "attach 700"):  # fmt: skip
        assert words in text, words
    assert "/dev/nbd1" not in text


def test_phones_dark_pages_and_readers_are_thought_of() -> None:
    found = Parsed(document(""))
    (style,) = found.words["style"]
    assert "prefers-color-scheme:dark" in style and "max-width:700px" in style
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in (
        found.all_of("meta")
    )
    assert {each.get("lang") for each in found.all_of("html")} == {"en"}
    for each in found.all_of("svg"):
        assert each["role"] == "img" and each["aria-label"]
    names = {each["data-name"] for each in found.all_of("td")}
    assert {"Where", "State", "IOPS", "p99"} <= names


NAMES = ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a&b;", "'", "\x00\x1b", "\ud800",
         "</main></table>", "\u202eexe", "", "{}%s"]  # fmt: skip


def test_names_are_only_names() -> None:
    """Whatever peers and users choose."""
    odd = History()
    for at in (0.0, 1.0):
        seen = [
            Seen(name, "0", 1, at,
                 replace(lun(index, connected=not at), target=name, url=name, portal=name,
                         provider=name, name=name), name, name)
            for index, name in enumerate(NAMES)
        ]  # fmt: skip
        silent = [Silent("", f"{name}.", name) for name in NAMES]
        odd.add(Look(at, at, tuple(seen), tuple(silent), tuple(NAMES)))
    plain = {"code"} | {tag for tag, _ in Parsed(document("")).tags}  # of what is not all shown
    plain |= {tag for tag, _ in Parsed(document("/dev/nbd0")).tags}
    for each in in_order(odd, "where"):
        for query in (b"", f"lun={id_of(each.seen.key)}".encode()):
            made = page(odd, query, NAMES[0])
            found = Parsed(made)
            assert {tag for tag, _ in found.tags} <= plain
            assert len(found.all_of("script")) == 1 and len(found.all_of("main")) == 1
            assert b"\x1b" not in made and b"\0" not in made
            assert "<script>alert(1)</script>" in found.text


def test_many_luns_are_not_all_shown() -> None:
    many = History()
    seen = [Seen(f"/dev/nbd{number}", "0", 1, 0.0, lun(number)) for number in range(MOST_LUNS + 9)]
    many.add(Look(0.0, 0.0, tuple(seen)))
    made = page(many)
    found = Parsed(made)
    assert len(found.all_of("tr")) == MOST_LUNS + 1
    assert "And 9 more LUNs" in found.text and len(made) < 1 << 20


def test_nothing_is_in_use() -> None:
    empty = History()
    empty.add(Look(0.0, 0.0, silent=(Silent("0", "/dev/nbd3", "killed"),)))
    text = Parsed(page(empty)).text
    assert "No LUN is in use" in text and "/dev/nbd3" in text and "killed" in text


def test_a_lun_that_has_gone() -> None:
    text = Parsed(page(history(), b"lun=0123456789abcdef")).text
    assert "not in use any more" in text and "/dev/nbd0" in text


@given(st.binary(max_size=40))
def test_any_query_is_a_lun_or_none(query: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{16}|", chosen_untrusted(query))
    assert chosen_untrusted(b"lun=" + b"a" * 16) == "a" * 16
