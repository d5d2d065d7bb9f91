"""Where secrets come from, who must not see them, and how they get to another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk import credentials
from iserblk.credentials import find_credentials, handed_on, read_accounts, without_secrets
from iserblk.errors import BadArgument
from iserblk.iscsi import chap
from iserblk.iscsi.chap import Credentials
from iserblk.options import Options
from iserblk.url import parse_url

IQN = "iqn.2026-11.example:disk"
OWN, THEIRS = "hush-hush-hush", "not-a-word-more"
ENVIRONMENT = ("USERNAME", "PASSWORD", "TARGET_USERNAME", "TARGET_PASSWORD")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"LIBISCSI_CHAP_{name}", raising=False)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


def find(user_info: str = "", **options: str) -> Credentials | None:
    url = parse_url(f"iser://{user_info}host/{IQN}/0")
    return find_credentials(url, Options.from_pairs(options.items()))


def found(user_info: str = "", **options: str) -> tuple[str, str, str, str]:
    it = find(user_info, **options)
    assert it is not None
    return it.user, it.secret.reveal(), it.target_user, it.target_secret.reveal()


def refused(words: str, user_info: str = "", **options: str) -> None:
    with pytest.raises(BadArgument, match=words) as error:
        find(user_info, **options)
    for secret in (OWN, THEIRS):
        assert secret not in str(error.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.write_text(f"{OWN}\n{THEIRS}\n")
    path.chmod(0o600)
    return path


def test_nothing() -> None:
    assert find() is None
    assert find(auth="none") is None


@pytest.mark.parametrize("separator", ["%", ":"])
def test_user_info(separator: str) -> None:
    """libiscsi's grammar."""
    assert found(f"host{separator}{OWN}@") == ("host", OWN, "", "")
    mutual = found(f"host{separator}{OWN}@", target_user="disk", target_password=THEIRS)
    assert mutual == ("host", OWN, "disk", THEIRS)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBISCSI_CHAP_USERNAME", "me")
    assert find() is None  # libiscsi, too, wants both
    monkeypatch.setenv("LIBISCSI_CHAP_PASSWORD", OWN)
    assert found() == ("me", OWN, "", "")
    assert found("you@") == ("you", OWN, "", "")
    assert found("you%more-than-twelve@") == ("you", "more-than-twelve", "", "")
    monkeypatch.setenv("LIBISCSI_CHAP_TARGET_USERNAME", "disk")
    monkeypatch.setenv("LIBISCSI_CHAP_TARGET_PASSWORD", THEIRS)
    assert found() == ("me", OWN, "disk", THEIRS)
    assert found(target_user="disc")[2] == "disc"
    monkeypatch.setenv("LIBISCSI_CHAP_PASSWORD", "two\nlines")
    refused("is one line")


def test_file(file: Path) -> None:
    assert found("host@", chap_secret_file=str(file)) == ("host", OWN, "", THEIRS)
    file.write_text(OWN)
    assert found("host@", chap_secret_file=str(file)) == ("host", OWN, "", "")
    file.write_bytes(b"caf\xe9\xff-secret\r\n")
    secret = found("host@", chap_secret_file=str(file))[1]
    assert secret.encode(errors="surrogateescape") == b"caf\xe9\xff-secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610])
def test_file_that_others_can_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    refused("others can read it; `chmod 600`", "host@", chap_secret_file=str(file))
    with pytest.raises(BadArgument, match="others can read it"):
        read_accounts(str(file))


@pytest.mark.parametrize("content", ["", "\n", "a\n\n", "\na\n", "a\nb\nc\n", "a" * 4097])
def test_file_that_is_none(file: Path, content: str) -> None:
    file.write_text(content)
    refused("chap-secret-file", "host@", chap_secret_file=str(file))


def test_no_file(tmp_path: Path) -> None:
    refused("No such file", "host@", chap_secret_file=str(tmp_path / "missing"))
    refused("not a regular file", "host@", chap_secret_file=str(tmp_path))


