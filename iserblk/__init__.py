"""A userspace iSER/iSCSI initiator: remote SCSI LUNs as block devices and as files.

    with iserblk.open_disks(["iser://192.0.2.1/iqn.2026-11.example:disk/0"]) as disks:
        disk = disks.disks["lun0"]
        disk.write(memoryview(b"data" * 128), 0)
        disk.flush()
    async with iserblk.aio.open_disks(...) as disks: ...

``open_disks`` is for threads, ``iserblk.aio`` for trio, ``iserblk.asyncio`` for asyncio;
``iserblk.disk.seam`` describes the methods of a disk, and docs/api.md how to use them. All errors
are IserblkError; ``iserblk.errors`` has their tree. Each name is loaded when it is first used, so
``import iserblk`` alone costs almost nothing.
"""

from __future__ import annotations

import importlib

from iserblk import forms

forms.choose()

TYPE_CHECKING = False  # as in typing, without loading typing
if TYPE_CHECKING:
    from iserblk import aio as aio
    from iserblk import asyncio as asyncio
    from iserblk.disk.blocking import open_disks as open_disks
    from iserblk.disk.seam import CommandResult as CommandResult
    from iserblk.errors import AuthenticationError as AuthenticationError
    from iserblk.errors import BadArgument as BadArgument
    from iserblk.errors import Busy as Busy
    from iserblk.errors import CommandError as CommandError
    from iserblk.errors import CommandRejected as CommandRejected
    from iserblk.errors import CommandTimeout as CommandTimeout
    from iserblk.errors import ConnectFailed as ConnectFailed
    from iserblk.errors import ConnectionLost as ConnectionLost
    from iserblk.errors import ConnectTimeout as ConnectTimeout
    from iserblk.errors import HostNotFound as HostNotFound
    from iserblk.errors import IserblkError as IserblkError
    from iserblk.errors import IserRefused as IserRefused
    from iserblk.errors import LocalProtocolError as LocalProtocolError
    from iserblk.errors import LoginError as LoginError
    from iserblk.errors import LunChanged as LunChanged
    from iserblk.errors import NoMpaReply as NoMpaReply
    from iserblk.errors import NoSuchLun as NoSuchLun
    from iserblk.errors import NotSupported as NotSupported
    from iserblk.errors import OtherProtocol as OtherProtocol
    from iserblk.errors import OutOfRange as OutOfRange
    from iserblk.errors import OutOfSpace as OutOfSpace
    from iserblk.errors import PermissionDenied as PermissionDenied
    from iserblk.errors import RemoteProtocolError as RemoteProtocolError
    from iserblk.errors import ReservationConflict as ReservationConflict
    from iserblk.errors import ReservationLost as ReservationLost
    from iserblk.errors import ScsiError as ScsiError
    from iserblk.errors import TargetNotFound as TargetNotFound
    from iserblk.errors import TransportError as TransportError
    from iserblk.errors import UnusableLun as UnusableLun
    from iserblk.errors import WriteProtected as WriteProtected
    from iserblk.errors import WritesLost as WritesLost

__version__ = "0.1.0"

_ERRORS = (
    *("AuthenticationError", "BadArgument", "Busy", "CommandError", "CommandRejected"),
    *("CommandTimeout", "ConnectFailed", "ConnectTimeout", "ConnectionLost", "HostNotFound"),
    *("IserRefused", "IserblkError", "LocalProtocolError", "LoginError", "LunChanged"),
    *("NoMpaReply", "NoSuchLun", "NotSupported", "OtherProtocol", "OutOfRange", "OutOfSpace"),
    *("PermissionDenied", "RemoteProtocolError", "ReservationConflict", "ReservationLost"),
    *("ScsiError", "TargetNotFound", "TransportError", "UnusableLun", "WriteProtected"),
    "WritesLost",
)
_PLACES = {
    "open_disks": "iserblk.disk.blocking",
    "CommandResult": "iserblk.disk.seam",
    **dict.fromkeys(_ERRORS, "iserblk.errors"),
}
_MODULES = ("aio", "asyncio")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"iserblk.{name}")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'iserblk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_PLACES])
