"""Finds CHAP secrets, and hands them on to other processes.

An initiator's user is in the URL (``user@``) or in ``LIBISCSI_CHAP_USERNAME``. Its secret is in the
URL (``user%secret@``), in a file, a descriptor or a systemd credential, or in
``LIBISCSI_CHAP_PASSWORD``. For mutual CHAP a file, descriptor or credential has the target's secret
in a second line. The URL and options override the environment.

No error text here contains any part of a secret.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from iserblk.errors import BadArgument, IserblkError
from iserblk.iscsi import chap
from iserblk.iscsi.chap import Accounts, Credentials
from iserblk.options import Options
from iserblk.secret import Secret
from iserblk.url import Url, parse_place

_USERNAME = "LIBISCSI_CHAP_USERNAME"
_PASSWORD = "LIBISCSI_CHAP_PASSWORD"
_TARGET_USERNAME = "LIBISCSI_CHAP_TARGET_USERNAME"
_TARGET_PASSWORD = "LIBISCSI_CHAP_TARGET_PASSWORD"

_ALGORITHMS = {
    "md5": (chap.MD5,),
    "sha1": (chap.SHA1,),
    "sha256": (chap.SHA256,),
    "sha3-256": (chap.SHA3_256,),
}
_OPTION = re.compile(r"--[a-z-]+=")
_READ_ONLY = re.compile(r"(.*(?:/[0-9]+|\?[^ ]*))(:ro)", re.DOTALL)  # as target.lunspec has it
_MAXIMUM_FILE = 1 << 20
_MAXIMUM_SECRETS = 4096  # bytes: two lines
_STDERR = 2
FIRST_DESCRIPTOR = 64  # shells use lower descriptors for themselves
# Options that are a secret or name its source: these are handed on in another way.
_SECRETS = frozenset(
    {"target-password", "chap-secret-file", "chap-secret-fd", "chap-secret-credential"}
)
from_pipes: dict[int, bytes] = {}  # content of pipes, by descriptor: it cannot be read twice


def find_credentials(url: Url, options: Options) -> Credentials | None:
    """The credentials to log in with; None if none are given. Reads files anew each time, and a
    pipe once. Raises BadArgument for incomplete credentials, or a file that others can read."""
    environment = os.environ
    name, lines = _source(options)
    if url.password and name:
        raise BadArgument(f"a secret is in the URL, and {name} is given: leave one out")
    user = url.user or environment.get(_USERNAME, "")
    secret = url.password or (lines[0] if lines else Secret())
    if not secret and (environment.get(_USERNAME) or url.user):
        secret = Secret(environment.get(_PASSWORD, ""))
    target_secret = options.target_password or (lines[1] if len(lines) > 1 else Secret())
    target_secret = target_secret or Secret(environment.get(_TARGET_PASSWORD, ""))
    target_user = options.target_user or environment.get(_TARGET_USERNAME, "")
    if not url.user and not name and not secret:
        # A user without a secret in the environment is ignored, as libiscsi does.
        if options.target_user or options.target_password:
            raise BadArgument("the target's CHAP credentials are given without the initiator's")
        if options.auth not in ("", "none"):
            raise BadArgument(f"auth={options.auth}: no user and secret are given")
        return None
    if options.auth == "none":
        raise BadArgument("auth=none, but a user or secret is given: leave one out")
    if not user:
        raise BadArgument(
            f"{name} is given, but no user: write iser://USER@HOST/…, or set {_USERNAME}"
        )
    if not secret:
        raise BadArgument(
            f"a user is given without a secret; add chap-secret-file=FILE, or set {_PASSWORD}"
        )
    if any("\n" in each.reveal() for each in (secret, target_secret)):
        raise BadArgument("a CHAP secret is one line")
    algorithms = _ALGORITHMS.get(options.auth, chap.OFFER)
    return Credentials(user, secret, target_user, target_secret, algorithms)


def _source(options: Options) -> tuple[str, list[Secret]]:
    """The name of the option that names a source of secrets, and the source's lines. The name is
    "" if no option does."""
    given: list[tuple[str, bytes]] = []
    if options.chap_secret_file:
        path = options.chap_secret_file
        given.append(("chap-secret-file", read_private(path, f"chap-secret-file {path}")))
    if options.chap_secret_fd is not None:
        given.append(("chap-secret-fd", _read_descriptor(options.chap_secret_fd)))
    if options.chap_secret_credential:
        given.append(("chap-secret-credential", _read_credential(options.chap_secret_credential)))
    if len(given) > 1:
        raise BadArgument(f"{given[0][0]} and {given[1][0]} are given: leave one out")
    for name, content in given:
        return name, _lines(name, content)
    return "", []


def _lines(name: str, content: bytes) -> list[Secret]:
    if len(content) > _MAXIMUM_SECRETS:
        raise BadArgument(f"{name}: more than {_MAXIMUM_SECRETS} bytes: not a file with secrets")
    text = content.decode(errors="surrogateescape")
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if len(lines) > 2 or not all(lines):
        raise BadArgument(
            f"{name}: needs a line with the secret and, for mutual CHAP, one with the target's"
        )
    return [Secret(line) for line in lines]


def read_guarded(path: str, what: str) -> tuple[bytes, bool]:
    """The content of a regular file, and whether only its owner has access to it. Raises
    BadArgument; ``what`` names the file in the text."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadArgument(f"{what}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadArgument(f"{what}: not a regular file")
        if status.st_size > _MAXIMUM_FILE:
            raise BadArgument(f"{what}: more than {_MAXIMUM_FILE} bytes")
        return _read(fd), not status.st_mode & 0o077
    finally:
        os.close(fd)


