"""A machine made of files."""

from __future__ import annotations

from pathlib import Path

from iserblk.doctor.finding import Finding
from iserblk.doctor.machine import Machine

RELEASE = "6.1.0-example"


PORT = "sys/class/infiniband/{device}/ports/1"


NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Box:
    """A machine made of files. ``machine``: what the checks see of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memlock = -1
        self.packages: set[str] = set()

    @property
    def machine(self) -> Machine:
        return Machine(
            self.root, RELEASE, self.memlock, "/opt/bin:relative", self.packages.__contains__
        )

    def put(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def program(self, path: str) -> None:
        self.put(path).chmod(0o755)

    def device(
        self,
        name: str = "rxe0",
        *,
        node: str = "1: CA",
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
        gids: tuple[tuple[str, str], ...] = (
            ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2"),
            ("0000:0000:0000:0000:0000:ffff:0a09:0901", "RoCE v2"),
        ),
        mtu: int = 1500,
    ) -> None:
        port = PORT.format(device=name)
        self.put(f"sys/class/infiniband/{name}/node_type", f"{node}\n")
        self.put(f"{port}/state", f"{state}\n")
        self.put(f"{port}/link_layer", f"{layer}\n")
        for index, (gid, kind) in enumerate((*gids, (NO_GID, ""))):
            self.put(f"{port}/gids/{index}", f"{gid}\n")
            self.put(f"{port}/gid_attrs/types/{index}", f"{kind}\n")
            self.put(f"{port}/gid_attrs/ndevs/{index}", "eth0\n" if kind else "")
        self.put("sys/class/net/eth0/mtu", f"{mtu}\n")

    def nodes(self) -> None:
        self.put("dev/infiniband/rdma_cm")
        self.put("dev/infiniband/uverbs0")


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def install(box: Box) -> None:
    for path in ("opt/bin/nbdkit", "bin/fusermount3"):
        box.program(path)
    box.put("usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-python-plugin.so")
    box.put("etc/libibverbs.d/rxe.driver", "driver rxe\n")
    for path in ("dev/fuse", "dev/nbd0", "dev/nbd1", "sys/block/nbd0/pid", "sys/block/nbd1/dev"):
        box.put(path, "77\n")
    box.packages = {"pyfuse3", "pyverbs"}
