"""Addresses at which metrics are served: ``metrics=PATH|HOST:PORT``, and the default.

By default, front-ends that run for long (``attach``, ``mount``, ``nbd``) serve at a Unix socket in
a directory of the user, or else of the unit. The name of the socket is the place where the LUNs
appear: a device, a mount point, an NBD socket. Only one process can use a place, so the names are
unique. The place of a target is its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from iserblk.errors import BadArgument, Busy, IserblkError
from iserblk.names import shown

log = logging.getLogger(__name__)

MOST_LEFT = 64  # sockets of killed processes that stay in a directory
LONGEST_SOCKET_PATH = 107  # bytes, in sun_path: unix(7)
_SUFFIX = ".metrics"
_RUN = Path("/run/iserblk")
# With a directory for each iserblk-nbd@NAME.service, and each iserblk-target@NAME.service, and one
# for iserblk-exporter.service.
UNITS = (Path("/run/iserblk-nbd"), Path("/run/iserblk-target"), Path("/run/iserblk-exporter"))

Address = Path | tuple[str, int]  # a Unix socket, or a loopback address and a port


def parse_address(text: str, what: str) -> Address:
    """Parse ``PATH`` or ``HOST:PORT``. ``what``: the name of the option, for errors. Raises
    BadArgument."""
    if text.startswith("/"):
        if len(os.fsencode(text)) > LONGEST_SOCKET_PATH:
            raise BadArgument(
                f"{what}: the path of a Unix socket is too long (more than {LONGEST_SOCKET_PATH}"
                " bytes); give a shorter path"
            )
        if "\0" in text:
            raise BadArgument(f"{what}: a path cannot contain a NUL character")
        return Path(text)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 0xFFFF):
        raise BadArgument(
            f"{what} {shown(text)}: give the whole path of a Unix socket (from / on), or a port "
            "of the loopback interface (127.0.0.1:13261)"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise BadArgument(
            f"{what} {shown(text)}: metrics are served on the loopback interface only, as clients "
            "do not have to log in; give 127.0.0.1:PORT, [::1]:PORT or a Unix socket"
        )
    return host, int(port)


def words(address: Address) -> str:
    # The address as text, for messages.
    if isinstance(address, Path):
        return str(address)
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def answers(path: Path) -> bool:
    """Whether a process listens on the Unix socket ``path``. Raises OSError if ``path`` is no
    socket (FileExistsError), or it cannot be checked."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(f"{path}: exists, and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # its queue of connections is full
    return True


def make_room(path: Path) -> None:
    """Remove the Unix socket ``path`` if no process listens on it any more. Raises Busy if a
    process does; BadArgument if ``path`` is no socket, or the directory cannot be used."""
    try:
        if answers(path):
            raise Busy(f"metrics: {path}: a process serves there already; give another path")
        path.unlink()
    except FileNotFoundError:
        return
    except FileExistsError:
        raise BadArgument(
            f"metrics: {path}: a file with this name exists and is no socket; give another path"
        ) from None
    except OSError as error:
        words = error.strerror or str(error)
        raise BadArgument(f"metrics: {path}: {words}; give another path") from None


# --- the default ---------------------------------------------------------------------------------


def directory() -> Path | None:
    """The directory for sockets, in which no other user can create files. For root it exists until
    the machine stops, for other users while they are logged in. None: the user has none."""
    if os.geteuid() == 0:
        return _RUN
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(run, "iserblk") if run.startswith("/") else None


def root_directory() -> Path:
    """The directory of root, in which every user sees names."""
    return _RUN


def unit_directory() -> Path | None:
    """The directory that systemd has made for this process's unit (RuntimeDirectory=). Such a unit
    may be able to write nowhere else, and its user has no other directory."""
    first = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(first) if first.startswith("/") else None


def unit_directories() -> list[Path]:
    """Those of the units that may write nowhere else: for root of all, for another user its own."""
    uid = os.geteuid()
    found = []
    for each in [each for units in UNITS for each in sorted(units.glob("*"))]:
        try:
            if uid in (0, os.lstat(each).st_uid):
                found.append(each)
        except OSError:  # its unit has just ended
            continue
    return found


def socket_of(place: str, where: Path) -> Path:
    """The path of the socket for ``place``, in the directory ``where``."""
    name = os.fsencode(place)
    path = where / f"{quote(name, safe='[]:@+=')}{_SUFFIX}"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH or len(path.name) > 255:
        path = where / f"{hashlib.sha256(name).hexdigest()[:16]}{_SUFFIX}"
    return path


def place_of(path: Path) -> str:
    """The place that was given to ``socket_of``; if its name was too long, a hash of it."""
    return os.fsdecode(unquote_to_bytes(path.name.removesuffix(_SUFFIX)))


def default_option(place: str, where: Path | None = None, *, taken: bool = False) -> dict[str, str]:
    """The option ``metrics=`` for a front-end at ``place``. Empty if metrics cannot be served: the
    front-end then works without. ``where``: the directory; None: the user's, or else that of the
    unit. ``taken``: a process that is about to end serves there."""
    tried: list[Path | None]
    tried = [where] if where is not None else [directory(), unit_directory()]
    for each in tried:
        if each is None:
            continue
        path = socket_of(place, each)
        try:
            parse_address(str(path), "metrics")
            each.mkdir(mode=0o755, exist_ok=True)
            if not os.access(each, os.W_OK):  # of a read-only file system, for example, in a unit
                raise PermissionError(f"{each}: no socket can be made there")
            if not taken:
                make_room(path)
            forget_old(each)
        except (OSError, IserblkError) as error:
            log.info("no metrics are served: %s", error)
        else:
            return {"metrics": str(path)}
    return {}


def forget_old(where: Path) -> None:
    """Keep sockets of killed processes from filling a directory, where ever new ones start at
    other places (a port or a temporary directory of their own). Some stay, as they tell what was
    killed: first those whose device, mount point or NBD socket is there still, then the newest.
    """
    paths = served(where)
    if len(paths) <= 2 * MOST_LEFT:
        return
    left = []
    for path in paths:
        with contextlib.suppress(OSError):
            if not answers(path):
                left.append((os.path.lexists(place_of(path)), os.lstat(path).st_mtime_ns, path))
    for _, _, path in sorted(left)[:-MOST_LEFT]:
        with contextlib.suppress(OSError):
            path.unlink()


def served(where: Path | None = None) -> list[Path]:
    """The sockets in the directory, sorted by name. Perhaps no process listens on them any more."""
    where = where or directory()
    return sorted(where.glob(f"*{_SUFFIX}")) if where is not None else []
