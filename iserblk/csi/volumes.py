"""What a volume is, as the orchestrator describes it, and what is known of those staged here.

A volume's context (``volumeAttributes``) has ``url``, the LUN's URL, or several, with white space
between them, for its paths; every other key is an option of iserblk, as on the command line. Its
secrets have ``user`` and ``password``, and for mutual CHAP ``target-password``.

The records lie in a directory below /run, which is empty after the machine has started again, as
its devices and mounts are:

    KEY.json     the volume, and how far staging has come
    KEY.secret   CHAP secrets (mode 0600), for the first server of the device and its successors
    KEY.lock     held (flock) during a call

KEY is a hash of the volume's id, which may contain any character.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from iserblk import files
from iserblk.csi import messages
from iserblk.csi.refusals import Code, Refused
from iserblk.errors import IserblkError
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.options import OPTION_NAMES, Options
from iserblk.url import parse_url

PATIENCE_S = 60.0  # a kubelet waits for two minutes
_LOOK_S = 0.1
_call = threading.local()
MOUNT, BLOCK = "mount", "block"
FILE_SYSTEMS = ("ext4", "ext3", "ext2", "xfs", "btrfs")
_FOREIGN = ("csi.storage.k8s.io/", "storage.kubernetes.io/")  # keys that Kubernetes adds
_SECRETS = ("target-password", "chap-secret-file", "chap-secret-fd", "chap-secret-credential")
_ISID = "isid: each server has a session of its own; leave it out"
_CHAP = "put CHAP into the volume's secret: user, password, target-password"
_NOT_IN_USERS = "%:/@? "  # they have a meaning in a URL
_MODES = {
    messages.SINGLE_NODE_WRITER,
    messages.SINGLE_NODE_READER_ONLY,
    messages.MULTI_NODE_READER_ONLY,
    messages.MULTI_NODE_SINGLE_WRITER,
    messages.MULTI_NODE_MULTI_WRITER,
    messages.SINGLE_NODE_SINGLE_WRITER,
    messages.SINGLE_NODE_MULTI_WRITER,
}
_READERS = (messages.SINGLE_NODE_READER_ONLY, messages.MULTI_NODE_READER_ONLY)
_OF_MANY_NODES = (messages.MULTI_NODE_SINGLE_WRITER, messages.MULTI_NODE_MULTI_WRITER)


@dataclass(slots=True, frozen=True)
class Volume:
    """``urls``: with the user in them, without secrets. ``kind``: MOUNT or BLOCK. ``fs`` and
    ``flags``: of the file system, for MOUNT. ``device``: the path of the device that it is, or is
    about to be, attached at; "": none yet. ``formatting``: mkfs has begun, and has not ended.
    ``staged``: NodeStageVolume has ended well. ``targets``: where it is, or is about to be,
    published; ``read_only_at``: those of them that were asked for read-only; ``alone``: with an
    access mode that allows no second one."""

    volume_id: str
    urls: tuple[str, ...]
    options: dict[str, str]
    staging: str
    kind: str
    fs: str = ""
    flags: tuple[str, ...] = ()
    read_only: bool = False
    has_secret: bool = False
    device: str = ""
    formatting: bool = False
    staged: bool = False
    targets: tuple[str, ...] = ()
    read_only_at: tuple[str, ...] = ()
    alone: bool = False

    @property
    def place(self) -> str:
        """Where it is mounted while it is staged: the file system, or the device itself. The mount
        tells the device when the record is lost, and does not outlive the machine's restart."""
        return self.staging if self.kind == MOUNT else device_below(self.staging)

    @property
    def is_remnant(self) -> bool:
        """Whether it was found by its mount when it was to be unstaged, and its record was lost:
        what is known of it is its device, and the LUN's URL without user and options."""
        return self.kind == MOUNT and not self.fs

    @property
    def shared(self) -> bool:
        """Whether several programs may write to the LUN at once, which pods agree on. Raises
        BadArgument when the option has no value of its kind."""
        common = self.options.get("shared", "no")
        said = [parse_url(url).options.get("shared", common) for url in self.urls]
        return all(Options.from_pairs([("shared", each)]).shared for each in said)

    def luns(self) -> set[tuple[str, int | None, str]]:
        """Target names and LUNs in its URLs, whatever the portals; and the initiator name that was
        asked for, because a target may have other LUNs for another initiator."""
        common = self.options.get("initiator-name", "")
        return {
            (url.iqn.lower(), url.lun, url.options.get("initiator-name", common).lower())
            for url in map(parse_url, self.urls)
        }

    def is_as(self, other: Volume) -> bool:
        """Whether both were asked for in the same way."""
        return self == replace(
            other,
            device=self.device,
            formatting=self.formatting,
            staged=self.staged,
            targets=self.targets,
            read_only_at=self.read_only_at,
            alone=self.alone,
        )


