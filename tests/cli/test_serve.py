"""``iserblk serve``: a target that is made of files alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from iserblk.cli import serve
from iserblk.cli.main import cli
from iserblk.cli.serve import announce, name_for
from iserblk.names import check_name
from iserblk.target.config import TargetConfig
from iserblk.target.ports import Listen
from iserblk.url import parse_url
from tests.cli.commands import bad, good, good_json
from tests.cli.test_cli_background import in_background

MIB = 1 << 20


def test_a_file_is_served_and_its_url_can_be_pasted(tmp_path: Path) -> None:
    """Again under the same name: a client that waits for it finds it."""
    found = []
    for words in (("--size", "1M"), ()):
        with in_background("serve", tmp_path / "My Disk.img", *words, pidfile=tmp_path / "pid") as (
            lines,
            _,
        ):
            (url,) = lines
            place = parse_url(url)
            assert (place.host, place.lun) == ("127.0.0.1", 0)
            (disk,) = good_json("info", url)["disks"]
            assert disk["size"] == MIB
            assert place.iqn in good("discover", url)
            good("info", url.replace("iser://", "iscsi://"))
            found.append((place.iqn, disk["serial"]))
    assert found[0] == found[1]
    assert re.fullmatch(r"iqn\.2026-11\.io\.github\.iserblk:my-disk-[0-9a-f]{8}", found[0][0])


def test_several_files(tmp_path: Path) -> None:
    """One URL each, in their order. They may be larger than --size says, but not smaller."""
    names = ["one:ro", "two"]  # no option of ``--lun`` is in a name
    files = [tmp_path / name for name in names]
    with in_background("serve", *files, "--size", "1M", pidfile=tmp_path / "pid") as (lines, _):
        assert [parse_url(line).lun for line in lines] == [0, 1]
        assert [good_json("info", line)["disks"][0]["read_only"] for line in lines] == [False] * 2
    with in_background("serve", *files, "--read-only", pidfile=tmp_path / "pid") as (lines, _):
        assert [good_json("info", line)["disks"][0]["read_only"] for line in lines] == [True] * 2
        assert files[0].stat().st_size == MIB


def test_what_it_refuses(tmp_path: Path) -> None:
    """Each remedy names an option of this command."""
    path = tmp_path / "disk"
    assert bad(7, "serve", path) == f"iserblk: {path}: no such file; `--size 1G` creates it"
    assert not path.exists()
    line = bad(7, "serve", path, "--read-only", "--size", "1M")
    assert line.endswith("no such file; leave out `--read-only` to create it")
    assert "`--size frob`: write a number of bytes" in bad(7, "serve", path, "--size", "frob")
    path.write_bytes(bytes(2 * MIB))
    line = bad(7, "serve", path, "--size", "1M")
    assert "more than `--size 1048576`" in line and line.endswith("so leave out `--size`")
    path.write_bytes(bytes(1000))
    assert line_end(bad(7, "serve", path)) == "`--size 1024` enlarges it"
    line = bad(7, "serve", path, "--read-only")
    assert line_end(line) == f"`truncate -s 1024 {path}` enlarges it"
    assert "this is a directory" in bad(7, "serve", tmp_path)
    assert "`iserblk target --lun URL` serves" in bad(7, "serve", "iser://h/iqn.2026-11.example:a")
    assert "the name of a file is empty" in bad(7, "serve", "")
    assert "Missing argument 'FILE…'" in bad(7, "serve")
    assert "HOST:PORT" in bad(7, "serve", path, "--size", "1M", "--listen", "3260")
    with in_background("serve", path, "--size", "1M", pidfile=tmp_path / "pid") as (lines, _):
        line = bad(28, "serve", path)
        assert "another target serves it" in line and "with `--read-only` in both" in line
        listen = lines[0].split("/")[2]
        (tmp_path / "other").write_bytes(bytes(MIB))
        assert "the port is in use" in bad(28, "serve", tmp_path / "other", "--listen", listen)


def line_end(line: str) -> str:
    return line.rpartition("; ")[2]


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each set of files, and each machine, has a name of its own; whatever the files are called it
    is one of iSCSI's. LUNs of one target's name may be taken for the same LUN."""
    monkeypatch.chdir(tmp_path)
    found = [
        name_for(files)
        for files in (
            *(["a"], ["b"], ["a", "b"], ["b", "a"], ["/a"], [".a"], ["ä\udcff"], ["a" * 255]),
            *(["..img"], ["-"], ["/dev/sdb"], ["A B.C.img"]),
        )
    ]
    assert len({*found}) == len(found)
    for name in found:
        check_name(name, "")
        assert re.fullmatch(r"iqn\.2026-11\.io\.github\.iserblk:[a-z0-9][a-z0-9.-]{0,48}", name)
    assert [each.partition(":")[2][:-9] for each in found[-2:]] == ["sdb", "a-b.c"]
    assert name_for(["a"]) == name_for([str(tmp_path / "a")]) == found[0]
    monkeypatch.setattr(serve, "machine_id", lambda: "another machine")
    assert name_for(["a"]) != found[0]


def test_where_it_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the default port, or at another one while that is in use; nowhere but where it was told
    to."""
    seen: list[TargetConfig] = []
    monkeypatch.setattr(serve, "serve_config", lambda read, *_: seen.append(read()))
    for words in ([], ["--listen", "10.0.0.1:3260"]):
        # As below `iserblk`: click keeps the help option that it makes first.
        names = cli.context_settings["help_option_names"]
        arguments = [str(tmp_path / "a"), *words]
        done = CliRunner().invoke(serve.command, arguments, help_option_names=names)
        assert done.exit_code == 0
    assert [each.portals for each in seen] == [
        [Listen("127.0.0.1:3260", or_another=True)],
        [Listen("10.0.0.1:3260")],
    ]


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
def test_all_addresses(everywhere: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The URL has an address to which a client can connect."""
    announce(f"iser://{everywhere}:3260/iqn.2026-11.example:a", 2)
    urls = [parse_url(line) for line in capsys.readouterr().out.splitlines()]
    assert [(url.iqn, url.port, url.lun) for url in urls] == [
        ("iqn.2026-11.example:a", 3260, 0),
        ("iqn.2026-11.example:a", 3260, 1),
    ]
    assert not {url.host for url in urls} & {"0.0.0.0", "::"}
