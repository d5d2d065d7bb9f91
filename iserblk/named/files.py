"""The files of named LUNs: ``NAME.conf``, and ``NAME.chap`` with CHAP secrets, if there are any.

    URL=iser://HOST/IQN/LUN [URL…]      what attach and mount take
    DEVICE=/dev/nbd0 [DEVICE…]          for attach
    MOUNTPOINT=/mnt/luns                for mount
    OPTIONS=io-timeout=60,…             as after -o

Only URL is necessary; other variables are ignored. The units read the same file as systemd's
EnvironmentFile= (systemd.exec(5)), whose form this is: comments begin with # or ;, values may stand
in quotes, and a backslash takes away the meaning of the next character.

No error text here contains any part of a value.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from iserblk.errors import BadArgument, IserblkError, PermissionDenied
from iserblk.files import remove_parts, sync_directory, write_whole
from iserblk.names import shown
from iserblk.secret import Secret
from iserblk.url import may_be_url

SYSTEM = Path("/etc/iserblk")  # the directory that the units read
VARIABLE = "ISERBLK_CONFIG_DIR"

# Part of a unit's name, as it is: nothing that systemd would have to escape.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_DEVICE = re.compile("nbd[0-9]+", re.ASCII)
_WORD = re.compile(r"(?:[^,\\]|\\.)+", re.DOTALL)
_UNSAFE = re.compile(r"[\s\"'\\\x00-\x1f]")
_LONGEST = 1 << 16  # bytes of a file


@dataclass(slots=True, frozen=True)
class Named:
    """One named LUN, or all LUNs of a target. ``urls``: its portals. ``words``: options, as after
    -o. ``path``: of its file. URLs and words may have secrets."""

    name: str
    urls: tuple[str, ...] = field(repr=False)
    devices: tuple[str, ...] = ()
    mountpoint: str = ""
    words: tuple[str, ...] = field(default=(), repr=False)
    path: Path = Path()

    def text(self) -> str:
        """What stands in its file. Raises BadArgument when a value has characters that the form has
        no place for."""
        check_words("URL", self.urls)
        check_words("DEVICE", self.devices)
        if any(each in word for word in self.words for each in "\"'\\\n"):
            raise BadArgument(
                "OPTIONS: a quote, backslash or line break cannot stand in the file of a named LUN"
            )
        if any(each in self.mountpoint for each in "\"'\\\n"):
            raise BadArgument("the mount point has a quote, backslash or line break: rename it")
        lines = [f"URL={' '.join(self.urls)}"]
        lines += [f"DEVICE={' '.join(self.devices)}"] if self.devices else []
        lines += [f"MOUNTPOINT={self.mountpoint}"] if self.mountpoint else []
        lines += [f"OPTIONS={','.join(self.words)}"] if self.words else []
        return "".join(f"{line}\n" for line in lines)


def check_words(what: str, words: Iterable[str]) -> None:
    """Raises BadArgument when a word cannot stand among others in a file; ``what`` names it."""
    for word in words:
        if _UNSAFE.search(word):
            raise BadArgument(f"{what}: a blank, quote or backslash cannot stand in the file of a"
                              " named LUN")  # fmt: skip


def may_be_name(text: str) -> bool:
    """Whether ``text`` has the form of a name. Names of devices have not."""
    return _NAME.fullmatch(text) is not None and not _DEVICE.fullmatch(text)


def check_name(name: str) -> None:
    """Raises BadArgument unless ``name`` has the form of a name. A URL, which may have a secret, is
    not shown."""
    if may_be_url(name):
        raise BadArgument("this is a URL, and the name of a LUN is missing in front of it")
    if not may_be_name(name):
        raise BadArgument(
            f"{shown(name)} cannot be the name of a LUN: give up to 64 letters, digits, -, _ and"
            " dots, beginning with a letter or digit, and not like a device (nbd0)"
        )


def directories() -> list[Path]:
    """Where named LUNs are looked for, in this order; new ones are written into the first. Raises
    BadArgument."""
    given = os.environ.get(VARIABLE, "")
    if given:
        if not given.startswith("/"):
            raise BadArgument(f"{VARIABLE}: give a full path, beginning with /")
        return [Path(given)]
    if os.geteuid() == 0:
        return [SYSTEM]
    base = os.environ.get("XDG_CONFIG_HOME", "")
    own = base if base.startswith("/") else os.path.expanduser("~/.config")
    return [Path(own, "iserblk"), SYSTEM] if own.startswith("/") else [SYSTEM]


def find(name: str) -> Path | None:
    """The file of a named LUN. Raises BadArgument for what cannot be a name."""
    check_name(name)
    for directory in directories():
        path = directory / f"{name}.conf"
        if os.path.lexists(path):
            return path
    return None


def names() -> list[str]:
    """The names that there are, sorted. Raises PermissionDenied, BadArgument."""
    return sorted(filter(may_be_name, _stems()))


def misnamed() -> list[str]:
    """What should be names, and cannot be, of files in the directories of named LUNs. Hidden files
    do not count. Raises PermissionDenied, BadArgument."""
    return sorted(each for each in _stems() if each and each[0] != "." and not may_be_name(each))


def _stems() -> set[str]:
    found: set[str] = set()
    first, *others = directories()
    for directory in (first, *others):
        try:
            files = os.listdir(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            if directory in others:
                continue  # root's, where a user has some, too
            raise PermissionDenied(f"{directory}: {error.strerror}") from None
        found |= {each.removesuffix(".conf") for each in files if each.endswith(".conf")}
    return found


def load(name: str) -> Named:
    """Read a named LUN. Raises BadArgument when there is none, its file is wrong, others may write
    it, or others may read it and it has a secret; PermissionDenied."""
    path = find(name)
    if path is None:
        places = " or ".join(map(str, directories()))
        raise BadArgument(
            f"there is no LUN named {name} in {places}: `iserblk list` shows the names,"
            " `iserblk add` makes one"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        raise PermissionDenied(f"{path}: only its owner may read it") from None
    except OSError as error:
        raise BadArgument(f"{path}: {error.strerror}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise BadArgument(f"{path}: not a regular file")
    with os.fdopen(fd, "rb") as file:
        if status.st_mode & 0o022:
            raise BadArgument(f"{path}: others may write it; `chmod 600` it, and check what it has")
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise BadArgument(f"{path}: more than {_LONGEST} bytes: not the file of a named LUN")
    if b"\0" in content:  # which no name of a file has
        raise BadArgument(f"{path}: there is a NUL byte in the file")
    values = parse(content.decode(errors="surrogateescape"), str(path))
    if not values.get("URL", "").split():
        raise BadArgument(f"{path}: it has no URL: write URL=iser://HOST/TARGET-IQN/LUN")
    if status.st_mode & 0o044 and _has_secret(values):
        raise BadArgument(f"{path}: others can read it, and it has a secret; `chmod 600` it, and"
                          " change the secret")  # fmt: skip
    return Named(
        name,
        tuple(values["URL"].split()),
        tuple(values.get("DEVICE", "").split()),
        values.get("MOUNTPOINT", ""),
        tuple(_WORD.findall(values.get("OPTIONS", ""))),
        path,
    )


def _has_secret(values: dict[str, str]) -> bool:
    """Whether there is a secret, or what may be meant as one."""
    if any("PASSWORD" in name for name in values):
        return True
    text = f"{values['URL']} {values.get('OPTIONS', '')}"
    if re.search("target[-_]password", text):
        return True
    # The user ends at the first % or :, and all up to the last @ in front of the first / is a
    # secret; a secret with a slash, which is wrong, is one all the same.
    return re.search(r"://[^\s/%:@]*[%:]\S*@", text) is not None


def parse(text: str, where: str) -> dict[str, str]:
    """The variables of an EnvironmentFile. Raises BadArgument; ``where`` names the file."""
    values: dict[str, str] = {}
    at, number = 0, 0
    while at < len(text):
        end = text.find("\n", at)
        line = text[at : end if end >= 0 else len(text)]
        number = text.count("\n", 0, at) + 1
        if not line.strip() or line.lstrip()[0] in "#;":
            at += len(line) + 1
            continue
        name, equals, _ = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip(), re.ASCII):
            raise BadArgument(f"{where}: line {number} is not NAME=VALUE")
        value, at = _value(text, at + len(name) + 1)
        values[name.strip()] = value
    return values


def _value(text: str, at: int) -> tuple[str, int]:
    """The value that begins at ``at``, and where the next line begins."""
    found: list[str] = []
    kept = 0  # of ``found``: blanks behind it are left out at the end
    quote = ""
    begun = False  # with a character that is not in quotes: quotes behind it are characters, too
    while at < len(text):
        each, at = text[at], at + 1
        following = text[at : at + 1]
        if quote:
            if each == quote:
                quote = ""
            elif each == "\\" and quote == '"' and following and following in '"\\`$\n':
                found += following.strip("\n")
                at += 1
            else:
                found.append(each)
            kept = len(found)
        elif each == "\n":
            break
        elif each == "\\":
            found += following.strip("\n")
            at += 1
            begun, kept = True, len(found)
        elif each in "\"'" and not begun:
            quote = each
        elif not each.isspace():
            found.append(each)
            begun, kept = True, len(found)
        elif begun:
            found.append(each)
    return "".join(found[:kept]), at


# -- writing -------------------------------------------------------------------------------------


def secret_path(name: str) -> Path:
    """The file with the CHAP secrets of a named LUN, if it has one of its own."""
    return directories()[0] / f"{name}.chap"


def save(named: Named, lines: Iterable[Secret] = (), *, replace: bool = False) -> Path:
    """Write the file of a named LUN, in one step, readable by its owner alone; ``lines`` are the
    secrets for ``secret_path``; without any, ``replace`` removes that file, unless ``named`` names
    it. Returns the file's path. Raises BadArgument when the name, or that of the file with the
    secrets, is taken and ``replace`` is not set; PermissionDenied, IserblkError. After an exception
    the named LUN is as before, but for its secrets if they were to be replaced."""
    check_name(named.name)
    text = named.text()
    directory = directories()[0]
    path = directory / f"{named.name}.conf"
    taken = f"there is a LUN named {named.name} already ({path}): remove it, or give --replace"
    if not replace and os.path.lexists(path):
        raise BadArgument(taken)
    chap = secret_path(named.name)
    secret = "".join(f"{line.reveal()}\n" for line in lines)
    with _system_errors(directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o755 if directory == SYSTEM else 0o700)
        if secret:
            try:
                _put(chap, secret, replace=replace)
            except FileExistsError:
                raise BadArgument(
                    f"{chap}: there is such a file, perhaps with the secret of another named LUN:"
                    " remove it, or give --replace"
                ) from None
        try:
            _put(path, text, replace=replace)
        except FileExistsError:  # by another process, meanwhile
            if secret:
                chap.unlink(missing_ok=True)
            raise BadArgument(taken) from None
        if replace and not secret and str(chap) not in text:
            chap.unlink(missing_ok=True)
    return path


def delete(named: Named) -> None:
    """Remove a named LUN and its secrets. Raises PermissionDenied, IserblkError."""
    with _system_errors(named.path.parent):
        chap = named.path.with_name(f"{named.name}.chap")
        named.path.unlink()
        chap.unlink(missing_ok=True)
        for each in (named.path, chap):
            remove_parts(each)
        sync_directory(named.path.parent)


@contextlib.contextmanager
def _system_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise PermissionDenied(
            f"{directory}: you may not write there; root may, and {VARIABLE} names another"
            " directory"
        ) from None
    except OSError as error:
        raise IserblkError(f"{directory}: {error.strerror or error}") from None


def _put(path: Path, text: str, *, replace: bool) -> None:
    """Raises OSError; FileExistsError when there is such a file and ``replace`` is not set."""
    write_whole(path, text.encode(errors="surrogateescape"), replace=replace)