def device_below(staging: str) -> str:
    """Where a block volume's device is shown below its staging path, which is a directory."""
    return f"{staging}/device"


def volume_of(request: Any) -> tuple[Volume, str]:
    """What a NodeStageVolumeRequest asks for, and the lines of its secret file ("": no secrets).
    Raises Refused."""
    volume_id = needed(request, "volume_id")
    staging = needed(request, "staging_target_path")
    kind, fs, flags, mode = capability_of(request)
    urls, options = _addresses(dict(request.volume_context))
    if kind == MOUNT and mode in _OF_MANY_NODES:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"volume {volume_id}: several nodes cannot write to one file system; use "
            "volumeMode: Block, or an access mode of one node",
        )
    if mode == messages.MULTI_NODE_MULTI_WRITER:
        options.setdefault("shared", "yes")
    elif mode not in _READERS and mode not in _OF_MANY_NODES:
        options.setdefault("reserve", "exclusive")
    secrets = dict(request.secrets)
    user = secrets.get("user", "")
    if any(character in _NOT_IN_USERS or not character.isprintable() for character in user):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"volume {volume_id}: a user of CHAP without any of %:/@? or space",
        )
    if user:
        urls = [_with_user(url, user) for url in urls]
    secret = secrets.get("password", "")
    if bool(user) != bool(secret):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"volume {volume_id}: the secret must have both user and password, or neither",
        )
    target_secret = secrets.get("target-password", "")
    if target_secret and not secret:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"volume {volume_id}: the secret has target-password without user and password",
        )
    if any(character in text for text in (secret, target_secret) for character in "\r\n\0"):
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"volume {volume_id}: a password of CHAP is one line, without its end",
        )
    lines = "".join(f"{line}\n" for line in (secret, target_secret) if line)
    volume = Volume(
        volume_id, tuple(urls), options, staging, kind, fs, flags, mode in _READERS, bool(lines)
    )
    return volume, lines


def needed(request: Any, name: str) -> str:
    """A field that must not be empty. Raises Refused."""
    value = getattr(request, name)
    if not value:
        raise Refused(Code.INVALID_ARGUMENT, f"{name} is missing")
    if "\0" in value:
        raise Refused(Code.INVALID_ARGUMENT, f"{name}: has a character NUL")
    if name.endswith("_path") and not value.startswith("/"):
        raise Refused(Code.INVALID_ARGUMENT, f"{name}: not an absolute path: {value}")
    return str(value)


def capability_of(request: Any) -> tuple[str, str, tuple[str, ...], int]:
    """Kind, file system, mount flags and access mode that a request asks for. Raises Refused."""
    if not request.HasField("volume_capability"):
        raise Refused(Code.INVALID_ARGUMENT, "volume_capability is missing")
    capability = request.volume_capability
    mode = capability.access_mode.mode
    if mode not in _MODES:
        raise Refused(Code.INVALID_ARGUMENT, f"access mode {mode} is not known here")
    if capability.HasField("block") == capability.HasField("mount"):
        raise Refused(Code.INVALID_ARGUMENT, "volume_capability: name one of block and mount")
    if capability.HasField("block"):
        return BLOCK, "", (), mode
    fs = capability.mount.fs_type or FILE_SYSTEMS[0]
    if fs not in FILE_SYSTEMS:
        raise Refused(
            Code.INVALID_ARGUMENT,
            f"file system {fs} is not known here; one of {', '.join(FILE_SYSTEMS)}",
        )
    flags = tuple(capability.mount.mount_flags)
    if any("\0" in flag for flag in flags):
        raise Refused(Code.INVALID_ARGUMENT, "mount_flags: have a character NUL")
    return MOUNT, fs, flags, mode


