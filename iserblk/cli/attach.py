"""``iserblk attach``: LUNs as block devices /dev/nbdX."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import click

from iserblk.cli.command import Command, Rare
from iserblk.cli.notify import tell_systemd
from iserblk.cli.options import connection, connection_options_but, json_option
from iserblk.cli.output import print_json
from iserblk.disk.blocking import open_disks
from iserblk.disk.lun.identity import lasting_name
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.seam import LunInfo
from iserblk.disk.writers import is_shared, warn_of_writers
from iserblk.endings import Endings, ending_signals
from iserblk.errors import BadArgument, Busy, IserblkError
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.named.files import Named, may_be_name
from iserblk.named.resolving import resolve
from iserblk.nbd.kernel import device
from iserblk.nbd.kernel.attaching import Lun, attach, check_system, replace, warn_of_panic
from iserblk.nbd.kernel.client import kernel_seconds
from iserblk.nbd.kernel.detaching import detach
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.server import Server
from iserblk.nbd.kernel.state import Home
from iserblk.options import LASTING, LASTING_WORDS
from iserblk.pidfile import read_pid
from iserblk.scsi.udev_names import properties
from iserblk.url import is_url, parse_url

log = logging.getLogger(__name__)

DIRECTORIES = Directories()
_CONNECTIONS, _OF_NBDKIT = 1, 4  # of a device, by default
_LOOK_S = 1.0  # how often an attach in the foreground checks for a signal
_LASTING = (7, 13, 24, 27)  # exit statuses of errors that another attempt does not mend
_ENDING_S = 1.0  # between the end of a server and that of its device, when a process detaches it


@click.command("attach", cls=Command)
@click.argument("arguments", metavar="URL… [/dev/nbdX]", nargs=-1, required=True)
@click.option(
    "-f",
    "--foreground",
    is_flag=True,
    help="Stay in the foreground; detach on SIGTERM, SIGINT or SIGHUP.",
)
@click.option(
    "-o",
    "words",
    metavar="OPT,OPT",
    multiple=True,
    help="Options of the connection as NAME=VALUE, separated by commas; connections=N is of the"
    " session.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 16),
    help="NBD connections from the kernel to the server."
    f" Default {_CONNECTIONS}, with --nbdkit {_OF_NBDKIT}. Those of the session are `-o"
    " connections=N`.",
    cls=Rare,
)
@click.option(
    "--nbdkit",
    "by_nbdkit",
    is_flag=True,
    help="Serve by nbdkit with the plugin of iserblk, 16 requests at once on each connection.",
    cls=Rare,
)
@click.option(
    "--replace",
    "to_replace",
    is_flag=True,
    help="If the LUN is attached at /dev/nbdX already, give the device a new server.",
)
@json_option
@connection_options_but("connections", defaults=LASTING_WORDS)
def command(
    arguments: tuple[str, ...],
    foreground: bool,
    words: tuple[str, ...],
    connections: int | None,
    by_nbdkit: bool,
    to_replace: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Attach the LUN of URL as the block device /dev/nbdX; without one as that of a named LUN, or
    the first free /dev/nbdX.

    Prints `ready /dev/nbdX` once the device is usable; `iserblk detach /dev/nbdX` ends it. Several
    URLs, or a URL without /LUN, attach several LUNs, each as its own device; if one LUN fails, none
    is attached. Needs root. Loads the kernel's nbd module if necessary.
    """
    given = {**_options(words), **connection(options)}
    named = [text for text in arguments if is_url(text) or may_be_name(text)]
    paths = [text for text in arguments if text not in named]
    if not named:
        raise BadArgument(f"{arguments[0]}: not a URL; write iser://HOST/TARGET-IQN/LUN")
    resolved = resolve(named, given)
    if resolved.words:
        raise BadArgument(f"-o {resolved.words[0]}: of mount, in the file of a named LUN; attach"
                          " has no such option")  # fmt: skip
    urls = resolved.urls
    given = {**LASTING, **given}
    paths = paths or _devices(resolved.named, len(named))
    settle(urls, given)
    check_system(DIRECTORIES, by_nbdkit=by_nbdkit)
    wanted = [device.find(path, DIRECTORIES) for path in paths]
    if len(set(wanted)) < len(wanted):
        raise BadArgument("one device is named twice")
    if to_replace and not wanted:
        raise BadArgument("--replace: name the device: `iserblk attach --replace URL /dev/nbdX`")
    infos = _find(urls, given, to_replace)
    luns = [_lun(urls, given, info, by_nbdkit) for info in infos]
    warn_of_panic(max((lun.io_timeout for lun in luns), default=0.0), DIRECTORIES)
    if wanted and len(wanted) != len(luns):
        raise BadArgument(
            f"{len(luns)} LUNs for {len(wanted)} device(s): name one LUN per device "
            "(iser://HOST/TARGET-IQN/LUN), or leave the devices out"
        )
    served: list[tuple[Device, Lun]] = []
    attached: list[Device] = []
    try:
        for index, lun in enumerate(luns):
            at = wanted[index] if wanted else None
            if at is None or not (to_replace and replace(lun, at)):
                at = attach(
                    lun, at, connections or (_OF_NBDKIT if by_nbdkit else _CONNECTIONS), DIRECTORIES
                )
                attached.append(at)
            served.append((at, lun))
        told = Endings(ending_signals())
        if foreground:  # a signal raises nothing any more
            told.listen()
        if not is_shared(urls, given):
            _warn(infos, [at for at, _ in served])
        _say(served, as_json)
        if foreground:
            tell_systemd("READY=1")
    except BaseException:
        _undo(attached)  # what was attached before stays, whatever its server is now
        raise
    if foreground:
        _stay(dict(served), told)


