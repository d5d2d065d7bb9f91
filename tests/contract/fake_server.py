"""``iserblk nbd`` over fake disks: ``python3 -m tests.contract.fake_server URL …``."""

import sys

from tests.support import fake_disk

if __name__ == "__main__":
    fake_disk.install()
    # The process that forks may have imported them for another command, with the real disks.
    for name in ("iserblk.nbd.serving", "iserblk.cli.nbd"):
        sys.modules.pop(name, None)
    from iserblk.cli.main import main

    main(["nbd", *sys.argv[1:]])
