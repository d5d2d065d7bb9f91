"""The connection's options, in all the places where they are named."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from iserblk.cli.options import CONNECTION, USUAL, Size, connection, connection_options
from iserblk.options import OPTION_NAMES
from tests.support.target import ROOT

# Keys of libiscsi's URLs; the last could be secrets on a command line. isid: for one session.
URL_ONLY = {"isid", "auth", "header-digest", "data-digest", "target-user", "target-password"}


def test_every_option_of_a_url_is_one_of_commands() -> None:
    assert {name for name, _, _ in CONNECTION} == set(OPTION_NAMES) - URL_ONLY


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs/options.md").read_text()
    for name, _, words in CONNECTION:
        if words:
            assert f"| `{name}` |" in text, f"docs/options.md has no row for {name}"


def test_the_options_of_the_short_help_come_first() -> None:
    text = (ROOT / "docs/options.md").read_text()
    first = text.partition("## Options that people set\n")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `([a-z-]+)`", first, re.MULTILINE)) == USUAL


def test_only_what_was_given_is_handed_on() -> None:
    seen = {}

    @click.command()
    @connection_options
    def command(**options: str | None) -> None:
        seen.update(connection(options))

    arguments = ["--mpa-crc", "no", "--io-timeout", "5", "--chap-secret-fd", "7"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert seen == {"mpa-crc": "no", "io-timeout": "5", "chap-secret-fd": "7"}


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("4k", 4096), ("1M", 1 << 20), ("2G", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5", "four", "1Ki", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.UsageError):
        Size().convert(text, None, None)