def _devices(files: Sequence[Named], count: int) -> list[str]:
    """The devices that the files of named LUNs name, where the user named none. ``count``: of the
    arguments."""
    having = [each for each in files if each.devices]
    if having and len(having) < count:
        raise BadArgument(
            f"{having[0].name} has a device of its own, and not all else here has: name the"
            " devices, or attach them one by one"
        )
    return [path for each in having for path in each.devices]


def _options(lists: Sequence[str]) -> dict[str, str]:
    """The ``name=value`` words of -o. Words that only mount(8) knows (``defaults``, …) are
    refused."""
    found: dict[str, str] = {}
    for word in ",".join(lists).split(","):
        name, equals, value = word.partition("=")
        if name == "isid":
            raise BadArgument("-o isid: attach gives each server a session of its own")
        if word and not equals:
            raise BadArgument(f"-o {word}: write NAME=VALUE")
        if name.replace("_", "-") == "target-password":
            raise BadArgument(f"-o {name}: every user would see it; put it into chap-secret-file")
        if word:
            found[name.replace("_", "-")] = value
    return found


def _find(urls: Sequence[str], given: Mapping[str, str], in_use: bool) -> list[LunInfo]:
    """Log in, and find the LUNs that the URLs mean. Errors are found here, before anything is
    started. ``in_use``: another process of ours may have reserved them."""
    looked = [_without_reservation(text) for text in urls] if in_use else urls
    options = {name: value for name, value in given.items() if not in_use or name != "reserve"}
    with open_disks(looked, options) as disks:
        return [disk.info for disk in disks.disks.values()]


def _warn(infos: Sequence[LunInfo], devices: Sequence[Device]) -> None:
    """Of other processes that write to the LUNs, beside the servers of ``devices``."""
    for info, at in zip(infos, devices, strict=True):
        warn_of_writers([info], pid=read_pid(Home(at).server_pid))


def _without_reservation(text: str) -> str:
    head, _, query = text.partition("?")
    words = [word for word in query.split("&") if word and not word.startswith("reserve=")]
    return f"{head}?{'&'.join(words)}" if words else head


def _lun(urls: Sequence[str], given: Mapping[str, str], info: LunInfo, by_nbdkit: bool) -> Lun:
    paths = []
    for text in urls:
        url = parse_url(text)
        if url.iqn.lower() == info.target.lower() and url.lun in (None, info.lun):
            head, question, query = text.partition("?")
            number = f"/{info.lun}" if url.lun is None else ""
            paths.append(f"{head}{number}{question}{query}")
    settled = [address.options for address in settle(paths, given)]
    return Lun(
        paths,
        parse_url(paths[0]).redacted(),
        given,
        kernel_seconds(max(options.io_timeout for options in settled)),
        info.size,
        info.block_size,
        info.max_transfer,
        _name(info),
        by_nbdkit,
        any(options.reserve for options in settled),
        _for_udev(info),
    )


