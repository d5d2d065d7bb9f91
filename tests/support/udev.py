"""What udev says of a block device by the rules of this machine and ours, without its daemon."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.nbdkit import need

_SLOW_S = 300  # in an emulated machine
# In mounts of its own: the rules, /run with what attach has told, and a /dev without links. udevadm
# test(8) makes the links that it finds.
_SCRIPT = r"""
set -e
mount -t tmpfs none /etc/udev/rules.d
cp "$1" /etc/udev/rules.d/59-iserblk.rules
mount -t tmpfs none /run
[ -z "$4" ] || { mkdir -p "/run/iserblk/$2"; printf "$4" >"/run/iserblk/$2/udev"; }
number=$(tr : ' ' <"/sys/class/block/$2/dev")
mount -t tmpfs none /dev
mknod "/dev/$2" b $number
mknod /dev/null c 1 3
udevadm test --action="$3" "/sys/class/block/$2"
"""


def need_udev() -> None:
    """Skip the test where udev, or the mounts of its own, are not to be had."""
    need("udevadm", "unshare")
    if os.geteuid():
        pytest.skip("only root may mount")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")


def links(device: str, rules: Path, told: str, action: str = "change") -> set[str]:
    """The links that udev makes for ``device`` (a name of /sys/class/block). ``rules``: the file of
    ours; ``told``: what attach has told of the device, "" for nothing."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", rules, device, action, told],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SLOW_S,
    )
    assert done.returncode == 0, done.stderr
    wrong = [line for line in done.stderr.splitlines() if re.search(r"59-iserblk\S* Invalid", line)]
    assert not wrong
    found = re.search(r"^\s*DEVLINKS=(.*)$", done.stdout, re.MULTILINE)
    return set(found[1].split()) if found else set()
