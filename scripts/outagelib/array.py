"""In the guest: a target as a machine of its own, behind a network, with disks that have a write
cache.

It is in the network namespace NAMESPACE, at the other end of a veth pair. Its disks are null_blk's,
in memory: what is written to one is in its cache until a flush, and gone when its power is cut.
Whatever the target is told after it has come back has to reach it by the network, as from any array
that has booted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outagelib.programs import run
from outagelib.services import NAMESPACE, SERVICES, Service

HOST = "array.lab"  # as initiators know it
_OURS = "10.9.10.1"
_ADDRESSES = ("10.9.10.2", "10.9.10.3")
_CACHE_MIB = 64
_DISKS = Path("/sys/kernel/config/nullb")
_HOSTS = Path("/etc/hosts")


class Array:
    """A target of its own, with one LUN, for each of ``names``. ``target``: what serves them, with
    its programs below ``prefix``; ``initiators``: the names of the initiators that may come."""

    def __init__(
        self,
        target: str,
        prefix: Path,
        names: Sequence[str],
        size_mib: int,
        initiators: Sequence[str],
    ) -> None:
        self._names = names
        self._address = _ADDRESSES[0]
        for module in ("veth", "sch_netem"):
            run("modprobe", module)
        run("modprobe", "null_blk", "nr_devices=0")
        self._make_network()
        for name in names:
            disk = self._disk(name)
            disk.mkdir()
            for setting, value in (
                ("size", size_mib),
                ("blocksize", 512),
                ("memory_backed", 1),
                ("cache_size", _CACHE_MIB),
                ("power", 1),
            ):
                (disk / setting).write_text(str(value))
        disks = {name: self.device(name) for name in names}
        self._service: Service = SERVICES[target](disks, initiators, prefix)

    @property
    def lun(self) -> int:
        """The number of the LUN of each target."""
        return self._service.lun

    def device(self, name: str) -> Path:
        """The disk at the target itself."""
        return Path("/dev") / self._disk(name).name

    def _disk(self, name: str) -> Path:
        # By this name each kernel calls its device, whether by the directory or by a number.
        return _DISKS / f"nullb{self._names.index(name)}"

    def start(self) -> None:
        self._service.start(self._address)

    def stop(self) -> None:
        self._service.stop()

    # --- disks -----------------------------------------------------------------------------

    def lose_cache(self) -> None:
        """Cut the power of the disks, and give it back. No target uses them."""
        for name in self._names:
            for power in ("0", "1"):
                (self._disk(name) / "power").write_text(power)

    # --- the network -----------------------------------------------------------------------

    def _make_network(self) -> None:
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "link", "add", "array0", "type", "veth", "peer", "name", "array1",
            "netns", NAMESPACE)  # fmt: skip
        run("ip", "address", "add", f"{_OURS}/24", "dev", "array0")
        run("ip", "link", "set", "array0", "up")
        for device in ("lo", "array1"):
            run("ip", "-n", NAMESPACE, "link", "set", device, "up")
        run("ip", "-n", NAMESPACE, "address", "add", f"{self._address}/24", "dev", "array1")
        self._name()

    def _name(self) -> None:
        """Let its name lead to its address."""
        others = [line for line in _HOSTS.read_text().splitlines() if HOST not in line]
        _HOSTS.write_text("\n".join([*others, f"{self._address} {HOST}"]) + "\n")

    def cut(self) -> None:
        """Let no packet pass, in either direction; the links stay up, as at a switch between."""
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            words = ["tc", *inside, "qdisc", "add", "dev", device, "root", "netem"]
            run(*words, "loss", "100%")

    def join(self) -> None:
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            run("tc", *inside, "qdisc", "delete", "dev", device, "root")

    def move(self) -> None:
        """Give it another address, and its name with it. Its service does not run."""
        old, self._address = self._address, _ADDRESSES[1]
        run("ip", "-n", NAMESPACE, "address", "delete", f"{old}/24", "dev", "array1")
        run("ip", "-n", NAMESPACE, "address", "add", f"{self._address}/24", "dev", "array1")
        self._name()
