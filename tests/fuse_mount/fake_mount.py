"""``python3 -m tests.fuse_mount.fake_mount``: fuse_mount over fake disks.

Stays in the foreground. With --background it returns as ``iserblk mount`` does; then --unmount
MOUNTPOINT ends the mount, or --umount-helper, with the arguments that umount(8) gives a helper.
FAKE_USER in the environment is the number of the user that it becomes first; FAKE_CLOSED_S, how
long a server that is told to end waits for files to be closed."""

from __future__ import annotations

import importlib
import os
import sys

from fuse_mount import umount_helper
from fuse_mount.__main__ import main
from fuse_mount.errors import MountError
from fuse_mount.mount import mount_background, unmount
from iserblk.disk import writers
from tests.support import fake_disk

if __name__ == "__main__":
    fake_disk.install()
    # The process that forks may have imported it for another command, with the real disks.
    sys.modules.pop("fuse_mount.serving", None)
    serving = importlib.import_module("fuse_mount.serving")

    vars(writers)["running"] = list  # the fake LUNs of all tests have the same names
    vars(serving)["CLOSED_S"] = float(os.environ.get("FAKE_CLOSED_S", serving.CLOSED_S))
    if user := int(os.environ.get("FAKE_USER", "0")):
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    try:
        if sys.argv[1] == "--background":
            print(mount_background([sys.argv[2]], sys.argv[3], sys.argv[4:]))
        elif sys.argv[1] == "--unmount":
            unmount(sys.argv[2])
        elif sys.argv[1] == "--umount-helper":
            sys.exit(umount_helper.main(sys.argv[2:]))
        else:
            sys.exit(main())
    except MountError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
