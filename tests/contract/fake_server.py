"""``iserblk nbd`` over fake disks: ``python3 -m tests.contract.fake_server URL …``."""

import sys

from tests.support import fake_disk

if __name__ == "__main__":
    fake_disk.install()
    from iserblk.cli.main import main

    main(["nbd", *sys.argv[1:]])
