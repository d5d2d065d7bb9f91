"""What stands after -o: words of mount(8), of FUSE, and options of iserblk, all in one list."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuse_mount.errors import UsageError
from iserblk.errors import BadArgument, NotSupported
from iserblk.options import OPTION_NAMES, Options

# Words of fstab lines and of mount(8) that mean nothing here, or are the default.
_SWALLOWED = frozenset(
    {
        *("defaults", "_netdev", "nofail", "auto", "noauto", "user", "users", "nouser", "owner"),
        *("group", "async", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "silent", "loud"),
        *("atime", "noatime", "relatime", "norelatime", "strictatime", "nodiratime"),
    }
)

_FLAGS = _SWALLOWED | {"ro", "rw", "allow_other", "direct_io", "auto_cache", "kernel_cache"}

FUSE_CONF = Path("/etc/fuse.conf")


@dataclass(slots=True, frozen=True)
class MountOptions:
    """Settled options of one mount.

    ``direct_io``: every read and write of a user is one of the LUN, nothing is cached (default).
    Without it the kernel caches pages; ``keep_cache`` keeps them from one open to the next, which
    is right only while nobody else writes to the LUN. ``umask``: permissions that are taken away
    from 0666 (files) and 0777 (the directory). ``disk``: options of iserblk.disk.
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
    """Parse the values of all -o: comma-separated words, a comma in a value as ``\\,``.

    A later word overrides an earlier one, as with mount(8). With allow_other the default umask is
    077: a raw disk is nobody else's, unless said so. Raises UsageError naming the word.
    """
    mount: dict[str, int | bool] = {}
    disk: dict[str, str] = {}
    for word in _words(lists):
        name, equals, value = word.partition("=")
        if name in ("uid", "gid", "umask"):
            mount[name] = _number(name, value, 8 if name == "umask" else 10)
        elif name == "comment" or name.startswith(("x-", "X-")):
            continue
        elif equals and name in _FLAGS:
            raise UsageError(f"-o {word}: {name} takes no value")
        elif name.replace("_", "-") == "target-password":
            raise UsageError(f"-o {name}: everybody would see it; it goes into chap-secret-file")
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
            raise UsageError(f"-o {name}: unknown option")
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
        raise UsageError(f"-o {name}={text}: must be {kind}")
    return value


def _check_allow_other() -> None:
    """fusermount3 asks the system's owner first, and its own refusal is easily overlooked."""
    if os.geteuid() == 0:
        return
    try:
        lines = FUSE_CONF.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if "user_allow_other" not in (line.strip() for line in lines):
        raise UsageError("-o allow_other: needs the line user_allow_other in /etc/fuse.conf")
