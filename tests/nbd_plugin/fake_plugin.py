"""The nbdkit plugin over fake disks: nbdkit runs this file, which runs the plugin's in its place.

It replaces only the module ``iserblk.disk.blocking``; the plugin finds its packages as always.
"""

import importlib.abc
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.realpath(sys._getframe().f_code.co_filename))
_plugin = os.path.join(_here, "..", "..", "nbd_plugin", "iserblk.py")


class _FakeBlocking(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "iserblk.disk.blocking":
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        sys.path.append(os.path.join(_here, "..", "support"))
        import fake_disk  # type: ignore[import-not-found]  # noqa: PLC0415 - the plugin has only now found what this needs

        module.open_disks = fake_disk.open_blocking
        module.ThreadDiskSet = fake_disk.BlockingSet


sys.meta_path.insert(0, _FakeBlocking())

with open(_plugin, encoding="utf-8") as _file:
    exec(compile(_file.read(), _plugin, "exec"))
