"""Where metrics are served: ``metrics=PATH|HOST:PORT``; and where they are by default.

Front-ends that run for long (``attach``, ``mount``, ``nbd``) serve at a Unix socket in a directory
of the user's own, named by the place where the LUNs can be seen: a device, a mount point, an NBD
socket. Nobody else has that place, so nobody else needs that name.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from iserblk.errors import BadArgument, Busy, IserblkError

log = logging.getLogger(__name__)

_LONGEST = 107  # bytes of a path in sun_path, unix(7)
_SUFFIX = ".metrics"
_RUN = Path("/run/iserblk")

Address = Path | tuple[str, int]  # a Unix socket, or a loopback address and a port


def parse_address(text: str, what: str) -> Address:
    """Raises BadArgument. ``what``: what the user called it."""
    if text.startswith("/"):
        if len(os.fsencode(text)) > _LONGEST:
            raise BadArgument(
                f"{what}: the path of a socket has {_LONGEST} bytes at most; give a shorter one"
            )
        if "\0" in text:
            raise BadArgument(f"{what}: no file has such a name")
        return Path(text)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 0xFFFF):
        raise BadArgument(
            f"{what} {text[:60]!r}: give the whole path of a Unix socket, from / on, or a port of "
            "the loopback interface (127.0.0.1:9100)"
        )
    if host == "localhost":
        host = "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise BadArgument(
            f"{what} {text[:60]!r}: metrics are served on the loopback interface only, as nobody "
            "is asked who they are; give 127.0.0.1:PORT, [::1]:PORT or a Unix socket"
        )
    return host, int(port)


def words(address: Address) -> str:
    if isinstance(address, Path):
        return str(address)
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def answers(path: Path) -> bool:
    """A process listens on the Unix socket ``path``. Raises OSError where that is no socket, or
    cannot be known."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(f"{path}: exists, and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # more ask than it has answered yet
    return True


def make_room(path: Path) -> None:
    """Remove a socket that nobody listens on any more. Raises Busy where a process does,
    BadArgument where something else is there, or nothing can be."""
    try:
        if answers(path):
            raise Busy(f"metrics: {path}: a process serves there already; give another path")
        path.unlink()
    except FileNotFoundError:
        return
    except FileExistsError:
        raise BadArgument(f"metrics: {path}: exists, and is no socket; give another path") from None
    except OSError as error:
        words = error.strerror or str(error)
        raise BadArgument(f"metrics: {path}: {words}; give another path") from None


# --- the default ---------------------------------------------------------------------------------


def directory() -> Path | None:
    """Where nobody else can make files. Root's is there for as long as the machine runs, that of
    users while they are logged in; None for users without one."""
    if os.geteuid() == 0:
        return _RUN
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(run, "iserblk") if run.startswith("/") else None


def socket_of(place: str, where: Path) -> Path:
    """The socket for what serves ``place``, in ``where``."""
    name = os.fsencode(place)
    path = where / f"{quote(name, safe='[]:@+=')}{_SUFFIX}"
    if len(os.fsencode(path)) > _LONGEST or len(path.name) > 255:
        path = where / f"{hashlib.sha256(name).hexdigest()[:16]}{_SUFFIX}"
    return path


def place_of(path: Path) -> str:
    """As ``socket_of`` was told; where that would have been too long, a number of its own."""
    return os.fsdecode(unquote_to_bytes(path.name.removesuffix(_SUFFIX)))


def default_option(place: str, where: Path | None = None) -> dict[str, str]:
    """``metrics=`` for a front-end at ``place``; nothing where it cannot be served: that is no
    reason not to work. ``where``: the directory, else the user's."""
    where = where or directory()
    if where is None:
        return {}
    path = socket_of(place, where)
    try:
        parse_address(str(path), "metrics")
        where.mkdir(mode=0o755, exist_ok=True)
        make_room(path)
    except (OSError, IserblkError) as error:
        log.info("no metrics are served: %s", error)
        return {}
    return {"metrics": str(path)}


def served(where: Path | None = None) -> list[Path]:
    """The sockets in the directory, in the order of their names; nobody may answer there."""
    where = where or directory()
    return sorted(where.glob(f"*{_SUFFIX}")) if where is not None else []