def test_descriptor_of_a_file_is_read_again(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.lseek(fd, 5, os.SEEK_SET)
        for _ in range(2):
            assert found("host@", chap_secret_fd=str(fd)) == ("host", OWN, "", THEIRS)
    finally:
        os.close(fd)
    refused("chap-secret-fd: descriptor", "host@", chap_secret_fd=str(fd))


def test_standard_input_stays_open_for_programs(file: Path) -> None:
    """nbdkit does not start without it."""
    before, given = os.dup(0), os.open(file, os.O_RDONLY)
    try:
        os.dup2(given, 0)
        for _ in range(2):
            assert found("host@", chap_secret_fd="0") == ("host", OWN, "", THEIRS)
            assert os.get_inheritable(0)
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(given)


def test_descriptor_of_a_pipe_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "from_pipes", {})
    read_end, write_end = os.pipe()
    os.write(write_end, f"{OWN}\n".encode())
    os.close(write_end)
    try:
        for _ in range(2):
            assert found("host@", chap_secret_fd=str(read_end)) == ("host", OWN, "", "")
    finally:
        os.close(read_end)


def test_credential(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("LoadCredential=", "host@", chap_secret_credential=file.name)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))
    file.chmod(0o440)  # as systemd may have it
    assert found("host@", chap_secret_credential=file.name) == ("host", OWN, "", THEIRS)
    refused("No such file", "host@", chap_secret_credential="other")


def test_contradictions(file: Path) -> None:
    path = str(file)
    refused("leave one out", f"host%{OWN}@", chap_secret_file=path)
    refused("leave one out", "host@", chap_secret_file=path, chap_secret_fd="0")
    refused("leave one out", f"host%{OWN}@", auth="none")
    refused("no user and secret", auth="md5")
    refused("no user", chap_secret_file=path)
    refused("without a secret", "host@")
    refused("without the initiator", target_password=THEIRS)
    refused("without its secret", f"host%{OWN}@", target_user="disk")
    refused("both secrets are the same", f"host%{OWN}@", target_password=OWN)


@pytest.mark.parametrize(
    ("auth", "algorithms"),
    [("chap", chap.OFFER), ("md5", (5,)), ("sha1", (6,)), ("SHA-256", (7,)), ("sha3-256", (8,))],
)
def test_algorithms(auth: str, algorithms: tuple[int, ...]) -> None:
    it = find(f"host%{OWN}@", auth=auth)
    assert it is not None and it.algorithms == algorithms


# -- accounts ------------------------------------------------------------------------------------


def test_accounts(tmp_path: Path) -> None:
    path, own = tmp_path / "accounts", tmp_path / "own"
    path.write_text(f"# who\nhost:{OWN}\n\nother:a:b:c\r\n")
    own.write_text(f"{THEIRS}\n")
    for each in (path, own):
        each.chmod(0o600)
    accounts = read_accounts(str(path), "disk", str(own))
    assert {name: secret.reveal() for name, secret in accounts.secrets.items()} == {
        "host": OWN,
        "other": "a:b:c",
    }
    assert (accounts.user, accounts.secret.reveal()) == ("disk", THEIRS)
    assert read_accounts(str(path)).user == ""
    with pytest.raises(BadArgument, match="belong together"):
        read_accounts(str(path), "disk")
    own.write_text(f"{OWN}\n")
    with pytest.raises(BadArgument, match="each needs its own"):
        read_accounts(str(path), "disk", str(own))
    own.write_text(f"{OWN}\n{THEIRS}\n")
    with pytest.raises(BadArgument, match="needs one line"):
        read_accounts(str(path), "disk", str(own))


@pytest.mark.parametrize("text", ["", "# none\n", f"{OWN}\n", f":{OWN}\n", f"{OWN}:\n"])
def test_no_accounts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "accounts"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(BadArgument, match="user:secret") as error:
        read_accounts(str(path))
    assert OWN not in str(error.value)


def test_account_twice(tmp_path: Path) -> None:
    path = tmp_path / "accounts"
    path.write_text(f"host:{OWN}\nhost:{THEIRS}\n")
    path.chmod(0o600)
    with pytest.raises(BadArgument, match="line 2"):
        read_accounts(str(path))


