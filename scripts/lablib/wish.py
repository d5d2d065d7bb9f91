"""What a guest is to be like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lablib.kernel import Kernel

GUEST = Path(__file__).resolve().parent / "guest"


@dataclass(frozen=True)
class Wish:
    """What a machine is to be like. In user mode it has one processor, and no network card."""

    kernel: Kernel
    setup: str = "none"
    kvm: bool = False
    cpus: int = 2
    in_turn: bool = False
    """Emulated processors share one thread of the host, and run one after the other."""
    memory: str = "2G"
    mtu: int = 65536
    network: bool = False
    forwards: tuple[tuple[int, int], ...] = ()
    """Ports of the host's loopback, and those of the guest that they lead to."""
    results: Path | None = None
    """A directory that the guest may write, at the same path."""
    variables: Mapping[str, str] = field(default_factory=dict)
