"""Names on a command line become URLs, with the options of their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, WriteProtected
from iserblk.named.files import Named, save
from iserblk.named.resolving import names_lun, resolve, urls_of

URL = "iser://host/iqn.2026-11.example:disk/0"
TCP = "iscsi://host/iqn.2026-11.example:disk/0"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path))
    return tmp_path


def put(*urls: str, options: str = "", name: str = "disk") -> None:
    save(Named(name, urls, words=tuple(options.split(",")) if options else ()))


def test_urls_and_names() -> None:
    put(URL, TCP)
    put(f"{URL}1", name="other", options="journal=off")
    assert urls_of([f"{URL}2", "disk", "other"], {}) == [f"{URL}2", URL, TCP, f"{URL}1?journal=off"]


@pytest.mark.parametrize("text", ["", "a/b", "user%hush@host", "/dev/nbd0", "nbd0"])
def test_what_has_neither_form_is_left_to_the_parser_of_urls(text: str) -> None:
    assert urls_of([text], {}) == [text]


def test_neither_a_name_nor_a_url() -> None:
    with pytest.raises(
        BadArgument, match=r"disk: not a URL: .* no LUN of that name: `iserblk list"
    ):
        urls_of(["disk"], {})
    assert not names_lun("disk") and not names_lun("a/b") and not names_lun("nbd0")


@pytest.mark.parametrize(
    ("url", "options", "given", "query"),
    [
        (URL, "io-timeout=60", {}, "?io-timeout=60"),
        (URL, "io_timeout=60,shared=yes", {}, "?io-timeout=60&shared=yes"),
        (f"{URL}?journal=off", "io-timeout=60", {}, "?journal=off&io-timeout=60"),
        (f"{URL}?io_timeout=5", "io-timeout=60", {}, "?io_timeout=5"),
        (URL, "io-timeout=60", {"io-timeout": "5"}, ""),
        (URL, "chap-secret-file=/a", {}, "?chap-secret-file=/a"),
        (URL, "chap-secret-file=/a", {"chap-secret-fd": "3"}, ""),
        (f"{URL}?chap-secret-credential=c", "chap-secret-file=/a", {}, "?chap-secret-credential=c"),
        (TCP, "header-digest=crc32c", {}, "?header-digest=crc32c"),
        (URL, "rcap=iwarp", {}, "?rcap=iwarp"),
    ],
)
def test_the_command_overrides_the_file_and_the_url_overrides_both(
    url: str, options: str, given: dict[str, str], query: str
) -> None:
    put(url, options=options)
    assert urls_of(["disk"], given) == [url.partition("?")[0] + query]


def test_a_secret_in_the_url_excludes_the_file_of_one() -> None:
    url = "iser://user%hush@host/iqn.2026-11.example:disk"
    put(url, options="chap-secret-file=/a")
    assert urls_of(["disk"], {}) == [url]


def test_options_of_one_scheme_are_for_its_urls() -> None:
    put(URL, TCP, options="rcap=iwarp,header-digest=crc32c,io-timeout=9")
    assert urls_of(["disk"], {}) == [
        f"{URL}?rcap=iwarp&io-timeout=9",
        f"{TCP}?header-digest=crc32c&io-timeout=9",
    ]


def test_words_of_mount(directory: Path) -> None:
    path = directory / "disk.conf"
    path.write_text(f"URL={URL}\nOPTIONS='ro,uid=5,metrics=/a\\,b'\n")
    path.chmod(0o600)
    resolved = resolve(["disk"], {})
    assert resolved.words == ["ro", "uid=5"]
    assert resolved.urls == [f"{URL}?metrics=/a,b"]
    assert resolved.read_only
    assert urls_of(["disk"], {})
    with pytest.raises(WriteProtected, match="option ro"):
        urls_of(["disk"], {}, to_write=True)
    put(URL, options="ro,rw", name="other")
    assert urls_of(["other"], {}, to_write=True)


def test_errors_name_the_file(directory: Path) -> None:
    path = directory / "disk.conf"
    for text, words in (
        (f"URL={URL}\nOPTIONS=metrics=/a&b", "option metrics has an &"),
        ("URL=iser://host", "names no target"),
        ("URL=disk", "it has no scheme"),
    ):
        path.write_text(text)
        with pytest.raises(BadArgument, match=f"{path}: .*{words}"):
            urls_of(["disk"], {})
    os.unlink(path)
