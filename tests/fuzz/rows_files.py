"""What people and programs write for iserblk to read: URLs and options, and files of every kind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from iserblk.credentials import read_accounts, read_secret
from iserblk.csi.volumes import Records
from iserblk.doctor.hiding import Hider
from iserblk.doctor.journal import parse_line_untrusted
from iserblk.errors import BadArgument, NotSupported, PermissionDenied
from iserblk.images import image_format
from iserblk.metrics.records import parse_record_untrusted
from iserblk.named.files import parse as parse_named
from iserblk.named.open_iscsi import read_nodes
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.owed import Owed
from iserblk.nbd.kernel.state import Home
from iserblk.options import Options, parse_size
from iserblk.pidfile import read_pid
from iserblk.secret import Secret
from iserblk.target.access import read_access
from iserblk.target.config_file import read_config
from iserblk.target.lunlist import read_lun_list
from iserblk.target.lunspec import parse_lun_spec
from iserblk.target.ports import read_states
from iserblk.url import parse_place, parse_portal, parse_url, split_url
from tests.fuzz.engine import Row, decoder
from tests.support.target import ROOT

_REFUSES = (BadArgument, NotSupported)
_URLS = (
    b"iser://h/iqn.x:y/0",
    b"iscsi://user%secret@[fe80::1%eth0]:3260/iqn.2026-11.example:disk/16383?io-timeout=5",
    b"iser://10.0.0.1:3260,1/iqn.x:y?rcap=iwarp&mpa-crc=no&target_password=x&journal=1.5G",
    b"iser://%41:%zz@h:0/%20/1",
)
_RECORD = b"""# BEGIN RECORD 2.1.8
node.name = iqn.2026-11.example:disk
node.tpgt = 1
node.startup = automatic
iface.transport_name = tcp
node.conn[0].address = 10.0.0.1
node.conn[0].port = 3260
node.session.auth.authmethod = CHAP
node.session.auth.username = user
node.session.auth.password = secret
node.session.timeo.replacement_timeout = 120
node.session.cmds_max = 128
# END RECORD
"""
_NAMED = b"""# made by iserblk add
URL="iser://h/iqn.x:y/0 iser://i/iqn.x:y/0"
OPTIONS='io-timeout=5 label="a b"'
MOUNTPOINT=/mnt/a\\ b
"""
_PROCESS = b"""{"pid": 7, "command": "mount", "where": "/mnt", "began": 1764000000, "luns": [
{"url": "iser://h/iqn.x:y/0", "size": 4096, "writes": true, "identifiers": ["naa.6001"]}]}"""
_JOURNAL = b"""{"__REALTIME_TIMESTAMP": "1764000000000000", "SYSLOG_IDENTIFIER": "iserblk-nbd0",
"MESSAGE": [104, 117, 115, 104], "UNIT": "iserblk-nbd@x.service", "_COMM": "iser://u%hush-hush@h"}
"""
_VOLUME = b"""{"volume_id": "v", "urls": ["iser://h/iqn.x:y/0"], "options": {}, "flags": ["ro"],
"targets": ["/a"], "read_only_at": []}"""


class _File:
    """A file in memory, which only its owner may read, with the bytes of each case."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("fuzz")
        os.fchmod(self._fd, 0o600)
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def at(self, path: Path) -> None:
        """The same file by another name."""
        path.parent.mkdir(parents=True)
        path.symlink_to(self.path)

    def of(self, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def run(data: bytes) -> object:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
            return read(self.path)

        return run


_FILE = _File()
_DIRECTORY = tempfile.TemporaryDirectory(prefix="iserblk-fuzz.")
_BELOW = Path(_DIRECTORY.name)
_DEVICE = Home(Device("nbd0", Directories(run=_BELOW)))
for _name in ("nodes/iqn.x:y/10.0.0.1,3260,1/default", "volumes/one.json", "nbd0/state.json"):
    _FILE.at(_BELOW / _name)


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode(errors="surrogateescape"))


def _options(text: str) -> None:
    parts = [each.partition("=") for each in text.split("&")]
    Options.from_pairs([(name, value) for name, _, value in parts])


def _portal(text: str) -> None:
    parse_portal(text)


def _owed(path: Path) -> None:
    count = Owed(path).read()
    assert 0 <= count.told <= count.losses