def _addresses(context: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    urls = context.pop("url", "").split()
    if not urls:
        raise Refused(
            Code.INVALID_ARGUMENT, "volumeAttributes: url is missing: iser://HOST/TARGET-IQN/LUN"
        )
    options = {}
    for name, value in context.items():
        if name.startswith(_FOREIGN):
            continue
        if name == "isid":
            raise Refused(Code.INVALID_ARGUMENT, f"volumeAttributes: {_ISID}")
        if name in _SECRETS:
            raise Refused(Code.INVALID_ARGUMENT, f"volumeAttributes: {name}: {_CHAP}")
        if name not in OPTION_NAMES or "," in value or "\0" in value:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"volumeAttributes: {name}: "
                + ("no option of iserblk" if name not in OPTION_NAMES else "a comma or NUL in it"),
            )
        options[name] = value
    for url in urls:
        try:
            parsed = parse_url(url)
        except IserblkError as error:
            raise Refused(Code.INVALID_ARGUMENT, f"volumeAttributes: {error}") from None
        if parsed.password or any(name in parsed.options for name in _SECRETS):
            raise Refused(Code.INVALID_ARGUMENT, f"volumeAttributes: url: {_CHAP}")
        if "isid" in parsed.options:
            raise Refused(Code.INVALID_ARGUMENT, f"volumeAttributes: url: {_ISID}")
        if not parsed.iqn or parsed.lun is None:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"volumeAttributes: {parsed.redacted()}: name one LUN: iser://HOST/TARGET-IQN/LUN",
            )
    return urls, options


def _with_user(url: str, user: str) -> str:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{user}@{authority.rpartition('@')[2]}{slash}{path}"


class Records:
    """The records in ``directory``, which is made when it is needed. ``patience_s``: how long a
    call waits for another one for its volume, and for an attempt to give it a new server."""

    def __init__(self, directory: Path, patience_s: float = PATIENCE_S) -> None:
        self._directory = directory
        self._patience_s = patience_s

    def _path(self, volume_id: str, suffix: str) -> Path:
        key = hashlib.sha256(volume_id.encode()).hexdigest()[:32]
        return self._directory / f"{key}.{suffix}"

    @contextlib.contextmanager
    def locked(self, volume_id: str, patience_s: float | None = None) -> Iterator[None]:
        """No other call for this volume runs meanwhile, in any process; nor a program that a killed
        plugin has left running (``lock_of_call``). Raises Refused when that has not ended after
        ``patience_s`` (default: that of the records). Not to be nested."""
        end = monotonic() + (self._patience_s if patience_s is None else patience_s)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._path(volume_id, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _flocked(lock):
                if monotonic() >= end:
                    raise Refused(
                        Code.ABORTED, f"volume {volume_id}: another call for it is under way"
                    )
                sleep(_LOOK_S)
            _call.locks = (lock,)
            yield
        finally:
            _call.locks = ()
            fcntl.flock(lock, fcntl.LOCK_UN)  # whatever else has a duplicate of it
            os.close(lock)

    def get(self, volume_id: str) -> Volume | None:
        return _read(self._path(volume_id, "json"))

    def all(self) -> list[Volume]:
        volumes = (_read(path) for path in sorted(self._directory.glob("*.json")))
        return [volume for volume in volumes if volume is not None]

    def put(self, volume: Volume) -> Volume:
        """Write the record, in one step; it is there when this returns. Returns ``volume``."""
        self.write(self._path(volume.volume_id, "json"), json.dumps(asdict(volume)))
        return volume

    def put_secret(self, volume: Volume, lines: str) -> None:
        if lines:
            self.write(self.secret(volume), lines)
        else:
            self.secret(volume).unlink(missing_ok=True)

    def secret(self, volume: Volume) -> Path:
        return self._path(volume.volume_id, "secret")

    def remove(self, volume_id: str) -> None:
        """Remove all that is known of the volume, what a killed plugin has left included."""
        for suffix in ("secret", "secret.new", "json.new", "json"):
            self._path(volume_id, suffix).unlink(missing_ok=True)

    def write(self, path: Path, text: str) -> None:
        """Replace the file, in one step; only its owner may read it."""
        part = path.with_name(f"{path.name}.new")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        part.rename(path)


def lock_of_call() -> tuple[int, ...]:
    """Descriptors that programs inherit which change something for the call of this thread: its
    volume stays locked until they have ended, also if the plugin is killed before."""
    return getattr(_call, "locks", ())


def _flocked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> Volume | None:
    try:
        fields: Mapping[str, Any] = json.loads(files.read_text(path))
        lists = {name: tuple(fields[name]) for name in ("urls", "flags", "targets")}
        lists["read_only_at"] = tuple(fields.get("read_only_at", ()))
        return Volume(**{**fields, **lists})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # none, or one of another version: what is there is found by its mounts
