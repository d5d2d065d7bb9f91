"""What open-iscsi knows of targets: its node records, as named LUNs.

A record is a file ``TARGET/ADDRESS,PORT,TAG/IFACE`` below its directory of nodes, or, of older
versions, ``TARGET/ADDRESS,PORT,TAG``, with lines ``key = value`` (iscsiadm(8), iscsid.conf(5)).
The records of one target are its portals, and become one named LUN for all LUNs of the target.

Keys that mean something here become options. A key that does not, and has not the value that
open-iscsi gives it by itself, is named as left out. So is a file that is no record; it does not
keep the others from being read. No text here contains a secret.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iserblk.errors import BadArgument, IserblkError, PermissionDenied
from iserblk.options import COMMAND_TIMEOUT_S, FOREVER, Options
from iserblk.printable import printable
from iserblk.secret import Secret
from iserblk.url import name_portal, parse_url

NODES = (Path("/etc/iscsi/nodes"), Path("/var/lib/iscsi/nodes"))  # Debian's, other distributions'

_EMPTY = ("", "<empty>")
_AUTH = "node.session.auth."
_DEPTH = 1024  # the largest of queue-depth
_LONGEST_S = 86400  # of io-timeout
_LONGEST = 1 << 20  # bytes of a record that are read

# What editors and packages leave beside a file. A copy of a record is none: it may be an old one.
_COPY = re.compile(r"[.#].*|.*(~|\.(bak|old|orig|rej|save|sw[a-p]|tmp|dpkg-\w+|rpm\w+|ucf-\w+))")

# Keys that ``_Conversion`` reads, or that say where a record comes from.
_READ = {
    *("node.name", "node.tpgt", "node.startup", "node.conn[0].startup"),
    *("node.conn[0].address", "node.conn[0].port"),
    *("node.discovery_address", "node.discovery_port", "node.discovery_type"),
    *("iface.iscsi_ifacename", "iface.transport_name", "iface.initiatorname"),
    *(f"{_AUTH}{name}" for name in ("authmethod", "username", "password", "chap_algs")),
    *(f"{_AUTH}{name}" for name in ("username_in", "password_in")),
    "node.session.timeo.replacement_timeout",
    "node.session.cmds_max",
    *("node.session.iscsi.ImmediateData", "node.session.iscsi.InitialR2T"),
    *("node.conn[0].iscsi.HeaderDigest", "node.conn[0].iscsi.DataDigest"),
}

# Values that open-iscsi writes where nothing was set, for keys that have no meaning here.
_USUAL = {
    "node.leading_login": ("No",),
    "node.session.initial_cmdsn": ("0",),
    "node.session.initial_login_retry_max": ("4", "8"),
    "node.session.xmit_thread_priority": ("-20",),
    "node.session.queue_depth": ("32",),
    "node.session.nr_sessions": ("1",),
    "node.session.reopen_max": ("0", "32"),
    "node.session.scan": ("auto",),
    "node.session.timeo.replacement_timeout": ("120",),
    "node.session.err_timeo.abort_timeout": ("10", "15"),
    "node.session.err_timeo.lu_reset_timeout": ("20", "30"),
    "node.session.err_timeo.tgt_reset_timeout": ("20", "30"),
    "node.session.err_timeo.host_reset_timeout": ("60",),
    "node.session.iscsi.FastAbort": ("Yes",),
    "node.session.iscsi.FirstBurstLength": ("262144",),
    "node.session.iscsi.MaxBurstLength": ("16776192",),
    "node.session.iscsi.DefaultTime2Retain": ("0",),
    "node.session.iscsi.DefaultTime2Wait": ("2",),
    "node.session.iscsi.MaxConnections": ("1",),
    "node.session.iscsi.MaxOutstandingR2T": ("1",),
    "node.session.iscsi.ERL": ("0",),
    "node.conn[0].tcp.window_size": ("524288",),
    "node.conn[0].tcp.type_of_service": ("0",),
    "node.conn[0].timeo.logout_timeout": ("15",),
    "node.conn[0].timeo.login_timeout": ("15", "30"),
    "node.conn[0].timeo.auth_timeout": ("45",),
    "node.conn[0].timeo.noop_out_interval": ("5",),
    "node.conn[0].timeo.noop_out_timeout": ("5",),
    "node.conn[0].iscsi.MaxXmitDataSegmentLength": ("0",),
    "node.conn[0].iscsi.MaxRecvDataSegmentLength": ("131072", "262144"),
    "node.conn[0].iscsi.IFMarker": ("No",),
    "node.conn[0].iscsi.OFMarker": ("No",),
}


@dataclass(slots=True, frozen=True)
class NodeRecord:
    """One node record. ``values`` may have secrets."""

    path: Path
    values: Mapping[str, str] = field(repr=False)


@dataclass(slots=True)
class Imported:
    """What becomes of a target. ``urls``: its portals, with a user where CHAP is used; ``options``:
    of all URLs; ``secrets``: the initiator's and perhaps the target's; ``left_out``: what has no
    counterpart here; ``automatic``: open-iscsi logs in at boot. Without URLs nothing can be
    imported, and ``left_out`` says why."""

    target: str
    name: str
    urls: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    secrets: list[Secret] = field(default_factory=list, repr=False)
    left_out: list[str] = field(default_factory=list)
    automatic: bool = False


@dataclass(slots=True, frozen=True)
class Unread:
    """A file or directory that is no node record. ``target``: in whose directory it is; ``words``:
    its path, and what is wrong with it."""

    target: str
    words: str


@dataclass(slots=True, frozen=True)
class Nodes:
    """What is in a directory of nodes. ``targets``: in the order of their names."""

    targets: list[Imported]
    unread: list[Unread]


def read_nodes(directory: Path) -> Nodes:
    """All targets of a directory of nodes. Raises BadArgument when there is no such directory, and,
    as PermissionDenied, when nothing of what is in it can be read."""
    by_target: dict[str, list[NodeRecord]] = {}
    unread: list[Unread] = []
    problem: IserblkError | None = None
    for target in _listed(directory):
        if not target.is_dir():
            continue
        for path in _paths(target):
            try:
                if isinstance(path, IserblkError):
                    raise path
                record = _record(path)
            except IserblkError as error:
                unread.append(Unread(target.name, printable(str(error))))
                problem = problem or error
            else:
                by_target.setdefault(record.values["node.name"], []).append(record)
    if problem is not None and not by_target:
        raise problem
    taken: set[str] = set()
    return Nodes([_imported(name, by_target[name], taken) for name in sorted(by_target)], unread)


def _paths(target: Path) -> Iterator[Path | IserblkError]:
    """The files below the directory of a target; an error for a directory that cannot be read."""
    try:
        for portal in _listed(target):
            if not portal.is_dir():
                yield portal
                continue
            try:
                yield from _listed(portal)
            except IserblkError as error:
                yield error
    except IserblkError as error:
        yield error


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except PermissionError:
        raise PermissionDenied(f"{directory}: only root may read the nodes: use sudo") from None
    except OSError as error:
        raise BadArgument(
            f"{directory}: {error.strerror}; --from names another directory"
        ) from None


def _record(path: Path) -> NodeRecord:
    if _COPY.fullmatch(path.name):
        raise BadArgument(f"{path}: a copy that an editor or a package has left, not a node record")
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST).decode(errors="surrogateescape")
    except PermissionError:
        raise PermissionDenied(f"{path}: only root may read the nodes: use sudo") from None
    except OSError as error:
        raise BadArgument(f"{path}: {error.strerror}") from None
    values: dict[str, str] = {}
    for line in text.split("\n"):
        # open-iscsi ends a line of values with one blank or none; a secret may have blanks within.
        key, equals, value = line.partition("=")
        if line.startswith("#") or not line.strip():
            continue
        if not equals:
            raise BadArgument(f"{path}: no node record of open-iscsi: a line has no =")
        value = value.strip()
        if value not in _EMPTY:
            values[key.strip()] = value
    if "node.name" not in values or "node.conn[0].address" not in values:
        raise BadArgument(f"{path}: no node record of open-iscsi: it names no target and address")
    if not values["node.name"].isprintable():
        raise BadArgument(f"{path}: the name of its target has characters that no name has")
    return NodeRecord(path, values)


def _imported(target: str, records: Sequence[NodeRecord], taken: set[str]) -> Imported:
    found = Imported(target, _name_for(target, taken))
    own: list[dict[str, str]] = []
    portals: set[str] = set()
    for record in records:
        way = _Conversion(record)
        where = name_portal(way.address, way.port)
        if where in portals:
            face = record.values.get("iface.iscsi_ifacename", "default")
            found.left_out.append(f"{where}: a second record, for the interface {face}")
            continue
        found.left_out += [each for each in way.left_out if each not in found.left_out]
        try:
            url = way.url()
            if found.urls and way.secrets != found.secrets:
                raise BadArgument("other CHAP secrets than at the first portal")
        except IserblkError as error:
            found.left_out.append(f"{where}: {error}")
            continue
        portals.add(where)
        found.urls.append(url)
        found.secrets = way.secrets
        found.automatic |= record.values.get("node.startup") in ("automatic", "onboot")
        own.append(way.options)
    if own:
        # A comma ends an option behind -o.
        found.options = {
            key: value
            for key, value in own[0].items()
            if "," not in value and all(each.get(key) == value for each in own)
        }
        for index, keys in enumerate(own):
            left = [f"{key}={keys[key]}" for key in keys if key not in found.options]
            found.urls[index] += f"?{'&'.join(left)}" if left else ""
    found.left_out = [printable(each) for each in found.left_out]
    return found


def _name_for(target: str, taken: set[str]) -> str:
    """A name that says which target it is, and is none of ``taken``, to which it is added."""
    last = target.rpartition(":")[2] if ":" in target else target
    base = re.sub("[^A-Za-z0-9_.-]+", "-", last).strip("-.")[:56] or "lun"
    if re.fullmatch("nbd[0-9]+", base):
        base = f"lun-{base}"
    name, number = base, 2
    while name.lower() in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name.lower())
    return name


class _Conversion:
    """One record as a URL and options; what could not be converted is in ``left_out``."""

    def __init__(self, record: NodeRecord) -> None:
        self._values = record.values
        self.left_out: list[str] = []
        self.options: dict[str, str] = {}
        self.secrets: list[Secret] = []
        self.address = self._values["node.conn[0].address"].strip("[]")
        port = self._values.get("node.conn[0].port", "3260")
        self.port = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
        self.scheme = self._scheme()
        self._user = self._credentials()
        self._timeout()
        self._depth()
        self._negotiated()
        self._rest()

    def url(self) -> str:
        """Raises BadArgument when there is no URL for the record."""
        user = f"{self._user}@" if self._user else ""
        host = self.address
        if ":" in host:
            try:
                ipaddress.IPv6Address(host.partition("%")[0])
            except ValueError:
                raise BadArgument("not an address") from None
            if "%" in host:
                raise BadArgument("a link-local address: use another one of the target")
        text = f"{self.scheme}://{user}{name_portal(host, self.port)}/{self._values['node.name']}"
        if re.search(r"[\s\"'\\]", text):
            raise BadArgument("a blank, quote or backslash in the user's or target's name")
        if self._user and parse_url(text).user != self._user:
            raise BadArgument("the user's name has a character that a URL has no place for")
        parse_url(text)
        Options.from_pairs(self.options.items())
        return text

    def _drop(self, key: str, why: str = "") -> None:
        value = "(not shown)" if "password" in key else self._values[key]
        self.left_out.append(f"{key} = {value}{f': {why}' if why else ''}")

    def _scheme(self) -> str:
        key = "iface.transport_name"
        transport = self._values.get(key, "tcp")
        if transport not in ("tcp", "iser"):
            self._drop(key, "iserblk uses TCP, without the adapter's own iSCSI")
        name = self._values.get("iface.initiatorname")
        if name:
            self.options["initiator-name"] = name
        return "iser" if transport == "iser" else "iscsi"

    def _credentials(self) -> str:
        """The user of CHAP, or ""."""
        names = ("username", "password", "username_in", "password_in")
        user, secret, target_user, target_secret = (
            self._values.get(f"{_AUTH}{name}", "") for name in names
        )
        if self._values.get(f"{_AUTH}authmethod", "None") != "CHAP" or not (user and secret):
            for name in names:
                if f"{_AUTH}{name}" in self._values:
                    self._drop(f"{_AUTH}{name}", "CHAP is not in use there")
            return ""
        self.secrets = [Secret(secret)]
        if target_secret:
            self.secrets.append(Secret(target_secret))
        elif target_user:
            self._drop(f"{_AUTH}username_in", "the target's secret is not there")
        if target_secret and target_user:
            if re.search(r"[\s&\"'\\]", target_user):
                self._drop(f"{_AUTH}username_in", "a URL has no place for a character in it")
            else:
                self.options["target-user"] = target_user
        key = f"{_AUTH}chap_algs"
        algorithms = self._values.get(key, "MD5").upper().replace(" ", "").split(",")
        # MD5 is what open-iscsi offers by itself; iserblk offers it, too, behind better ones.
        known = {"SHA1": "sha1", "SHA256": "sha256", "SHA3-256": "sha3-256"}
        if len(algorithms) == 1 and algorithms[0] in known:
            self.options["auth"] = known[algorithms[0]]
        elif algorithms != ["MD5"] and not {*algorithms} <= {*known, "MD5"}:
            self._drop(key)
        return user

    def _timeout(self) -> None:
        key = "node.session.timeo.replacement_timeout"
        text = self._values.get(key)
        if text is None:
            return
        if not re.fullmatch("-?[0-9]{1,9}", text) or text.strip("-0") == "":
            self._drop(key)
            return
        seconds = min(int(text), _LONGEST_S)
        command = f"/{COMMAND_TIMEOUT_S:g}"  # Linux has the same limit for one command
        self.options["io-timeout"] = (
            f"{seconds}{command if seconds > COMMAND_TIMEOUT_S else ''}" if seconds > 0 else FOREVER
        )

    def _depth(self) -> None:
        key = "node.session.cmds_max"
        text = self._values.get(key, "128")
        if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
            self._drop(key)
        elif text != "128":
            self.options["queue-depth"] = str(min(int(text), _DEPTH))

    def _negotiated(self) -> None:
        session, connection = "node.session.iscsi.", "node.conn[0].iscsi."
        if self._values.get(f"{session}ImmediateData", "Yes") == "No":
            self.options["immediate-data"] = "no"
        if self._values.get(f"{session}InitialR2T", "No") == "Yes":
            self.options["unsolicited-data"] = "no"
        for key, option in (("HeaderDigest", "header-digest"), ("DataDigest", "data-digest")):
            text = self._values.get(f"{connection}{key}", "None").lower().replace(" ", "")
            if text == "none":
                continue
            if self.scheme == "iser":
                self._drop(f"{connection}{key}", "there are no digests over iSER")
            elif text in ("crc32c", "crc32c,none", "none,crc32c"):
                self.options[option] = text
            else:
                self._drop(f"{connection}{key}")

    def _rest(self) -> None:
        for key, value in self._values.items():
            if key in _READ or value in _USUAL.get(key, ()):
                continue
            if key.startswith("iface.") and value == "0":
                continue
            self._drop(key)


def default_nodes() -> Path:
    """The directory of nodes of this machine. Raises BadArgument when there is none."""
    for directory in NODES:
        if os.path.isdir(directory):
            return directory
    raise BadArgument(
        f"open-iscsi has no nodes here ({' or '.join(map(str, NODES))}); --from names another"
        " directory"
    )
