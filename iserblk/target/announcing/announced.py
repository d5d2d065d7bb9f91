"""What the target tells of itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iserblk.iscsi.send_targets import Portal

_ANY = ("0.0.0.0", "::")


@dataclass(slots=True, frozen=True)
class Announced:
    """``portals``: with their portal group tags; a host may mean all addresses of the machine.
    ``initiators``: the names that have access now; None: every initiator has."""

    target: str
    portals: Sequence[Portal]
    initiators: Callable[[], Sequence[str] | None]

    def portals_at(self, here: str) -> list[Portal]:
        """The portals, each once, as a peer can use them that reaches us by our address ``here``.
        That address stands for a host that means all addresses. A portal on a loopback address is
        told only by a loopback address."""
        address = ipaddress.ip_address(here.partition("%")[0])
        found: dict[Portal, None] = {}
        for each in self.portals:
            if each.host == "::" or (each.host == "0.0.0.0" and address.version == 4):
                found[each._replace(host=str(address))] = None
            elif each.host in _ANY:
                continue
            elif address.is_loopback or not ipaddress.ip_address(each.host).is_loopback:
                found[each] = None
        return list(found)
