"""The set-ups of a guest: name, description, and what each needs from the host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lablib.archive import Absent
from lablib.kernel import Kernel, open_iscsi, siw_module

TOP = Path(__file__).resolve().parents[2]
_PEER_TIMEOUT_S = 600


@dataclass(frozen=True)
class Setup:
    """One arrangement of devices and peers; ``guest/setups.sh`` has a function for each."""

    name: str
    about: str
    needs: tuple[str, ...] = ()
    on_host: bool = False
    """The command runs on the host, and reaches the guest through a forwarded port."""
    contains: str = ""
    """A set-up whose tests run in this one's guest, which has all that they need: a boot less."""
    user_mode: bool = False
    """The kernel of user mode has all that the set-up needs."""


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("none", "the kernel with its nbd module, nothing else", user_mode=True),
        Setup(
            "tcp",
            "no RDMA: LIO's target over TCP, the kernel's iscsi_tcp, iscsid; tgtd, not started",
            ("open-iscsi", "tgt"),
            user_mode=True,
        ),
        Setup(
            "ip", "no RDMA: SCTP, IPsec and veth, for tests with network namespaces", user_mode=True
        ),
        Setup("rxe", "a Soft-RoCE device, rxe0"),
        Setup("siw", "a software iWARP device, siw0", ("siw",)),
        Setup("rxe-lio", "rxe0, and LIO's iSER target on it"),
        Setup("siw-lio", "siw0, and LIO's iSER target on it", ("siw",), contains="siw"),
        Setup("rxe-tgt", "rxe0, and tgtd with iSER on it", ("tgt",)),
        Setup(
            "rxe-initiator",
            "rxe0, the kernel's ib_iser, iscsid",
            ("open-iscsi",),
            contains="rxe",
        ),
        Setup(
            "rxe-lio-initiator",
            "rxe0, and both LIO's target and ib_iser on it; tgtd, not started",
            ("open-iscsi", "tgt"),
            contains="rxe-lio",
        ),
        Setup(
            "siw-initiator",
            "siw0 towards a network namespace, ib_iser, iscsid",
            ("siw", "open-iscsi"),
        ),
        Setup(
            "siw-lio-net",
            "siw-lio behind an emulated network; the COMMAND runs on the host",
            ("siw",),
            on_host=True,
        ),
    )
}


def provide(setup: Setup, kernel: Kernel) -> dict[str, str]:
    """Fetch and build what the set-up needs. Returns the guest's variables for that. Raises
    Absent."""
    providers: dict[str, tuple[str, Callable[[], Path]]] = {
        "siw": ("LAB_SIW", lambda: siw_module(kernel)),
        "tgt": ("LAB_TGT", lambda: peer("tgt")),
        "open-iscsi": ("LAB_OPEN_ISCSI", open_iscsi),
    }
    return {variable: str(provider()) for variable, provider in (providers[n] for n in setup.needs)}


def peer(name: str) -> Path:
    """The directory in which scripts/peers has unpacked a program. Raises Absent."""
    done = subprocess.run(
        [TOP / "scripts" / "peers", name], capture_output=True, text=True,
        timeout=_PEER_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise Absent(words[-1] if words else f"scripts/peers {name} failed")
    return Path(done.stdout.strip())