# -- handing on ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"iser://host%{OWN}@[::1]:3260/{IQN}/0?io-timeout=5", {}),
        (f"iser://host:{OWN}@h/{IQN}?target_user=disk&target_password={THEIRS}", {"rcap": "iwarp"}),
        (f"iscsi://host%{OWN}@h/{IQN}/0?iser", {"target_password": THEIRS, "target-user": "disk"}),
        (f"iser://host@h/{IQN}/0", {"chap-secret-file": "FILE", "auth": "sha1"}),
        (f"iser://h/{IQN}/0", {}),
    ],
)
def test_handing_on(text: str, options: dict[str, str], file: Path) -> None:
    """The URL and options handed on mean the same, and show no secret."""
    options = {name: value.replace("FILE", str(file)) for name, value in options.items()}
    first = parse_url(text)
    before = find_credentials(first, Options.from_pairs({**options, **first.options}.items()))
    with handed_on([text, text], options) as handed:
        shown = " ".join([*handed.urls, *(f"{k}={v}" for k, v in handed.options.items())])
        assert OWN not in shown and THEIRS not in shown
        for each in handed.urls:
            url = parse_url(each)
            assert url.redacted() == first.redacted()
            settled = Options.from_pairs({**handed.options, **url.options}.items())
            assert find_credentials(url, settled) == before
            assert settled.io_timeout == float(first.options.get("io-timeout", 30))
        descriptors = list(handed.descriptors)
        assert len(descriptors) == (2 if before else 0)
        assert all(fd >= 64 and not os.get_inheritable(fd) for fd in descriptors)
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_handing_on_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user name that does not fit into a URL stays where it is."""
    monkeypatch.setenv("LIBISCSI_CHAP_USERNAME", "a/b%c@d")
    monkeypatch.setenv("LIBISCSI_CHAP_PASSWORD", OWN)
    with handed_on([f"iser://h/{IQN}/0"], {}) as handed:
        url = parse_url(handed.urls[0])
        it = find_credentials(url, Options.from_pairs(url.options.items()))
        assert it is not None and (it.user, it.secret.reveal()) == ("a/b%c@d", OWN)


def test_command_lines() -> None:
    """Only URLs with a secret change; a wrong URL stays as it is, for the error message."""
    words = ["python", "-m", "x", f"iser://host%{OWN}@h/{IQN}/0", f"iser://host@h/{IQN}/0"]
    words += [f"a:b@{OWN}", f"iser://h/{IQN}/0?target_password={THEIRS}", "nbd://h/", "-o"]
    hidden, descriptors = without_secrets(words)
    assert len(descriptors) == 1
    try:
        assert [a for a, b in zip(words, hidden, strict=True) if a != b] == [words[3]]
        assert hidden[3] == f"iser://host@h/{IQN}/0?chap-secret-fd={descriptors[0]}"
        assert os.pread(descriptors[0], 100, 0).decode() == f"{OWN}\n"
    finally:
        os.close(descriptors[0])


@pytest.mark.parametrize(
    ("word", "hidden"),
    [
        (f"iser://u%{OWN}@h", "iser://u@h?FD"),  # of discover and doctor
        (f"iscsi://u%{OWN}@h:1/?auth=md5", "iscsi://u@h:1/?auth=md5&FD"),
        (f"iser://u%{OWN}@h?auth=md5", "iser://u@h?auth=md5&FD"),
        # of the target's --lun
        (f"--lun=iser://u%{OWN}@h/{IQN}/0", f"--lun=iser://u@h/{IQN}/0?FD"),
        (f"iser://u%{OWN}@h/{IQN}/0:ro", f"iser://u@h/{IQN}/0?FD:ro"),
        (f"iser://u%{OWN}@h/{IQN}:ro", f"iser://u@h/{IQN}:ro?FD"),
        (f"iser://u%{OWN}@h/{IQN}?header=12:ro", f"iser://u@h/{IQN}?header=12&FD:ro"),
        (
            f"iser://u%{OWN}@h/{IQN}/0 iscsi://g/{IQN}/0 iser://u%{OWN}@i/{IQN}/0:ro",
            f"iser://u@h/{IQN}/0?FD iscsi://g/{IQN}/0 iser://u@i/{IQN}/0?FD:ro",
        ),
    ],
)
def test_command_lines_of_discover_doctor_and_target(word: str, hidden: str) -> None:
    (found,), descriptors = without_secrets([word])
    try:
        for fd in descriptors:
            assert os.pread(fd, 100, 0).decode() == f"{OWN}\n"
            hidden = hidden.replace("FD", f"chap-secret-fd={fd}", 1)
        assert found == hidden
    finally:
        for fd in descriptors:
            os.close(fd)
