"""What COPY STATUS tells of the copies to one LUN (SPC-4, RECEIVE COPY RESULTS)."""

from __future__ import annotations

from threading import Lock

from iserblk.scsi.third_party import IN_PROGRESS, CopyStatus
from iserblk.target.seam import NexusName

MAXIMUM = 256  # copies that are remembered; older ones are forgotten, if they have ended


class Copies:
    """The copies of each I_T nexus, by list identifier. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[tuple[NexusName, int], CopyStatus] = {}

    def is_in_progress(self, name: NexusName, list_id: int) -> bool:
        with self._lock:
            known = self._known.get((name, list_id))
            return known is not None and known.state == IN_PROGRESS

    def note(self, name: NexusName, list_id: int, status: CopyStatus) -> None:
        """Note how far a copy has come. It takes the place of an older copy of that number."""
        with self._lock:
            self._known.pop((name, list_id), None)
            self._known[name, list_id] = status
            if len(self._known) > MAXIMUM:
                for key, known in list(self._known.items()):
                    if known.state != IN_PROGRESS:
                        del self._known[key]
                        break

    def tell(self, name: NexusName, list_id: int) -> CopyStatus | None:
        """How far a copy has come; None: it is not known. A copy that has ended is forgotten when
        it was told."""
        with self._lock:
            known = self._known.get((name, list_id))
            if known is not None and known.state != IN_PROGRESS:
                del self._known[name, list_id]
            return known

    def forget(self, name: NexusName) -> None:
        """Forget the copies of a nexus that is lost."""
        with self._lock:
            for key in [key for key in self._known if key[0] == name]:
                del self._known[key]
