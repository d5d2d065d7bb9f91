"""In the guest: targets, each as a machine of its own, behind a network, with disks that have a
write cache.

They are in the network namespace NAMESPACE, at the other end of a veth pair. Their disks are
null_blk's, in memory: what is written to one is in its cache until a flush, and gone when its power
is cut. Whatever a target is told after it has come back has to reach it by the network, as from any
array that has booted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outagelib.programs import run
from outagelib.services import NAMESPACE, SERVICES, Service

_NETWORK = "10.9.10."
_OURS = f"{_NETWORK}1"
# Of the targets' side. It stays: when the first address of a network goes, all others go with it.
_FIRST = f"{_NETWORK}254"
_CACHE_MIB = 64
_DISKS = Path("/sys/kernel/config/nullb")
_HOSTS = Path("/etc/hosts")


class Network:
    """Between this machine and the targets."""

    def __init__(self) -> None:
        for module in ("veth", "sch_netem"):
            run("modprobe", module)
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "link", "add", "array0", "type", "veth", "peer", "name", "array1",
            "netns", NAMESPACE)  # fmt: skip
        run("ip", "address", "add", f"{_OURS}/24", "dev", "array0")
        run("ip", "link", "set", "array0", "up")
        for device in ("lo", "array1"):
            run("ip", "-n", NAMESPACE, "link", "set", device, "up")
        self.add(_FIRST)

    def cut(self) -> None:
        """Let no packet pass, in either direction; the links stay up, as at a switch between."""
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            words = ["tc", *inside, "qdisc", "add", "dev", device, "root", "netem"]
            run(*words, "loss", "100%")

    def join(self) -> None:
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            run("tc", *inside, "qdisc", "delete", "dev", device, "root")

    def add(self, address: str) -> None:
        """To the targets' side."""
        run("ip", "-n", NAMESPACE, "address", "add", f"{address}/24", "dev", "array1")

    def delete(self, address: str) -> None:
        run("ip", "-n", NAMESPACE, "address", "delete", f"{address}/24", "dev", "array1")


class Disks:
    """The disks of all targets."""

    def __init__(self) -> None:
        run("modprobe", "null_blk", "nr_devices=0")
        self._made: list[Path] = []

    def make(self, size_mib: int) -> Path:
        """Returns its directory in configfs, which is called as its device is."""
        # By this name each kernel calls its device, whether by the directory or by a number.
        disk = _DISKS / f"nullb{len(self._made)}"
        disk.mkdir()
        for setting, value in (
            ("size", size_mib),
            ("blocksize", 512),
            ("memory_backed", 1),
            ("cache_size", _CACHE_MIB),
            ("power", 1),
        ):
            (disk / setting).write_text(str(value))
        self._made.append(disk)
        return disk


class Array:
    """A machine, the ``number``-th from 0, that serves a LUN for each of ``names``, each by a
    target of its own. ``target``: the program that does so, below ``prefix``; ``initiators``: the
    names of the initiators that may come."""

    def __init__(
        self,
        network: Network,
        disks: Disks,
        number: int,
        target: str,
        prefix: Path,
        names: Sequence[str],
        size_mib: int,
        initiators: Sequence[str],
    ) -> None:
        self.target = target
        self.host = f"{target.lower()}.array.lab"  # as initiators know it
        self._network = network
        self._addresses = [f"{_NETWORK}{2 + 2 * number + other}" for other in (0, 1)]
        self._disks = {name: disks.make(size_mib) for name in names}
        self._service: Service = SERVICES[target](
            {name: self.device(name) for name in names}, initiators, prefix
        )
        network.add(self._address)
        self._name()

    @property
    def lun(self) -> int:
        """The number of the LUN of each target."""
        return self._service.lun

    def device(self, name: str) -> Path:
        """The disk at the target itself."""
        return Path("/dev") / self._disks[name].name

    def start(self) -> None:
        self._service.start(self._address)

    def stop(self) -> None:
        self._service.stop()

    def lose_cache(self) -> None:
        """Cut the power of the disks, and give it back. No target uses them."""
        for disk in self._disks.values():
            for power in ("0", "1"):
                (disk / "power").write_text(power)

    @property
    def _address(self) -> str:
        return self._addresses[0]

    def _name(self) -> None:
        """Let its name lead to its address."""
        others = [line for line in _HOSTS.read_text().splitlines() if self.host not in line]
        _HOSTS.write_text("\n".join([*others, f"{self._address} {self.host}"]) + "\n")

    def move(self) -> None:
        """Give it another address, and its name with it. Its service does not run."""
        self._network.delete(self._address)
        self._addresses.reverse()
        self._network.add(self._address)
        self._name()
