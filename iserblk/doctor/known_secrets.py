"""Finds the secrets that this user can read of iserblk's on this machine, so that none of them gets
into a report, whatever has written it into a log or on a command line.

They stay in this process. What cannot be read is named: a secret in it may be shown.

    URLs: USER%SECRET@, target-password=       command lines, NAME.conf, *.toml, lists, fstab
    CHAP secrets, of initiators                NAME.chap, chap-secret-file, credentials of systemd
    accounts of a target                       --chap-accounts, --chap-secret-file, *.toml
    LIBISCSI_CHAP_PASSWORD and its like        environments, drop-ins of units
    open-iscsi's, discovery accounts included  /etc/iscsi, /var/lib/iscsi
    keys of NBD's TLS                          --tls-psk, --tls-certificates
    CSI                                        /run/iserblk/csi, the service account's token
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iserblk.doctor.machine import Machine
from iserblk.errors import BadArgument
from iserblk.secret import Secret
from iserblk.url import OF_ALL, parse_place

_MOST_BYTES = 1 << 20  # of a file
_MOST_FILES = 4096  # of one pattern
_LEAST_KEY = 16  # characters of a line of a key

# Below the root of the machine. Files with a secret in each line:
_LINES = (
    "etc/iserblk/*.chap",
    "etc/credstore*/iserblk-*",
    "run/credentials/iserblk-*/*",
    "run/iserblk/csi/*.secret*",
    "var/run/secrets/kubernetes.io/serviceaccount/token",
)
# Settings with secrets among them:
_SETTINGS = (
    "etc/iserblk/*.conf",
    "etc/iserblk/*.toml",
    "etc/fstab",
    "etc/iscsi/iscsid.conf",
    *(f"{top}/iscsi/{part}" for top in ("etc", "var/lib")
      for part in ("nodes/*/*", "nodes/*/*/*", "send_targets/*/*", "send_targets/*", "isns/*",
                   "slp/*", "static/*/*", "discovery/*/*")),
    *(f"{top}/systemd/system/iserblk-*" for top in ("etc", "run")),
    *(f"{top}/systemd/system/iserblk-*.d/*.conf" for top in ("etc", "run")),
    "etc/default/iserblk*",
)  # fmt: skip
# Directories of these: where they cannot be listed, what is in them is not known.
_DIRECTORIES = (
    "etc/iserblk",
    "etc/iscsi/nodes",
    "etc/iscsi/send_targets",
    "var/lib/iscsi/nodes",
    "var/lib/iscsi/send_targets",
    "run/iserblk/csi",
)
LINES, ACCOUNTS, SETTINGS, KEYS = "lines", "accounts", "settings", "keys"
# Options of command lines, and of settings, that name a file with a secret in each line, one with
# user:secret lines, settings, and a directory with a key.
OPTIONS = {
    "chap-secret-file": LINES,
    "secret-file": LINES,
    "chap-accounts": ACCOUNTS,
    "tls-psk": ACCOUNTS,
    "config": SETTINGS,
    "luns": SETTINGS,
    "tls-certificates": KEYS,
}
_KEYS = ("server-key.pem", "client-key.pem", "ca-key.pem", "keys.psk")

_URL = re.compile(rf"\b(?:{OF_ALL})://[^\s\"',]+", re.IGNORECASE)
_USER_INFO = re.compile(r"://[^\s/%:@]*[%:](.*)@", re.DOTALL)
_BARE = re.compile(r"[^\s/%:@]+[%:](.+)@(?!.*@)", re.DOTALL)
_SCHEME = re.compile(r"\A(?:-[\w-]+=)?\w+:/+")
_TARGET = re.compile(r"target[-_]password\s*[=:]\s*([^&\s\"',]+)", re.IGNORECASE)
# `node.session.auth.password = x`, `secret = "x"`, `Environment=LIBISCSI_CHAP_PASSWORD=x`.
_VALUE = re.compile(
    r"(?:password(?:_in)?|secret|token|passphrase)[\"']?\s*[=:][ \t]*(\S.*?)[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_OPTION_FILE = re.compile(r"(?:chap-secret-file|chap_secret_file|secret-file)\s*=\s*([^\s,&]+)")
# In comments of the files that open-iscsi and iserblk bring along.
_PLACEHOLDERS = ("password", "password_in", "secret")
_VARIABLE = re.compile(r"PASSW|SECRET|TOKEN|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
# Of a file or directory, not of what is in it. (A secret in base64 may begin with a slash.)
_PLACE = re.compile(r"(?:_|\b)(?:FILE|PATH|DIR|DIRECTORY)\Z", re.IGNORECASE)
# Lines of units. In one of the first there may be several, with quotes.
_ENVIRONMENT = re.compile(r"^[ \t]*Environment=(.*)$", re.MULTILINE)
_CREDENTIAL = re.compile(r"^[ \t]*SetCredential=[^:\n]*:(.+)$", re.MULTILINE)


@dataclass(slots=True)
class KnownSecrets:
    """``secrets``: all that were found. ``unread``: path → why it could not be read."""

    secrets: list[Secret] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    def add(self, texts: Iterable[str]) -> None:
        """Empty ones, and words that stand for a secret in examples, are left out."""
        self.secrets += [
            Secret(each) for each in texts if each.strip() and each not in _PLACEHOLDERS
        ]


def find_secrets(
    machine: Machine,
    environment: Mapping[str, str],
    commands: Iterable[tuple[Sequence[str], str]],
    directories: Iterable[Path] = (),
) -> KnownSecrets:
    """All secrets that this user can read. ``commands``: command lines, each with the directory
    that it was started in. ``directories``: of named LUNs, beside those of the machine."""
    known = KnownSecrets()
    known.add(of_environment(environment))
    for name in _DIRECTORIES:
        if (path := machine.path(name)).is_dir() and not os.access(path, os.R_OK | os.X_OK):
            known.unread[str(path)] = os.strerror(errno.EACCES)
    given = environment.get("CREDENTIALS_DIRECTORY", "")
    for path in _files(machine, [*_LINES, *([f"{given}/*"] if given.startswith("/") else [])]):
        known.add(_lines(_read(path, known)))
    own = [f"{each}/*.chap" for each in directories]
    for path in _files(machine, own):
        known.add(_lines(_read(path, known)))
    for path in _files(machine, [*_SETTINGS, *(f"{each}/*.conf" for each in directories)]):
        _look_at_settings(path, known)
    for words, where in commands:
        known.add(of_words(words))
        _look_at_files(words, machine.path(where), known)
    return known


def of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """The secrets in variables. Their names tell them; a path is no secret."""
    for name, value in environment.items():
        if _VARIABLE.search(name) and not _PLACE.search(name):
            yield value
        elif "://" in value:
            yield from of_text(value)


def of_words(words: Sequence[str]) -> Iterator[str]:
    """The secrets in a command line: those of its URLs, without their scheme, too."""
    for word in words:
        if (found := _BARE.match(_SCHEME.sub("", word))) is not None:
            yield found[1]
        if "://" in word:
            begin = re.search(r"\b\w+://", word)
            yield from _of_url(word[begin.start() :] if begin else word)
        yield from of_text(word)


def of_text(text: str) -> Iterator[str]:
    """The secrets of the URLs in a text, and of its keys."""
    for url in _URL.findall(text):
        yield from _of_url(url)
    yield from _TARGET.findall(text)


def _of_url(text: str) -> Iterator[str]:
    try:
        url = parse_place(text)
    except BadArgument:
        if (found := _USER_INFO.search(text)) is not None:
            yield found[1]  # wrong, and a secret all the same
    else:
        yield url.password.reveal()
        yield url.options.get("target-password", "")


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def _accounts(text: str) -> Iterator[str]:
    """Of lines user:secret, and user:key."""
    for line in _lines(text):
        user, colon, secret = line.partition(":")
        if colon and not user.startswith("#"):
            yield secret


def _look_at_settings(path: Path, known: KnownSecrets) -> None:
    """URLs, keys that name secrets, and the files that keys name."""
    text = _read(path, known)
    known.add(of_text(text))
    for value in _VALUE.findall(text):
        known.add((value, value.strip("\"'")))
    for line in _ENVIRONMENT.findall(text):
        known.add(of_environment(_assignments(line)))
    known.add(_CREDENTIAL.findall(text))
    for name in _OPTION_FILE.findall(text):
        file = path.parent / name.strip("\"'")
        known.add(_lines(_read(file, known)))
    if path.suffix == ".toml":
        try:
            tree = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError):
            return
        known.add(_of_tree(tree))


def _assignments(line: str) -> dict[str, str]:
    """The variables of an Environment= line of a unit."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote without an end
        words = line.split()
    return {
        name: value for name, equals, value in (each.partition("=") for each in words) if equals
    }


