"""The option ``--lun`` of the target: parse it, and open the file that it names.

    --lun FILE[:ro][:block=4096][:size=1G][:serial=S][:wce=0|1][:volatile-cache=64M]
              [:soft-threshold=800M][:tas=0|1]
    --lun URL[:ro]        a LUN of another target; several URLs, with blanks between them, name its
                          portals

The parser takes options from the right, until the rest is an existing file. So a file whose name
has colons can be served, too. In a URL ``:ro`` is an option only behind a LUN number or options, as
a target's name may end so, too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from iserblk.errors import BadArgument
from iserblk.options import Options, size_of
from iserblk.target.scsi.unit import MAXIMUM_SERIAL, LogicalUnit
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.statefile import MODES_SUFFIX, SUFFIX, StateFile
from iserblk.target.store.store import Store
from iserblk.target.store.volatile import VolatileStore
from iserblk.url import may_be_url, parse_url

BLOCK_SIZES = (512, 4096)
MAXIMUM_SIZE = 1 << 62  # bytes

_LOOKS_LIKE_OPTION = re.compile(r"ro|[a-z][a-z-]*=[^/]*", re.ASCII)
_REMOTE_READ_ONLY = re.compile(r"(.*(?:/[0-9]+|\?[^ ]*)):ro", re.DOTALL)
# Behind "leave out KEY=".
_WITHOUT = {
    "size": "the LUN has the size of a file that exists",
    "volatile-cache": "writes then go to the file",
    "soft-threshold": "then nothing warns of a file that grows",
}
KEYS = ("block", "size", "serial", "wce", "volatile-cache", "soft-threshold", "tas")


@dataclass(slots=True, frozen=True)
class LunSpec:
    """The values of one ``--lun``. Sizes in bytes. ``size`` None: the file's own size; ``serial``,
    ``write_cache``, ``volatile_cache``, ``soft_threshold`` and ``tas`` None: not given. ``urls``:
    of a LUN of another target; they may have secrets, ``path`` has none."""

    path: str
    read_only: bool = False
    block: int = 512
    size: int | None = None
    serial: str | None = None
    write_cache: bool | None = None
    volatile_cache: int | None = None
    soft_threshold: int | None = None
    tas: bool | None = None
    urls: tuple[str, ...] = field(default=(), repr=False)


OpenRemote = Callable[[tuple[str, ...], bool], LogicalUnit]  # its URLs, and whether it is read-only


def no_remote(_urls: tuple[str, ...], _read_only: bool) -> LogicalUnit:
    raise BadArgument("LUNs of other targets cannot be served here; name a file")


def parse_lun_spec(text: str) -> LunSpec:
    """Parse the value of ``--lun``. Raises BadArgument that names the option and what it takes."""
    if may_be_url(text):
        return _parse_remote(text)
    path, options = _split(text)
    return file_spec(path, options, text)


def file_spec(path: str, options: Mapping[str, str], text: str) -> LunSpec:
    """The LUN of a file. ``options``: KEYS, and ``ro``, as text. Raises BadArgument; ``text`` says
    what LUN it is."""
    spec = LunSpec(
        path=path,
        read_only="ro" in options,
        block=_block(options.get("block"), text),
        size=_size(options, "size", text),
        serial=_serial(options.get("serial"), text),
        write_cache=_flag(options, "wce", text),
        volatile_cache=_size(options, "volatile-cache", text),
        soft_threshold=_size(options, "soft-threshold", text),
        tas=_flag(options, "tas", text),
    )
    if spec.volatile_cache is not None and spec.write_cache is False:
        raise BadArgument(
            f"{text}: `wce=0` and `volatile-cache=` contradict each other; leave one out"
        )
    if spec.volatile_cache is not None and spec.read_only:
        raise BadArgument(
            f"{text}: `ro` and `volatile-cache=` contradict each other; leave one out"
        )
    return spec


def _parse_remote(text: str) -> LunSpec:
    match = _REMOTE_READ_ONLY.fullmatch(text)
    return remote_spec((match[1] if match else text).split(), match is not None)


def remote_spec(urls: Sequence[str], read_only: bool) -> LunSpec:
    """The LUN of another target, by one or more portals of it. Raises BadArgument, also for what is
    wrong with the options of a URL."""
    parsed = [parse_url(url) for url in urls]
    for url in parsed:
        Options.from_pairs(url.options.items())
    shown = " ".join(url.redacted() for url in parsed)
    return LunSpec(path=shown, read_only=read_only, urls=tuple(urls))


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Returns the path, and the value of each option."""
    path = text
    options: dict[str, str] = {}
    while not os.path.exists(path):
        rest, colon, option = path.rpartition(":")
        if not colon or not _LOOKS_LIKE_OPTION.fullmatch(option):
            break
        key, _, value = option.partition("=")
        if key != "ro" and key not in KEYS:
            raise _unknown(text, option)
        if key in options:
            raise BadArgument(f"{text}: `{key}` is given twice")
        options[key] = value
        path = rest
    file, colon, option = path.rpartition(":")
    if colon and "size" not in options and not os.path.exists(path) and os.path.exists(file):
        raise _unknown(text, option)
    if not path:
        raise BadArgument(f"{text!r}: the file name is missing; write FILE[:option…]")
    return path, options


