"""The options of -o: options of mount(8), of FUSE and of iserblk, all in one list."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuse_mount.errors import UsageError
from iserblk.errors import BadArgument, NotSupported
from iserblk.names import shown
from iserblk.options import OPTION_NAMES, Options

# Options of fstab lines and of mount(8) that are accepted, and have no effect here.
_SWALLOWED = frozenset(
    {
        *("defaults", "_netdev", "nofail", "auto", "noauto", "user", "users", "nouser", "owner"),
        *("group", "async", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "silent", "loud"),
        *("atime", "noatime", "relatime", "norelatime", "strictatime", "nodiratime"),
    }
)

FLAGS = ("ro", "rw", "allow_other", "direct_io", "auto_cache", "kernel_cache")
NUMBERS = ("uid", "gid", "umask")
_NO_VALUE = _SWALLOWED | set(FLAGS)

FUSE_CONF = Path("/etc/fuse.conf")


@dataclass(slots=True, frozen=True)
class MountOptions:
    """The options of one mount.

    ``direct_io`` (default): the kernel caches nothing; every read and write of a process goes to
    the LUN. Without it the kernel caches pages. ``keep_cache``: it keeps them from one open to the
    next, which is right only while no other host writes to the LUN. ``uid``, ``gid``: the owner of
    the files. ``umask``: permissions to take away from 0666 (files) and 0777 (the directory).
    ``disk``: options of iserblk.disk.
    """

    read_only: bool = False
    allow_other: bool = False
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    umask: int = 0o022
    direct_io: bool = True
    keep_cache: bool = False
    disk: dict[str, str] = field(default_factory=dict)


def parse_options(lists: Iterable[str]) -> MountOptions:
    """Parse the values of all -o: comma-separated options; a comma in a value is ``\\,``.

    A later option overrides an earlier one, as with mount(8). With allow_other the default umask is
    077, so that other users get access to a raw disk only with an explicit umask. Raises
    UsageError that names the option.
    """
    mount: dict[str, int | bool] = {}
    disk: dict[str, str] = {}
    for word in _words(lists):
        name, equals, value = word.partition("=")
        if name in NUMBERS:
            mount[name] = _number(name, value, 8 if name == "umask" else 10)
        elif name == "comment" or name.startswith(("x-", "X-")):
            continue
        elif equals and name in _NO_VALUE:
            raise UsageError(f"-o {word}: {name} takes no value")
        elif name.replace("_", "-") == "target-password":
            raise UsageError(
                f"-o {name}: every user could see the secret; put it in a file, and give"
                " chap-secret-file"
            )
        elif equals:
            disk[name.replace("_", "-")] = value
        elif name in ("ro", "rw"):
            mount["read_only"] = name == "ro"
        elif name == "allow_other":
            mount["allow_other"] = True
        elif name in ("direct_io", "auto_cache", "kernel_cache"):
            mount["direct_io"] = name == "direct_io"
            mount["keep_cache"] = name == "kernel_cache"
        elif name.replace("_", "-") in OPTION_NAMES:
            raise UsageError(f"-o {name}: has no value; write {name}=VALUE")
        elif name not in _SWALLOWED:
            raise UsageError(f"-o {shown(name) if '@' in name else name}: unknown option")
    if mount.get("allow_other"):
        _check_allow_other()
        mount.setdefault("umask", 0o077)
    try:
        Options.from_pairs(disk.items())
    except (BadArgument, NotSupported) as error:
        raise UsageError(f"-o: {error}") from None
    return MountOptions(disk=disk, **mount)  # type: ignore[arg-type]


def _words(lists: Iterable[str]) -> Sequence[str]:
    words: list[str] = []
    for text in lists:
        for word in re.findall(r"(?:[^,\\]|\\.)+", text):
            words.append(re.sub(r"\\(.)", r"\1", word))
    return words


def _number(name: str, text: str, base: int) -> int:
    try:
        value = int(text, base)
    except ValueError:
        value = -1
    limit = 0o777 if name == "umask" else 2**32 - 2
    if not 0 <= value <= limit:
        kind = "octal digits up to 777" if base == 8 else "a number"
        raise UsageError(f"-o {name}={text}: the value must be {kind}")
    return value


def _check_allow_other() -> None:
    """Raises UsageError unless fusermount3 will permit allow_other. The error of fusermount3 itself
    is easily overlooked."""
    if os.geteuid() == 0:
        return
    try:
        lines = FUSE_CONF.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if "user_allow_other" not in (line.strip() for line in lines):
        raise UsageError(
            "-o allow_other: add the line user_allow_other to /etc/fuse.conf, or mount as root"
        )