def _of_tree(value: object) -> Iterator[str]:
    """The secrets of a target's settings, as TOML means them."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "secret" and isinstance(each, str):
                yield each
            yield from _of_tree(each)
    elif isinstance(value, list):
        for each in value:
            yield from _of_tree(each)
    elif isinstance(value, str):
        yield from of_words([value])


def _look_at_files(words: Sequence[str], where: Path, known: KnownSecrets) -> None:
    """The files that a command line names."""
    for name, value in _options(words):
        path = where / value
        match OPTIONS.get(name):
            case "lines":
                known.add(_lines(_read(path, known)))
            case "accounts":
                known.add(_accounts(_read(path, known)))
            case "settings":
                _look_at_settings(path, known)
            case "keys":
                for key in _KEYS:
                    text = _read(path / key, known)
                    known.add(line for line in _lines(text) if len(line) >= _LEAST_KEY)
                    known.add(_accounts(text))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--name value``, ``--name=value``, ``name=value`` of nbdkit and of -o."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--") and "=" not in word:
            yield word[2:], following
            continue
        for part in re.split("[,?&]", word):
            name, equals, value = part.partition("=")
            if equals and value:
                yield name.removeprefix("--").replace("_", "-"), value


def _files(machine: Machine, patterns: Iterable[str]) -> Iterator[Path]:
    """Regular files, each once."""
    seen: set[Path] = set()
    for pattern in patterns:
        for number, path in enumerate(sorted(machine.path("/").glob(pattern.lstrip("/")))):
            if number == _MOST_FILES:
                break
            if path not in seen:
                seen.add(path)
                yield path


def _read(path: Path, known: KnownSecrets) -> str:
    """The text of a regular file; "": there is none, or it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        known.unread[str(path)] = error.strerror or str(error)
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES).decode(errors="surrogateescape")
    except OSError as error:
        known.unread[str(path)] = error.strerror or str(error)
        return ""
    finally:
        os.close(fd)
