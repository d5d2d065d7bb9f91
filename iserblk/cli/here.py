"""What of iserblk runs on this machine: the only place that looks for it. ``status``, ``stats``,
``list`` and ``remove`` are about what is found here.

There are sockets of metrics, at which processes answer; records of processes, some of which serve
no metrics; and the state directories of attached devices. A user finds what that user runs, root
all of it; what another user may run is told as not seen.
"""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fuse_mount.mounted import is_ours
from iserblk.cli.states import BAD, KILLED, RUNNING, SERVING, SILENT, WRONG, lun_state
from iserblk.errors import (
    BadArgument,
    ConnectFailed,
    ConnectTimeout,
    IserblkError,
    PermissionDenied,
)
from iserblk.loop.clock import monotonic
from iserblk.metrics.address import directory, place_of, served, socket_of
from iserblk.metrics.places import Place, directories, in_directory, of_others
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.records import Found, running
from iserblk.metrics.scraping import scrape
from iserblk.metrics.target_reading import SessionReading, TargetReading
from iserblk.named.files import Named, load, names
from iserblk.nbd.kernel import device
from iserblk.nbd.kernel.device import Directories
from iserblk.nbd.kernel.server import Server
from iserblk.nbd.kernel.state import Home
from iserblk.url import parse_url

log = logging.getLogger(__name__)

DIRECTORIES = Directories()
ANSWER_S = 3.0  # until a process has answered
AGAIN_S = 1.0  # the same, where it had not answered in time at the look before
_MOST_LOOKS = 64
_MOST_PLACES = 8  # that a message names
_NAMES = ("iqn.", "eui.", "naa.")  # of targets


@dataclass(slots=True, frozen=True)
class Answer:
    """What a place at which metrics are served has said. ``reading``: None: nothing; ``state``
    then says what is wrong. ``at``: monotonic time of the reading."""

    place: Place
    reading: ProcessReading | None
    state: str = ""
    at: float = 0.0


@dataclass(slots=True, frozen=True)
class Use:
    """A LUN in use by a process, a target, or another process of iserblk.

    ``state``: one of those above. ``what``: the command. ``where``: a device, a mount point, an NBD
    socket, the first address of a target, …. ``url``: without user info and options; "" where the
    LUN is not known. ``size``, ``unflushed``: bytes; None: not known, or there is no LUN.
    ``since``: when the process began, in seconds since 1970; None: not known. ``pid``: 0: not
    known. ``uid``: of the user whose process it is; "" for a port. ``metrics``: where it serves
    them. ``portal``: in use. ``sessions``: of a target. ``away_since``: when the connection of the
    LUN was lost, in seconds since 1970; None: there is one, or that is not known.
    """

    state: str
    what: str
    where: str
    target: str = ""
    lun: int | None = None
    url: str = ""
    size: int | None = None
    unflushed: int | None = None
    since: int | None = None
    pid: int = 0
    uid: str = ""
    metrics: str = ""
    portal: str = ""
    session_count: int = 0
    sessions: tuple[SessionReading, ...] = ()
    away_since: int | None = None

    @property
    def bad(self) -> bool:
        return self.state in BAD

    @property
    def has_lun(self) -> bool:
        """Whether a LUN is in use: not with a target, and what has no LUNs."""
        return self.lun is not None


@dataclass(slots=True, frozen=True)
class Unseen:
    """What could not be looked at. ``user``: whose it is; "": this user's own. ``places``: those of
    which the names are known."""

    user: str
    places: tuple[str, ...]
    why: str

    @property
    def words(self) -> str:
        more = len(self.places) - _MOST_PLACES
        names = [*self.places[:_MOST_PLACES], *([f"{more} more"] if more > 0 else [])]
        where = f": {', '.join(names)}" if names else ""
        return f"{self.user}{where}: {self.why}" if self.user else self.why


@dataclass(slots=True)
class Here:
    """All that was found."""

    answers: list[Answer] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)


def look_around(*, sessions: bool = False, before: Here | None = None) -> Here:
    """Look for all of it; asks all processes at once, and waits ANSWER_S for each. ``sessions``:
    those of targets, too. ``before``: what the last look has found: what hangs since then is not
    waited for as long, so that it does not make each look long."""
    silent = {each.place for each in before.answers if each.state == SILENT} if before else set()
    sources = [each for where in directories() if (each := in_directory(where)) is not None]
    places = [place for source in sources for place in source.places]
    here = Here(unseen=_unseen())
    if places:
        with ThreadPoolExecutor(min(len(places), _MOST_LOOKS)) as pool:
            for answer in pool.map(partial(_ask, sessions=sessions, silent=silent), places):
                if isinstance(answer, Unseen):
                    here.unseen.append(answer)
                elif answer is not None:
                    here.answers.append(answer)
    records = {(str(found.uid), found.record.pid): found for found in running()}
    for answer in here.answers:
        found = _record_of(answer, records.values())
        if found is not None:
            del records[str(found.uid), found.record.pid]
        here.uses += _uses(answer, found)
    here.uses += [use for found in records.values() for use in _of_record(found)]
    known_places = {use.where for use in here.uses}
    here.uses += [use for use in _devices() if use.where not in known_places]
    return here


