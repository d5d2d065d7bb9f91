"""What COPY STATUS tells of the copies to one LUN (SPC-4, RECEIVE COPY RESULTS)."""

from __future__ import annotations

from threading import Lock

from iserblk.scsi.third_party import IN_PROGRESS, CopyStatus
from iserblk.target.seam import NexusName, ScsiTask

MAXIMUM = 256  # copies that are remembered; older ones are forgotten, if they have ended


class Copies:
    """The copies of each I_T nexus, by list identifier. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[tuple[NexusName, int], CopyStatus] = {}
        # Tasks of copies that are in progress, and have to wait for a thread.
        self._claims: dict[tuple[NexusName, int], ScsiTask] = {}

    def is_in_progress(self, name: NexusName, list_id: int) -> bool:
        with self._lock:
            known = self._look(name, list_id)
            return known is not None and known.state == IN_PROGRESS

    def claim(self, name: NexusName, list_id: int, task: ScsiTask) -> bool:
        """A copy is to begin, as soon as there is a thread for it; from now on it is in progress,
        and in place of an older copy of that number. False: that one is in progress. Nothing
        reminds us of a task that is cancelled before it has its thread: its copy is none, and its
        number may be claimed again."""
        with self._lock:
            known = self._look(name, list_id)
            if known is not None and known.state == IN_PROGRESS:
                return False
            self._note(name, list_id, CopyStatus(IN_PROGRESS))
            self._claims[name, list_id] = task
            return True

    def start(self, name: NexusName, list_id: int, task: ScsiTask) -> bool:
        """The copy that ``task`` has claimed has its thread. False: the task was cancelled before,
        and must copy nothing."""
        with self._lock:
            if self._look(name, list_id) is None or self._claims.get((name, list_id)) is not task:
                return False
            del self._claims[name, list_id]
            return True

    def _look(self, name: NexusName, list_id: int) -> CopyStatus | None:
        task = self._claims.get((name, list_id))
        if task is not None and task.cancelled:
            self._drop(name, list_id)
        return self._known.get((name, list_id))

    def _drop(self, name: NexusName, list_id: int) -> None:
        self._known.pop((name, list_id), None)
        self._claims.pop((name, list_id), None)

    def note(self, name: NexusName, list_id: int, status: CopyStatus) -> None:
        """Note how far a copy has come. It takes the place of an older copy of that number."""
        with self._lock:
            self._note(name, list_id, status)

    def _note(self, name: NexusName, list_id: int, status: CopyStatus) -> None:
        self._drop(name, list_id)
        self._known[name, list_id] = status
        if len(self._known) > MAXIMUM:
            for key in list(self._known):
                known = self._look(*key)
                if known is None or known.state != IN_PROGRESS:
                    self._drop(*key)
                    break

    def tell(self, name: NexusName, list_id: int) -> CopyStatus | None:
        """How far a copy has come; None: it is not known. A copy that has ended is forgotten when
        it was told."""
        with self._lock:
            known = self._look(name, list_id)
            if known is not None and known.state != IN_PROGRESS:
                self._drop(name, list_id)
            return known

    def forget(self, name: NexusName) -> None:
        """Forget the copies of a nexus that is lost."""
        with self._lock:
            for key in [key for key in self._known if key[0] == name]:
                self._drop(*key)
