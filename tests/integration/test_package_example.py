"""The example in the docstring of the package, as a user would type it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import iserblk
from tests.support.target import running_target


def test_the_example_for_threads(tmp_path: Path) -> None:
    assert iserblk.__doc__ is not None
    _, with_, rest = iserblk.__doc__.partition("    with ")
    example = textwrap.dedent(with_ + rest.partition("    async with ")[0])
    with running_target([f"{tmp_path}/disk:size=1M"], tmp_path / "log") as target:
        url = "iser://192.0.2.1/iqn.2026-11.example:disk/0"
        assert example.count(url) == 1
        exec("import iserblk\n" + example.replace(url, f"{target.url}/0"), {})
    assert (tmp_path / "disk").read_bytes()[:512] == b"data" * 128