def _for_udev(info: LunInfo) -> dict[str, str]:
    """What udev would have of the LUN from the kernel's own initiator; and ID_ISERBLK, where there
    is a name for links."""
    found = properties(info.vendor, info.product, info.revision, info.serial, info.designators)
    named = found.get("ID_SERIAL")
    return {**found, "ID_ISERBLK": named} if named else found


def _name(info: LunInfo) -> str:
    """Names the LUN, whatever the path to it; by the target, where the LUN has no identifier."""
    return (
        lasting_name(info.identifiers) or f"{info.target.lower()}/{info.lun} {info.serial}".rstrip()
    )


def _say(served: Sequence[tuple[Device, Lun]], as_json: bool) -> None:
    if as_json:
        found = [
            {
                "device": str(device.path),
                "url": lun.url,
                "size": lun.size,
                "block_size": lun.block_size,
            }
            for device, lun in served
        ]
        print_json({"devices": found})
    else:
        for device, _ in served:
            click.echo(f"ready {device.path}")
    sys.stdout.flush()


def _undo(attached: Sequence[Device]) -> None:
    """Detach again after an error. Errors of this are logged only: the caller raises the first."""
    for each in attached:
        try:
            detach(each)
        except IserblkError as error:
            log.error("%s", error)


# --- in the foreground -------------------------------------------------------------------------


def _stay(served: Mapping[Device, Lun], told: Endings) -> None:
    """Wait until other processes have detached every device; after a signal, detach them here. A
    server that died gets a successor. Raises IserblkError when none can serve, for io-timeout."""
    left = dict(served)
    since: dict[Device, float] = {}  # the first successor that could not serve
    while left and not told.first:
        _reap()  # not when one is found to have ended: it may need a moment more
        for each, lun in list(left.items()):
            with Server(Home(each)) as server:
                ended = server.ended(0 if told.first else _LOOK_S / len(left))
            if not ended or told.first:
                continue
            try:
                if not _has_successor(each, lun):
                    del left[each]
                since.pop(each, None)
            except IserblkError as error:
                said = f"{each.path}: its server has died; {error}"
                now = monotonic()
                if error.exit_status in _LASTING or now > since.get(each, now) + lun.io_timeout:
                    raise IserblkError(said) from None
                if each not in since:
                    log.warning("%s; trying again", said)
                    since[each] = now
    tell_systemd("STOPPING=1")
    problem: IserblkError | None = None
    for each in left:
        try:
            _detach_when_unused(each, told)
        except IserblkError as error:
            if problem is not None:
                log.error("%s", error)
            problem = problem or error
    if problem is not None:
        raise problem


def _has_successor(each: Device, lun: Lun) -> bool:
    """Called when the device's server has ended: because another process is detaching the device,
    or replacing the server, or because the server died. False: the device is detached. Raises
    IserblkError when a successor of a server that died could not serve."""
    deadline = monotonic() + _ENDING_S
    while Home(each).is_ours():
        with Server(Home(each)) as server:
            if not server.ended():
                return True
        if monotonic() > deadline:
            try:
                if replace(lun, each):
                    log.warning("%s: its server has died; it has a new one", each.path)
            except Busy:  # a detach or another replace is under way
                deadline = monotonic() + _ENDING_S
        sleep(_ENDING_S / 20)
    return False


def _reap() -> None:
    """The servers that this process has started are its children: remove those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _detach_when_unused(each: Device, told: Endings) -> None:
    """Detach once no process uses the device. Raises Busy when the user has lost patience."""
    said = ""
    wish = Home(each).wish
    while True:
        wish.make()  # the requests of what uses it are not to wait for a target that is away
        try:
            detach(each)
        except Busy as error:
            if told.impatient:
                wish.withdraw()
                raise
            if str(error) != said:
                log.warning("%s (waiting; another signal ends this)", error)
                said = str(error)
            sleep(_LOOK_S)
        else:
            return
