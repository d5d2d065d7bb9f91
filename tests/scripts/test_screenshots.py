"""scripts/screenshots: the pictures of the documents, and how they are made."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from screenshotlib.__main__ import MOST_BYTES, PICTURES, PICTURES_OF
from screenshotlib.png import reduced, size_of
from screenshotlib.terminal import drawn

from tests.support.nbdkit import need
from tests.support.target import ROOT
from tests.support.until import until_blocking

SVG = "{http://www.w3.org/2000/svg}"
END_S = 500


def script(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "screenshotlib", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=END_S,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", **changes},
    )


# --- the pictures that there are -----------------------------------------------------------------


def there() -> list[Path]:
    return [path for name in PICTURES_OF if (path := PICTURES / name).exists()]


def test_pictures_are_in_the_documents_and_small() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert {"status.svg", "top.svg", "doctor.png"} <= {path.name for path in there()}
    for path in there():
        assert f"pictures/{path.name})" in text, path.name
        assert path.stat().st_size <= MOST_BYTES


def test_pictures_of_terminals_need_nothing_else() -> None:
    for path in there():
        if path.suffix == ".svg":
            text = path.read_text(encoding="utf-8")
            assert ElementTree.fromstring(text).tag == f"{SVG}svg"
            addresses = set(re.findall(r"https?://[\w.]+", text))
            assert addresses <= {"http://www.w3.org"}
            assert "@font-face" not in text and "<script" not in text


def test_the_list() -> None:
    done = script("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(PICTURES_OF)


# --- making them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "other.svg"), "is not one of"),
        (("--seconds", "-1"), "-1"),
        (("--output", "/no/such/place"), "there is no such directory"),
        (("more",), "unexpected extra argument"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    done = script(*arguments)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (7, "")
    assert line.startswith("screenshots: ") and words in line


@pytest.mark.parametrize(
    ("picture", "line"),
    [
        ("doctor.png", "Chromium is missing: `apt-get install chromium`; left out: doctor.png"),
        ("top.svg", "tmux is missing: `apt-get install tmux`; left out: top.svg"),
    ],
)
def test_what_is_missing_is_one_line(picture: str, line: str, tmp_path: Path) -> None:
    done = script("--output", tmp_path, "--only", picture, PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, f"screenshots: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_without_a_right_to_namespaces(tmp_path: Path) -> None:
    """Or without the program that makes them: nothing is started."""
    (tmp_path / "tmux").symlink_to("/bin/true")
    for name in ("unshare", "mount", "ip"):
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'unshare failed: not permitted' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    done = script("--output", tmp_path, "--only", "top.svg", PATH=str(tmp_path))
    assert done.returncode == 1
    line = "the demonstration needs namespaces: run it as root (unshare failed: not permitted)"
    assert done.stderr == f"screenshots: {line}; all pictures are left out\n"
    (tmp_path / "ip").unlink()
    done = script("--output", tmp_path, "--only", "top.svg", PATH=str(tmp_path))
    assert "ip is missing: `apt-get install iproute2`" in done.stderr


def test_a_picture_of_the_demonstration(tmp_path: Path) -> None:
    """The whole way, with the shortest load: what runs is in the picture, and nothing is left."""
    need("tmux", "unshare", "ip")
    (tmp_path / "other").write_text("of this machine")
    done = script("--output", tmp_path, "--only", "status.svg", "--seconds", "0")
    if "needs namespaces" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "status.svg").read_text(encoding="utf-8")
    said = "".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ")
    # (A wide number leaves less room for names, which are cut in the middle.)
    for words in ("iserblk status", "archive", "64.0 GiB", "exporter", ":3260", "logged in"):
        assert words in said, words
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "status.svg"]
    assert not Path("/run/nbd").exists() and shutil.which("tmux")


def with_word(word: str) -> set[int]:
    """The processes with ``word`` on their command lines."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_text(errors="replace"):
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_demonstration_ends_with_the_command(number: int, tmp_path: Path) -> None:
    """Also its first process, which no signal ends that it does not expect."""
    need("tmux", "unshare", "ip")
    words = ["--output", str(tmp_path), "--only", "status.svg", "--seconds", "3000"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "screenshotlib", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"},
    ) as process:
        # The command, unshare, and the first process in the namespaces.
        until_blocking(lambda: process.poll() is not None or len(with_word(str(tmp_path))) >= 3)
        if process.poll() is not None:
            assert process.stderr is not None
            pytest.skip(process.stderr.read().strip())
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
    until_blocking(lambda: not with_word(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


# --- pictures of terminals -----------------------------------------------------------------------


def test_a_terminal_is_drawn_in_its_colours_and_always_of_one_size() -> None:
    lines = ["plain \x1b[31mred\x1b[0m", "a < b & c", "x" * 50]
    sizes = set()
    for shown in (lines, [], lines * 9):
        root = ElementTree.fromstring(drawn(shown, "a title", 40, 6, "test"))
        sizes.add((root.get("width"), root.get("height"), root.get("viewBox")))
    assert len(sizes) == 1
    text = drawn(lines, "a title", 40, 6, "test")
    said = "".join(ElementTree.fromstring(text).itertext()).replace("\xa0", " ")
    assert "a < b & c" in said and "a title" in said
    assert "x" * 40 in said and "x" * 41 not in said
    assert "#ff7b72" in text  # red
    assert text == drawn(lines, "a title", 40, 6, "test")


# --- PNG -----------------------------------------------------------------------------------------


def png(rows: list[bytes], width: int, colour: int, filters: bytes) -> bytes:
    """A picture whose rows are filtered already, as ``filters`` say."""
    body = zlib.compress(
        b"".join(bytes([kind]) + row for kind, row in zip(filters, rows, strict=True))
    )
    head = struct.pack(">IIBBBBB", width, len(rows), 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body[:5]), (b"IDAT", body[5:]), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def pixels(data: bytes) -> list[list[tuple[int, ...]]]:
    """Of a picture with a palette."""
    width, height = size_of(data)
    at = data.index(b"PLTE")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    palette = data[at + 4 : at + 4 + length]
    at = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    raw = zlib.decompress(data[at + 4 : at + 4 + length])
    rows = [raw[1 + row * (width + 1) : (row + 1) * (width + 1)] for row in range(height)]
    return [[tuple(palette[3 * each : 3 * each + 3]) for each in row] for row in rows]


def test_a_picture_in_a_palette_is_the_same() -> None:
    """Each filter: none, of what is left, above, of both (the mean), and Paeth's."""
    colours = [(250, 0, 0), (0, 250, 3), (7, 7, 7)]
    rows = [bytes(value for pixel in colours for value in pixel)] * 5

    def filtered(kind: int, row: bytes, above: bytes) -> bytes:
        out = []
        for index, value in enumerate(row):
            left = row[index - 3] if index >= 3 else 0
            corner = above[index - 3] if index >= 3 else 0
            near = min((left, above[index], corner),
                       key=lambda each: abs(left + above[index] - corner - each))  # fmt: skip
            guess = (0, left, above[index], (left + above[index]) // 2, near)[kind]
            out.append(value - guess & 0xFF)
        return bytes(out)

    made = [filtered(kind, row, rows[0] if kind else bytes(9)) for kind, row in enumerate(rows)]
    made[0] = rows[0]
    picture = reduced(png(made, 3, 2, bytes(range(5))))
    assert size_of(picture) == (3, 5)
    assert pixels(picture) == [colours] * 5


def test_more_colours_than_a_palette_has() -> None:
    """The rare ones become the nearest of the others."""
    rows = [bytes(value for each in range(300) for value in (min(each, 255), 0, 0, 255))] * 2
    picture = reduced(png(rows, 300, 6, bytes(2)))
    assert [red for red, _, _ in pixels(picture)[0]] == [min(each, 255) for each in range(300)]
    rows = [bytes(value for each in range(400) for value in (each & 0xFF, each >> 8, 0))]
    found = pixels(reduced(png(rows, 400, 2, bytes(1))))[0]
    assert len(set(found)) == 256 and found[:200] == [(each, 0, 0) for each in range(200)]


def test_what_is_no_picture() -> None:
    for data in (b"", b"GIF89a", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(ValueError, match="not a PNG"):
            reduced(data)
    other = png([bytes(2)], 2, 0, bytes(1))  # grey
    assert reduced(other) == other
