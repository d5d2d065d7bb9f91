"""A network namespace with one network, for what sends multicast: nothing leaves this machine.
Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESS = "10.55.0.1"
_SETUP = f"""
ip link set lo up
ip link add net0 type veth peer name net1
ip address add {ADDRESS}/24 dev net0
ip link set net0 up
ip link set net1 up
ip route add 224.0.0.0/4 dev net0
echo ready
exec cat
"""


@contextmanager
def network() -> Iterator[list[str]]:
    """The words in front of a command that is to run in the namespace; its address is ADDRESS."""
    if os.geteuid() != 0:
        pytest.skip("requires root, for a network namespace")
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"requires {program}: run scripts/setup --tests")
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-e", "-c", _SETUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdin is not None and holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                holder.stdin.close()
                assert holder.stderr is not None
                pytest.skip(f"requires a network namespace: {holder.stderr.read().strip()}")
            yield ["nsenter", "--target", str(holder.pid), "--net"]
        finally:
            holder.kill()