def _pid(path: Path) -> None:
    assert read_pid(path) >= 0


ROWS: tuple[Row, ...] = (
    decoder("URL", _text(parse_url), *_URLS, allowed=_REFUSES),
    decoder("URL of a portal or LUN", _text(parse_place), *_URLS, b"h:3260", allowed=_REFUSES),
    decoder("URL in parts", _text(lambda text: split_url(text, False)), *_URLS, allowed=_REFUSES),
    decoder("portal's address", _text(_portal), b"h:1", b"[::1]:65535", b"h", allowed=_REFUSES),
    decoder(
        "options",
        _text(_options),
        b"io-timeout=5&mpa-crc=yes&rcap=verbs:mlx5_0/1",
        b"header-digest=crc32c,none&queue-depth=128&journal=off&max-transfer=1.5M&isid=0x1",
        b"reserve=exclusive&reserve-key=0xffffffffffffffff&portals=discover&connections=4",
        allowed=_REFUSES,
    ),
    decoder("line of a journal", parse_line_untrusted, _JOURNAL),
    decoder("text with secrets", _text(Hider([Secret("hush-hush")]).text), _JOURNAL, *_URLS),
    decoder("record of a process", _text(parse_record_untrusted), _PROCESS),
    decoder(
        "size",
        _text(lambda text: parse_size(text, "size")),
        b"1.5G",
        b"9" * 19 + b"T",
        allowed=_REFUSES,
    ),
    decoder(
        "LUN of a target",
        _text(parse_lun_spec),
        b"/x/disk:size=1G:serial=S:block=4096:volatile-cache=1K:wce=0:ro",
        b"iscsi://h/iqn.x:y/0 iser://i/iqn.x:y/0:ro",
        allowed=_REFUSES,
    ),
    decoder(
        "file of LUNs",
        _FILE.of(read_lun_list),
        b"# LUNs\n0 /x/a:size=1M\n1 iscsi://h/iqn.x:y/0\n16383 b:ro\n",
        allowed=_REFUSES,
    ),
    decoder(
        "file of access",
        _FILE.of(read_access),
        b"iqn.x:one 0,1-3,7 user\niqn.x:two all\n* none\n",
        allowed=_REFUSES,
    ),
    decoder(
        "file of access states",
        _FILE.of(read_states),
        b"1 optimized settable\n2 standby\nexplicit\n",
        allowed=_REFUSES,
    ),
    decoder(
        "file of accounts",
        _FILE.of(lambda path: read_accounts(str(path))),
        b"user:secret\n# x\nother: with blanks \r\n",
        allowed=_REFUSES,
    ),
    decoder(
        "file of a secret",
        _FILE.of(lambda path: read_secret(str(path), "chap-secret-file")),
        b"a secret of twelve\n",
        allowed=_REFUSES,
    ),
    decoder(
        "file of a target",
        _FILE.of(read_config),
        (ROOT / "docs/target.toml").read_bytes(),
        b'iqn = "iqn.x:y"\n[[lun]]\nfile = "a"\nsize = "1G"\n[account.u]\nsecret = "s"\n',
        allowed=_REFUSES,
    ),
    decoder(
        "file of a named LUN", _text(lambda text: parse_named(text, "x")), _NAMED, allowed=_REFUSES
    ),
    decoder(
        "node record",
        _FILE.of(lambda _: read_nodes(_BELOW / "nodes")),
        _RECORD,
        allowed=(BadArgument, PermissionDenied),
    ),
    decoder(
        "record of a volume",
        _FILE.of(lambda _: Records(_BELOW / "volumes").all()),
        _VOLUME,
        b"[" * 4096,
    ),
    decoder(
        "state of a device",
        _FILE.of(lambda _: _DEVICE.state()),
        b'{"url": "x", "io_timeout": 30.0, "changed": 1, "backend": "lun0", "isid": "00"}',
        b'{"a":' * 800,
    ),
    decoder("PID file", _FILE.of(_pid), b"4711\n", "٣\u00b2".encode(), b"9" * 5000),
    decoder("file of losses", _FILE.of(_owed), b"3 2\n"),
    decoder("head of an image", image_format, b"QFI\xfb\0\0\0\3", b"# Disk DescriptorFile\n"),
)