def read_private(path: str, what: str) -> bytes:
    """The content of a file to which only its owner has access. Raises BadArgument, also if other
    users have access; ``what`` names the file in the text."""
    content, private = read_guarded(path, what)
    if not private:
        raise BadArgument(f"{what}: others can read it; `chmod 600` it, and change the secret")
    return content


def read_secret(path: str, what: str) -> Secret:
    """The only line of a private file. Raises BadArgument, as ``read_private``."""
    lines = _lines(what, read_private(path, what))
    if len(lines) > 1:
        raise BadArgument(f"{what}: needs one line, the secret")
    return lines[0]


def has_secret(text: str) -> bool:
    """Whether a URL has a secret in it. Raises BadArgument for what is no URL."""
    url = parse_place(text)
    return bool(url.password) or "target-password" in url.options


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb", closefd=False) as file:
        return file.read(_MAXIMUM_FILE)


def _read_descriptor(fd: int) -> bytes:
    """The content of a descriptor: of a file from its start, whatever its position is."""
    try:
        if fd > _STDERR:  # nbdkit and other programs do not start without standard streams
            os.set_inheritable(fd, False)  # this process has it: no child needs it
        try:
            return os.pread(fd, _MAXIMUM_FILE, 0)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
        if fd not in from_pipes:
            from_pipes[fd] = _read(fd)
        return from_pipes[fd]
    except OSError as error:
        raise BadArgument(f"chap-secret-fd: descriptor {fd}: {error.strerror}") from None


