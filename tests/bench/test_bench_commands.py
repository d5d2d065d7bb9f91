"""scripts/bench and scripts/peers as commands: bad arguments, and their parts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchlib import machine
from benchlib.__main__ import bench
from click.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "nothing/*"],
        ["--rows", "nbd/*", "--rows", "nothing/*"],
        ["--rounds", "0"],
        ["--starts", "0"],
        ["--warm-up", "-1"],
        ["--foo"],
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: list[str]) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2  # click's; run_command makes it 7
    assert "Error" in result.output


def test_list_prints_the_names_that_rows_takes() -> None:
    result = CliRunner().invoke(bench, ["--list", "--rows", "api/*"], standalone_mode=False)
    assert result.return_value == 0
    all_of_them = CliRunner().invoke(bench, ["--list"], standalone_mode=False).output.split()
    assert set(result.output.split()) < set(all_of_them)
    assert len(result.output.split()) == 24
    assert "api/4k-randread-d32/iscsi-perf" in result.output.split()


@pytest.mark.parametrize("arguments", [[], ["no-such-peer"], ["tgt", "qsd"]])
def test_peers_names_what_there_is(arguments: list[str]) -> None:
    done = subprocess.run([SCRIPTS / "peers", *arguments], capture_output=True, check=False)
    assert done.returncode == 7
    assert done.stdout == b""
    assert done.stderr.startswith(b"peers: ")


def test_machine_is_described_without_what_is_missing() -> None:
    assert machine.cpu_model("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n") == "A CPU @ 2 GHz"
    assert machine.cpu_model("") != ""
    assert machine.first_line(["no-such-program"]) is None
    assert machine.first_line(["false"]) is None
    assert machine.first_line(["printf", "one\ntwo\n"]) == "one"
