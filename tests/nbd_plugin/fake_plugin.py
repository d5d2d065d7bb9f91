"""The nbdkit plugin over fake disks: nbdkit runs this file, which runs the plugin's in its place.

It replaces only the module ``iserblk.disk.blocking``; the plugin finds its packages as always.
"""

import os
import sys
import types

_here = os.path.dirname(os.path.realpath(sys._getframe().f_code.co_filename))
_plugin = os.path.join(_here, "..", "..", "nbd_plugin", "iserblk.py")


class _FakeBlocking(types.ModuleType):
    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        if name not in ("open_disks", "ThreadDiskSet"):
            raise AttributeError(name)
        sys.path.append(os.path.join(_here, "..", "support"))
        import fake_disk  # type: ignore[import-not-found]  # noqa: PLC0415 - the plugin has only now found what this needs

        return fake_disk.open_blocking if name == "open_disks" else fake_disk.BlockingSet


# (A finder of modules would not do: iserblk's own comes before it.)
sys.modules["iserblk.disk.blocking"] = _FakeBlocking("iserblk.disk.blocking")

with open(_plugin, encoding="utf-8") as _file:
    exec(compile(_file.read(), _plugin, "exec"))
