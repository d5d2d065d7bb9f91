"""Sizes, tables and JSON as commands print them."""

from __future__ import annotations

import json

import pytest

from iserblk.cli.output import print_json, print_table, size_words, yes_no


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 54, "16384.0 TiB"),
    ],
)
def test_sizes(size: int, words: str) -> None:
    assert size_words(size) == words


def test_names_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("lun0", iter([("size", "1 GiB"), ("read-only", yes_no(False))]))
    assert capsys.readouterr().out == "lun0\n  size       1 GiB\n  read-only  no\n"


def test_json_is_for_scripts_and_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": "Größe", "luns": [1, None, True]}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert "Größe" in out and out.count("\n") > 3


def test_what_a_peer_says_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    said = "a\x1b[2J\x9bm\x7f\u202e\n\udc80\U000e0001"
    print_table(said, [(said, said)])
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and out.replace("\n", "").isprintable()
    print_json({"said": said})
    out = capsys.readouterr().out
    assert out.count("\n") == 3 and out.replace("\n", "").isprintable()
    assert json.loads(out)["said"] == said
