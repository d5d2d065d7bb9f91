"""The files of named LUNs: their form, which is systemd's, what protects them, and writing them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, PermissionDenied
from iserblk.named import files
from iserblk.named.files import Named, delete, directories, find, load, names, parse, save
from iserblk.secret import Secret

URL = "iser://host/iqn.2026-11.example:disk/0"
SECRET = "hush-hush-hush"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path))
    return tmp_path


def put(directory: Path, text: str, mode: int = 0o600) -> Path:
    path = directory / "disk.conf"
    path.write_text(text)
    path.chmod(mode)
    return path


# Text, and the variables that systemd takes from it (systemd.exec(5), EnvironmentFile=).
FORMS = [
    ("URL=a\n", {"URL": "a"}),
    ("URL=a", {"URL": "a"}),
    ("\n# URL=x\n ; y\nURL=a b \t\n", {"URL": "a b"}),
    ("URL= a b\nDEVICE=\n", {"URL": "a b", "DEVICE": ""}),
    ('URL="a b "\n', {"URL": "a b "}),
    ("URL='a \"b\"'\n", {"URL": 'a "b"'}),
    ('URL=a"b"\nX="y"\n', {"URL": 'a"b"', "X": "y"}),
    ("URL=\"a\"'b'c\n", {"URL": "abc"}),
    ("URL=a\\\nb\n", {"URL": "ab"}),
    ('URL="a\\\nb"\n', {"URL": "ab"}),
    ("URL=a\\ \\\\b\\\n\n", {"URL": "a \\b"}),
    ('URL="a\\"\\$\\x"\n', {"URL": 'a"$\\x'}),
    ('URL="a\nb"\nX=c\n', {"URL": "a\nb", "X": "c"}),
    ("URL=a#b\n", {"URL": "a#b"}),
    ("URL=a\nURL=b\n", {"URL": "b"}),
]


@pytest.mark.parametrize(("text", "values"), FORMS)
def test_the_form(text: str, values: dict[str, str]) -> None:
    assert parse(text, "file") == values


@pytest.mark.parametrize("text", ["nonsense\n", "a b=c\n", "=x\n", "URL=a\n\niser://x%s@y\n"])
def test_wrong_lines(text: str) -> None:
    with pytest.raises(BadArgument, match=r"^file: line [13] is not NAME=VALUE$"):
        parse(text, "file")


@given(st.text(alphabet="UX= \t\n\\\"'#;$ab", max_size=40))
def test_any_text(text: str) -> None:
    try:
        parse(text, "file")
    except BadArgument as error:
        assert str(error).endswith("is not NAME=VALUE")


_WORDS = st.text(st.characters(min_codepoint=33, exclude_characters="\"'\\,"), min_size=1)
_SAFE = _WORDS.filter(lambda word: not any(each.isspace() for each in word))


@given(
    st.lists(_SAFE, min_size=1, max_size=3),
    st.lists(_SAFE, max_size=2),
    st.lists(_SAFE, max_size=3),
)
def test_what_is_written_is_read(urls: list[str], devices: list[str], words: list[str]) -> None:
    named = Named("disk", tuple(urls), tuple(devices), words=tuple(f"o={word}" for word in words))
    values = parse(named.text(), "file")
    assert values["URL"].split() == urls
    assert values.get("DEVICE", "").split() == devices
    assert values.get("OPTIONS", "") == ",".join(named.words)


@pytest.mark.parametrize("url", ["iser://a b", "iser://a'b", 'iser://a"b', "iser://a\\b", "a\nb"])
def test_what_cannot_be_written(url: str, directory: Path) -> None:
    with pytest.raises(BadArgument, match="cannot stand in the file"):
        save(Named("disk", (url,)))
    for words in (("a=b'c",), ("a=\\,",), ("a\nb",)):
        with pytest.raises(BadArgument, match="cannot stand in the file"):
            save(Named("disk", (URL,), words=words))
    with pytest.raises(BadArgument, match="the mount point has a quote"):
        save(Named("disk", (URL,), mountpoint="/a'b"))
    assert os.listdir(directory) == []


def test_a_file_that_a_person_wrote(directory: Path) -> None:
    text = f'# ours\nURL="{URL} iscsi://other/iqn.2026-11.example:disk/0"\nDEVICE=/dev/nbd0\n'
    path = put(directory, f"{text}OPTIONS=io-timeout=60,ro\nEXTRA=yes\n", 0o644)
    named = load("disk")
    assert named.urls == (URL, "iscsi://other/iqn.2026-11.example:disk/0")
    assert (named.devices, named.mountpoint) == (("/dev/nbd0",), "")
    assert named.words == ("io-timeout=60", "ro")
    assert named.path == path


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "it has no URL"),
        ("URL=\n", 0o600, "it has no URL"),
        (f"URL={URL}\n", 0o660, "others may write it"),
        (f"URL={URL}\n", 0o602, "others may write it"),
        (f"URL=iser://user%{SECRET}@host/iqn.x\n", 0o644, "others can read it, and it has a"),
        (f"URL=iser://user:{SECRET}/@host/iqn.x\n", 0o640, "others can read it, and it has a"),
        (f"URL={URL}?target_password={SECRET}\n", 0o604, "others can read it, and it has a"),
        (f"URL={URL}\nOPTIONS=target-password={SECRET}\n", 0o644, "others can read it"),
        (f"URL={URL}\nLIBISCSI_CHAP_PASSWORD={SECRET}\n", 0o644, "others can read it"),
        (f"URL={URL}\nMOUNTPOINT=/mnt/{SECRET}\0\n", 0o600, "a NUL byte in the file"),
        (f"{SECRET}\n", 0o600, "line 1 is not NAME=VALUE"),
    ],
)
def test_files_that_are_refused(text: str, mode: int, words: str, directory: Path) -> None:
    path = put(directory, text, mode)
    with pytest.raises(BadArgument, match=words) as error:
        load("disk")
    assert SECRET not in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_a_user_without_a_secret_is_none(directory: Path) -> None:
    put(directory, "URL=iser://user@host:3260/iqn.2026-11.example:disk/0\n", 0o644)
    assert load("disk").urls


def test_no_regular_file(directory: Path) -> None:
    os.mkfifo(directory / "disk.conf", 0o600)
    with pytest.raises(BadArgument, match="not a regular file"):
        load("disk")
    (directory / "folder.conf").mkdir()
    with pytest.raises(BadArgument, match=r"folder\.conf: not a regular file"):
        load("folder")
    (directory / "large.conf").write_text("#" * 70000)
    with pytest.raises(BadArgument, match="more than 65536 bytes"):
        load("large")
    (directory / "loop.conf").symlink_to("loop.conf")
    with pytest.raises(BadArgument, match=r"loop\.conf: Too many levels"):
        load("loop")


def test_saved(directory: Path) -> None:
    """Whatever the umask is, only the owner can read what is written."""
    before = os.umask(0)
    try:
        path = save(Named("disk", (URL,), words=("a=b",)), [Secret(SECRET)])
    finally:
        os.umask(before)
    assert path == directory / "disk.conf"
    assert path.read_text() == f"URL={URL}\nOPTIONS=a=b\n"
    chap = directory / "disk.chap"
    assert chap.read_text() == f"{SECRET}\n"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, chap)] == [0o600, 0o600]
    assert sorted(os.listdir(directory)) == ["disk.chap", "disk.conf"]


def test_a_name_is_not_taken_twice(directory: Path) -> None:
    save(Named("disk", (URL,)), [Secret(SECRET)])
    with pytest.raises(BadArgument, match="there is a LUN named disk already"):
        save(Named("disk", ("iser://other",)), [Secret("other")])
    assert load("disk").urls == (URL,)
    assert (directory / "disk.chap").read_text() == f"{SECRET}\n"
    save(Named("disk", ("iser://other",)), replace=True)
    assert load("disk").urls == ("iser://other",)
    assert os.listdir(directory) == ["disk.conf"]  # the secret belonged to what was replaced


def test_a_secret_that_is_still_named_stays(directory: Path) -> None:
    """Another option is given, and the file of the secret as before."""
    words = (f"chap-secret-file={directory}/disk.chap",)
    save(Named("disk", (URL,), words=words), [Secret(SECRET)])
    save(Named("disk", (URL,), words=(*words, "io-timeout=60")), replace=True)
    assert (directory / "disk.chap").read_text() == f"{SECRET}\n"


def test_a_file_of_a_secret_that_is_of_another_one(directory: Path) -> None:
    """It is neither replaced nor removed by a named LUN that it does not belong to."""
    directory.mkdir(exist_ok=True)
    chap = directory / "disk.chap"
    chap.write_text(f"{SECRET}\n")
    with pytest.raises(BadArgument, match=r"disk\.chap: there is such a file"):
        save(Named("disk", (URL,)), [Secret("other")])
    assert os.listdir(directory) == ["disk.chap"]
    save(Named("disk", (URL,)))
    assert chap.read_text() == f"{SECRET}\n"


def test_a_name_that_is_taken_meanwhile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os.path, "lexists", lambda _: False)  # type: ignore[attr-defined]
    save(Named("disk", (URL,)))
    with pytest.raises(BadArgument, match="there is a LUN named disk already"):
        save(Named("disk", ("iser://other",)), [Secret(SECRET)])
    assert os.listdir(directory) == ["disk.conf"]
    assert load_text(directory) == f"URL={URL}\n"


def load_text(directory: Path) -> str:
    return (directory / "disk.conf").read_text()


def test_a_write_that_fails_changes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Named("disk", (URL,)))

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="No space left"):
            save(Named("disk", ("iser://other",)), replace=True)
    assert load_text(directory) == f"URL={URL}\n"
    assert os.listdir(directory) == ["disk.conf"]


def test_removed(directory: Path) -> None:
    save(Named("disk", (URL,)), [Secret(SECRET)])
    delete(load("disk"))
    assert os.listdir(directory) == []


def test_names(directory: Path) -> None:
    assert names() == []
    for name in ("b", "a.b-c_D", ".hidden", "nbd0", "-x"):
        (directory / f"{name}.conf").write_text("")
    (directory / "a.chap").write_text("")
    assert names() == ["a.b-c_D", "b"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "nbd0", "a b", "a@b", "ä", "x" * 65])
def test_what_is_no_name(name: str) -> None:
    for call in (find, lambda name: save(Named(name, (URL,)))):
        with pytest.raises(BadArgument, match="cannot be the name of a LUN"):
            call(name)


@pytest.mark.parametrize("scheme", ["iser://", "iser:", ""])
def test_a_url_in_place_of_a_name_is_not_shown(scheme: str) -> None:
    with pytest.raises(BadArgument, match="the name of a LUN is missing") as caught:
        find(f"{scheme}alice%{SECRET}@host/iqn.x")
    assert SECRET not in str(caught.value)


def test_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert directories() == [tmp_path]
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", "here")
    with pytest.raises(BadArgument, match="ISERBLK_CONFIG_DIR: give a full path"):
        directories()
    monkeypatch.delenv("ISERBLK_CONFIG_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/a/config")
    assert directories() == [Path("/etc/iserblk")]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert directories() == [Path("/home/a/config/iserblk"), Path("/etc/iserblk")]
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/a")
    assert directories()[0] == Path("/home/a/.config/iserblk")


def test_where_nothing_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", "/proc/iserblk")
    with pytest.raises((PermissionDenied, Exception), match="/proc/iserblk: "):
        save(Named("disk", (URL,)))