def _read_credential(name: str) -> bytes:
    """The content of a systemd credential. systemd keeps other users away from it."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        raise BadArgument(
            "chap-secret-credential: CREDENTIALS_DIRECTORY is not set; systemd sets it in a unit "
            "with LoadCredential="
        )
    try:
        return (Path(directory) / name).read_bytes()[:_MAXIMUM_FILE]
    except OSError as error:
        raise BadArgument(f"chap-secret-credential: {error.strerror}") from None


# -- the target's --------------------------------------------------------------------------------


def read_accounts(path: str, user: str = "", secret_path: str = "") -> Accounts:
    """The accounts of a file with ``user:secret`` lines; empty lines and lines that begin with #
    are ignored. With ``user``, and the secret in the only line of ``secret_path``, the target can
    authenticate itself (mutual CHAP). Raises BadArgument."""
    what = f"--chap-accounts {path}"
    text = read_private(path, what).decode(errors="surrogateescape")
    found: dict[str, Secret] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, secret = line.partition(":")
        if not colon or not name or not secret:
            raise BadArgument(f"{what}: line {number} is not user:secret")
        if name in found:
            raise BadArgument(f"{what}: line {number} repeats the user of an earlier line")
        found[name] = Secret(secret)
    if not found:
        raise BadArgument(f"{what}: there is no line user:secret")
    if bool(user) != bool(secret_path):
        raise BadArgument("--chap-user and --chap-secret-file belong together")
    own = Secret()
    if secret_path:
        own = read_secret(secret_path, f"--chap-secret-file {secret_path}")
    return Accounts(found, user, own)


# -- handing on ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Handed:
    """URLs and options without secrets, for a command line. ``descriptors`` hold the secrets; the
    process that gets the command line must inherit them."""

    urls: list[str]
    options: dict[str, str]
    descriptors: list[int]


@contextmanager
def handed_on(urls: Sequence[str], options: Mapping[str, str]) -> Iterator[Handed]:
    """URLs and options for a process that is started inside the with block. The descriptors are of
    memory, and are closed at the end of the block. Raises BadArgument as ``find_credentials``."""
    descriptors: list[int] = []
    try:
        words = [_hand_on(text, options, descriptors) for text in urls]
        left = {name: value for name, value in options.items() if _key(name) not in _SECRETS}
        yield Handed(words, left, descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)


def _key(name: str) -> str:
    return name.replace("_", "-")


def _hand_on(text: str, common: Mapping[str, str], descriptors: list[int]) -> str:
    """One URL, with its secrets in a new descriptor."""
    url = parse_place(text)
    given = {**{_key(name): value for name, value in common.items()}, **url.options}
    credentials = find_credentials(url, Options.from_pairs(given.items()))
    query = {name: value for name, value in url.options.items() if name not in _SECRETS}
    if credentials is not None:
        secrets = [credentials.secret, credentials.target_secret]
        lines = "".join(f"{secret.reveal()}\n" for secret in secrets if secret)
        descriptors.append(_in_memory(lines.encode(errors="surrogateescape")))
        query["chap-secret-fd"] = str(descriptors[-1])
    # A user that is not in the URL is in the environment, which the process inherits.
    return _rebuilt(text, url, url.user, query)


def strip_secrets(text: str, user: str = "", keys: Mapping[str, str] | None = None) -> str:
    """A URL without secrets, and without the options that name a source of secrets. ``user``: of a
    URL that has none; ``keys``: more options. Raises BadArgument."""
    url = parse_place(text)
    query = {name: value for name, value in url.options.items() if name not in _SECRETS}
    return _rebuilt(text, url, url.user or user, {**query, **(keys or {})})


def _rebuilt(text: str, url: Url, user: str, query: Mapping[str, str]) -> str:
    """``text``, of which ``url`` was made, with this user info and query."""
    info = f"{user}@" if user else ""
    _, _, rest = text.partition("://")
    authority, slash, path = rest.partition("/")
    if slash:
        path = path.partition("?")[0]
    else:
        authority = authority.partition("?")[0]
    words = "&".join(f"{name}={value}" if value else name for name, value in query.items())
    scheme = url.scheme  # the query's ``iser`` key may have changed it
    return f"{scheme}://{info}{authority.rpartition('@')[2]}{slash}{path}{words and '?' + words}"


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[int]]:
    """A command line in which no URL has a secret, and the descriptors that its process must
    inherit. URLs with errors stay as they are: the command will report them."""
    descriptors: list[int] = []
    found = []
    for word in words:
        # Of `--lun`: several URLs in one word, and options in front of and behind a URL.
        option = _OPTION.match(word)
        head = option[0] if option else ""
        rest = word[len(head) :]
        pieces = rest.split(" ") if rest.count("://") > 1 else [rest]
        found.append(head + " ".join(_without_secret(each, descriptors) for each in pieces))
    return found, descriptors


def _without_secret(text: str, descriptors: list[int]) -> str:
    if "://" not in text:
        return text
    match = _READ_ONLY.fullmatch(text)
    text, tail = (match[1], match[2]) if match else (text, "")
    try:
        if has_secret(text):
            text = _hand_on(text, {}, descriptors)
    except IserblkError:
        pass
    return text + tail


def hide_command_line() -> None:
    """If this process was started with a secret in a URL, replace the process (execv) by one with
    the secret in a descriptor, because every user of the machine can see command lines. Returns if
    there is nothing to hide."""
    if not any("://" in word for word in sys.orig_argv):
        return
    words, descriptors = without_secrets(sys.orig_argv)
    if descriptors:
        for fd in descriptors:
            os.set_inheritable(fd, True)
        os.execv(sys.executable, words)


def _in_memory(content: bytes) -> int:
    fd = os.memfd_create("iserblk-chap")
    try:
        os.write(fd, content)
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    finally:
        os.close(fd)