def _unknown(text: str, option: str) -> BadArgument:
    known = ", ".join(f"{each}=" for each in KEYS)
    return BadArgument(f"{text}: unknown option `{option}`; the options are ro, {known}")


def _block(value: str | None, text: str) -> int:
    if value is None:
        return BLOCK_SIZES[0]
    for size in BLOCK_SIZES:
        if value == str(size):
            return size
    raise BadArgument(f"{text}: `block={value}`: the block size is 512 or 4096 bytes")


def _size(options: Mapping[str, str], key: str, text: str) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    size = size_of(value)
    if size is None:
        raise BadArgument(
            f"{text}: `{key}={value}`: write a number of bytes, or a number with K, M, G or T"
        )
    if size == 0:
        raise BadArgument(
            f"{text}: `{key}={value}`: write a size such as 1G, or leave out `{key}=`:"
            f" {_WITHOUT[key]}"
        )
    if size > MAXIMUM_SIZE:
        raise BadArgument(f"{text}: `{key}={value}`: no file is as large; write a size such as 1G")
    return size


def _serial(value: str | None, text: str) -> str | None:
    if value is not None and not (
        0 < len(value) <= MAXIMUM_SERIAL and value.isascii() and value.isprintable()
    ):
        raise BadArgument(
            f"{text}: `serial={value}`: write 1 to {MAXIMUM_SERIAL} printable ASCII characters"
        )
    return value


def _flag(options: Mapping[str, str], key: str, text: str) -> bool | None:
    value = options.get(key)
    if value is None:
        return None
    if value == "1":
        return True
    if value == "0":
        return False
    raise BadArgument(f"{text}: `{key}={value}`: write 0 or 1")


def default_serial(iqn: str, path: str) -> str:
    """A LUN's default serial number: the same at every start, different for every file of every
    target."""
    return hashlib.sha256(os.fsencode(f"{iqn}\n{os.path.realpath(path)}")).hexdigest()[:16]


def _state(spec: LunSpec, suffix: str) -> StateFile | None:
    """Where reservations, or mode parameters, are kept. Beside a block device nothing lasts (/dev),
    and a file that is served read-only may have several targets."""
    if spec.read_only or not os.path.isfile(spec.path):
        return None
    return StateFile.beside(spec.path, suffix)


def open_lun(
    spec: LunSpec, default_serial: str, open_remote: OpenRemote = no_remote
) -> LogicalUnit:
    """Open the file or the LUN of another target, and make a logical unit of it, which the caller
    closes.

    ``default_serial``: the serial number if the spec has none; LogicalUnit needs the same number
    at every start. ``open_remote``: opens a LUN of another target. Raises BadArgument,
    PermissionDenied or Busy, and what ``open_remote`` raises; nothing stays open then.
    """
    if spec.urls:
        return open_remote(spec.urls, spec.read_only)
    store: Store = open_file(spec.path, size=spec.size, read_only=spec.read_only, block=spec.block)
    if spec.volatile_cache is not None:
        store = VolatileStore(store, spec.volatile_cache)
    try:
        return LogicalUnit(
            store,
            serial=spec.serial or default_serial,
            block=spec.block,
            read_only=spec.read_only,
            write_cache=spec.write_cache,
            soft_threshold=spec.soft_threshold or 0,
            tas=spec.tas is not False,
            state=_state(spec, SUFFIX),
            modes=_state(spec, MODES_SUFFIX),
        )
    except BadArgument:
        store.close()
        raise