def _ask(place: Place, sessions: bool, silent: AbstractSet[Place]) -> Answer | Unseen | None:
    """None: its process has just ended."""
    owner = int(place.uid) if place.uid else None
    patience_s = AGAIN_S if place in silent else ANSWER_S
    try:
        reading = scrape(place.address, sessions=sessions, owner=owner, timeout_s=patience_s)
    except BadArgument:  # the socket has gone
        return None
    except PermissionDenied:
        return Unseen(user_name(place.uid), (place.where,), _THEIRS)
    except ConnectFailed:
        return Answer(place, None, KILLED)
    except ConnectTimeout:
        return Answer(place, None, SILENT)
    except IserblkError as error:
        log.info("%s", error)
        return Answer(place, None, WRONG)
    return Answer(place, reading, at=monotonic())


# --- what uses what ------------------------------------------------------------------------------


def _record_of(answer: Answer, records: Iterable[Found]) -> Found | None:
    """That of the process which has answered, or which should: it runs, and has the socket."""
    place, reading = answer.place, answer.reading
    for found in records:
        if str(found.uid) != place.uid:
            continue
        if reading is not None:
            if found.record.pid == reading.pid:
                return found
        elif (
            answer.state in (SILENT, WRONG)
            and isinstance(place.address, Path)
            and socket_of(found.record.where, place.address.parent) == place.address
        ):
            return found
    return None


def _uses(answer: Answer, found: Found | None) -> Iterator[Use]:
    """``found``: the record of the process that has answered, or should have."""
    place, reading = answer.place, answer.reading
    if reading is None and found is not None:
        for use in _of_record(found):
            yield replace(use, state=answer.state, metrics=str(place.address))
        return
    if reading is None:
        yield _dead(answer)
        return
    what = reading.command or _command(place.where, reading)
    where = found.record.where if found is not None else place.where  # a long one is a hash there
    rest = {
        "since": reading.began or _since(place),
        "pid": reading.pid,
        "uid": place.uid,
        "metrics": str(place.address),
    }
    for lun in reading.luns:
        yield Use(
            lun_state(lun),
            what,
            where,
            lun.target,
            lun.lun,
            lun.url,
            lun.size,
            lun.unflushed,
            away_since=lun.away_since or None,
            portal=lun.portal,
            **rest,  # type: ignore[arg-type]
        )
    for target in reading.targets:
        yield Use(
            SERVING,
            what,
            _portal(target),
            target.target,
            url=target.url,
            session_count=target.sessions,
            sessions=target.named_sessions,
            **rest,  # type: ignore[arg-type]
        )
    if not reading.luns and not reading.targets:
        yield Use(RUNNING, what, where, **rest)  # type: ignore[arg-type]


def _portal(target: TargetReading) -> str:
    return address_of(target.url) or target.target


def _dead(answer: Answer) -> Use:
    """A process that does not answer: what is known of it without its help."""
    place = answer.place
    found = Use(
        answer.state,
        _command(place.where, None),
        place.where,
        since=_since(place),
        uid=place.uid,
        metrics=str(place.address),
    )
    for each in _devices():
        if each.where == place.where:
            return Use(
                answer.state, each.what, each.where, each.target, each.lun, each.url, each.size,
                since=found.since, pid=each.pid, uid=found.uid, metrics=found.metrics,
            )  # fmt: skip
    return found


def _command(where: str, reading: ProcessReading | None) -> str:
    """What a process is that does not say so: it is dead, of an older version, or nbdkit's."""
    if (reading is not None and reading.targets) or where.startswith(_NAMES):
        return "target"
    if where.startswith(f"{DIRECTORIES.dev}/nbd"):
        return "attach"
    if where.startswith("/") and (is_ours(where) or os.path.isdir(where)):
        return "mount"
    return "nbd"


def _since(place: Place) -> int | None:
    """When the socket was made."""
    if not isinstance(place.address, Path):
        return None
    try:
        return int(os.lstat(place.address).st_mtime)
    except OSError:
        return None


