"""Checks of the RDMA devices in sysfs, and of what a process needs to use them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from iserblk.doctor.finding import OK, SKIPPED, WARNING, Finding
from iserblk.doctor.machine import Machine

CLASS = "/sys/class/infiniband"
NODES = "/dev/infiniband"
CM_NODE = f"{NODES}/rdma_cm"
MEMLOCK_WANTED = 64 << 20  # bytes; with less, fewer transfers at a time are possible, or none
ROCE_OVERHEAD = 58  # bytes of a packet that are not data: GRH or IP, UDP, BTH, RETH, ICRC
SOFT_ROCE = "rdma link add rxe0 type rxe netdev INTERFACE (as root) makes a software device"
_NODE_TYPES = {"1": "InfiniBand", "4": "iWARP"}


def devices(machine: Machine) -> list[str]:
    return machine.names(CLASS)


def check_rdma(machine: Machine) -> list[Finding]:
    found = devices(machine)
    if not found:
        return [
            Finding(
                "RDMA devices",
                SKIPPED,
                "there are none; software iWARP works without them",
                f"to try verbs: {SOFT_ROCE}",
            )
        ]
    findings = [_nodes(machine, found), _memlock(machine)]
    for device in found:
        findings += _ports(machine, device)
    return findings


def _nodes(machine: Machine, found: list[str]) -> Finding:
    """Check the device nodes in /dev/infiniband, and whether this process may open them."""
    verbs = [f"{NODES}/{name}" for name in machine.names(NODES, "uverbs*")]
    missing = [] if machine.exists(CM_NODE) else [CM_NODE]
    if len(verbs) < len(found):
        missing.append(f"{NODES}/uverbs*")
    if missing:
        return Finding(
            NODES,
            WARNING,
            f"{' and '.join(missing)} missing: RDMA devices cannot be used",
            "modprobe -a rdma_ucm ib_uverbs (as root); in a container, add the devices in"
            " /dev/infiniband",
        )
    closed = [node for node in (CM_NODE, *verbs) if not machine.may_use(node)]
    if closed:
        return Finding(
            NODES,
            WARNING,
            f"this user has no permission to open {', '.join(closed)}",
            "chmod 666 these files (as root; the distribution's default), or add a udev rule",
        )
    return Finding(NODES, OK, f"rdma_cm and {len(verbs)} device(s) can be opened")


def _memlock(machine: Machine) -> Finding:
    if machine.memlock < 0:
        return Finding("memlock", OK, "no limit on locked memory")
    text = f"this process may lock {machine.memlock >> 10} KiB of memory"
    if machine.memlock >= MEMLOCK_WANTED:
        return Finding("memlock", OK, text)
    return Finding(
        "memlock",
        WARNING,
        f"{text}; an RDMA connection wants {MEMLOCK_WANTED >> 20} MiB or more",
        "raise the limit: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or"
        " limits.conf(5)",
    )


def _ports(machine: Machine, device: str) -> list[Finding]:
    directory = f"{CLASS}/{device}"
    kind = _NODE_TYPES.get(machine.read(f"{directory}/node_type").partition(":")[0], "")
    ports = machine.entries(f"{directory}/ports")
    if not ports:
        return [Finding(f"device {device}", WARNING, "the device has no ports", "load its driver")]
    return [_port(machine, device, port, kind) for port in ports]


def _port(machine: Machine, device: str, port: Path, kind: str) -> Finding:
    """Check one port: its state, kind, addresses and MTU."""
    directory = f"{CLASS}/{device}/ports/{port.name}"
    name = f"device {device} port {port.name}"
    state = machine.read(f"{directory}/state").partition(": ")[2] or "unknown"
    ethernet = machine.read(f"{directory}/link_layer") == "Ethernet"
    gids = _gids(machine, directory)
    interfaces = sorted({gid.interface for gid in gids if gid.interface})
    words = [f"{'RoCE' if ethernet and kind != 'iWARP' else kind or 'InfiniBand'}, {state}"]
    if interfaces:
        words.append(", ".join(_interface_words(machine, each, kind) for each in interfaces))
    if gids and kind != "iWARP":
        words.append("GIDs " + ", ".join(f"{gid.text} ({gid.kind})" for gid in gids))
    text = "; ".join(words)
    if state != "ACTIVE":
        up = f"ip link set {interfaces[0]} up (as root)" if interfaces else "check cable and switch"
        if not ethernet and kind == "InfiniBand":
            up += "; make sure that a subnet manager (opensm) runs in the network"
        return Finding(name, WARNING, text, up)
    if ethernet and kind != "iWARP":
        if not gids:
            return Finding(
                name, WARNING, f"{text}; no GIDs", "give its network interface an IP address"
            )
        if not any(gid.routable for gid in gids):
            return Finding(
                name,
                WARNING,
                f"{text}; no RoCE v2 GID",
                "enable RoCE v2 on the device: v1 reaches only its own Ethernet segment",
            )
    return Finding(name, OK, text)


class _Gid:
    def __init__(self, text: str, kind: str, interface: str) -> None:
        address = ipaddress.IPv6Address(text)
        self.text = str(address.ipv4_mapped or address)
        self.kind = kind or "InfiniBand"
        self.interface = interface
        self.routable = kind == "RoCE v2"


def _gids(machine: Machine, directory: str) -> list[_Gid]:
    found = []
    for entry in machine.entries(f"{directory}/gids"):
        text = machine.read(f"{directory}/gids/{entry.name}")
        if text.replace(":", "").strip("0"):
            kind = machine.read(f"{directory}/gid_attrs/types/{entry.name}")
            interface = machine.read(f"{directory}/gid_attrs/ndevs/{entry.name}")
            try:
                found.append((int(entry.name), _Gid(text, kind, interface)))
            except ValueError:  # this is not a GID
                continue
    return [gid for _, gid in sorted(found, key=lambda pair: pair[0])]


def _interface_words(machine: Machine, interface: str, kind: str) -> str:
    text = machine.read(f"/sys/class/net/{interface}/mtu")
    mtu = int(text) if text.isdigit() else 0
    if not mtu:
        return interface
    if kind == "iWARP":
        return f"{interface} (MTU {mtu})"
    fitting = [size for size in (256, 512, 1024, 2048, 4096) if size <= mtu - ROCE_OVERHEAD]
    return f"{interface} (MTU {mtu}: RDMA MTU {fitting[-1] if fitting else 'too small'})"