def _of_record(found: Found) -> Iterator[Use]:
    record = found.record
    rest = {"since": record.began or None, "pid": record.pid, "uid": str(found.uid)}
    for each in record.luns:
        target, lun = _lun_of(each.url)
        yield Use(
            RUNNING,
            record.command,
            record.where,
            target,
            lun,
            each.url,
            each.size,
            **rest,  # type: ignore[arg-type]
        )
    if not record.luns:
        target = record.where if record.where.startswith(_NAMES) else ""
        yield Use(RUNNING, record.command, record.where, target, **rest)  # type: ignore[arg-type]


def _devices() -> Iterator[Use]:
    """Attached devices, whether their servers serve metrics or not: for root, as other users may
    not look into their state."""
    if os.geteuid():
        return
    for each in device.every(DIRECTORIES):
        home = Home(each)
        if not home.exists() or not home.is_ours():
            continue
        url = home.state().url
        target, lun = _lun_of(url)
        with Server(home) as server:
            state = KILLED if server.ended() else RUNNING
        try:
            since = int(home.directory.stat().st_mtime)
        except OSError:  # it was detached meanwhile
            continue
        yield Use(
            state, "attach", str(each.path), target, lun, url if target else "", each.size or None,
            since=since, uid="0",
        )  # fmt: skip


def _lun_of(url: str) -> tuple[str, int | None]:
    try:
        parsed = parse_url(url)
    except BadArgument:
        return "", None
    return parsed.iqn, parsed.lun


# --- what is not seen ----------------------------------------------------------------------------

_THEIRS = "only the owner and root can look"


def _unseen() -> list[Unseen]:
    found = []
    if directory() is None:
        found.append(
            Unseen(
                "",
                (),
                "XDG_RUNTIME_DIR is not set, so a mount, an NBD server or a target that this user"
                " runs cannot be found: log in as this user (su -l, ssh, machinectl shell)",
            )
        )
    hidden: dict[str, list[str]] = {}
    for where in of_others():
        try:
            owner = os.lstat(where).st_uid
            places = [place_of(path) for path in served(where)] if os.listdir(where) else []
        except FileNotFoundError:
            continue
        except OSError:
            hidden.setdefault(_owner_of_user(where), [])
        else:
            if places:
                hidden.setdefault(user_name(str(owner)), []).extend(places)
    return [*found, *(Unseen(user, tuple(places), _THEIRS) for user, places in hidden.items())]


def _owner_of_user(where: Path) -> str:
    """Of a directory that this user may not enter."""
    for each in (where, where.parent):
        try:
            return user_name(str(os.lstat(each).st_uid))
        except OSError:
            continue
    return "another user"


def user_name(uid: str) -> str:
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return f"user {uid}"


# --- by name -------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class NamedLun:
    """What a URL of a named LUN means. ``lun``: None: all of the target. ``address``: of its
    portal."""

    name: str
    target: str
    lun: int | None
    address: str

    def has(self, target: str, lun: int | None, url: str, portal: str = "") -> bool:
        """Whether it means this LUN, which is in use by ``url``, through ``portal``. The name of
        the target is not enough: the same one may be another target's elsewhere."""
        return (
            target.lower() == self.target.lower()
            and lun is not None
            and self.lun in (None, lun)
            and self.address in (address_of(url), portal)
        )

    def is_in(self, use: Use) -> bool:
        return self.has(use.target, use.lun, use.url, use.portal)


def address_of(url: str) -> str:
    """HOST:PORT of a URL without user info."""
    return url.partition("://")[2].partition("/")[0]


def luns_of(named: Named) -> list[NamedLun]:
    """Those of its URLs, except wrong ones."""
    found = []
    for text in named.urls:
        try:
            url = parse_url(text)
        except BadArgument:
            continue
        found.append(NamedLun(named.name, url.iqn, url.lun, address_of(url.redacted())))
    return found


def all_named() -> list[NamedLun]:
    """Those of all named LUNs that this user can read."""
    found: list[NamedLun] = []
    try:
        every = names()
    except IserblkError:
        return found
    for name in every:
        try:
            found += luns_of(load(name))
        except IserblkError as error:
            log.info("%s", error)
    return found


def uses_of(named: Sequence[NamedLun], here: Here) -> list[Use]:
    """What uses the LUNs of ``named``."""
    return [use for use in here.uses if any(each.is_in(use) for each in named)]


def places_of(name: str, what: str) -> list[str]:
    """Where the command ``what`` has LUNs of the named LUN ``name`` in use. Raises BadArgument."""
    uses = uses_of(luns_of(load(name)), look_around())
    return list(dict.fromkeys(use.where for use in uses if use.what == what and use.where))


def lun_name(use: Use, named: Sequence[NamedLun]) -> str:
    """The LUN by its name, if it has one; else by the names of the standard."""
    if use.lun is None:
        return use.target
    for each in named:
        if each.is_in(use):
            return each.name if each.lun is not None else f"{each.name}/{use.lun}"
    return f"{use.target}/{use.lun}"
