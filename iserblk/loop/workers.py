"""Threads for work that may wait: for a disk, or for a program of the user's.

All of it belongs to the thread of a loop, but for ``_serve``. A thread that has nothing to do is
kept for a while: to start one takes longer than most work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

from iserblk.loop.work import Ended, Function, Job, Limit

IDLE_S = 10.0  # after which threads that had nothing to do end


class Workers:
    """The threads of one loop. They are daemons: what hangs in the kernel keeps no process alive
    that does not wait for it."""

    def __init__(self, wake: Callable[[Function], None], name: str = "worker of a loop") -> None:
        """``wake``: see ``Loop.wake``."""
        self._wake = wake
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = 0  # those that have been told to end not included
        self.busy = 0
        self._most = 0  # of ``busy`` since the last ``retire``

    @property
    def idle(self) -> int:
        """Threads that have nothing to do."""
        return self._threads - self.busy

    def begin(self, work: Function, ended: Ended, limit: Limit) -> None:
        """See ``Loop.offload``."""
        if limit.busy >= limit.most:
            limit.queue.append((work, ended, limit))
        else:
            self._begin((work, ended, limit))

    def _begin(self, job: Job) -> None:
        job[2].busy += 1
        self.busy += 1
        self._most = max(self._most, self.busy)
        if self._threads < self.busy:
            try:
                self._start()
            except (RuntimeError, MemoryError) as error:  # the system has no more threads
                if not self._threads:
                    self._wake(partial(self._end, job, error))
                    return
                # Those that there are do it, as soon as one of them has nothing else to do.
        self._jobs.put(job)

    def _start(self) -> None:
        thread = Thread(target=self._serve, args=(self._jobs,), name=self._name, daemon=True)
        thread.start()
        self._threads += 1

    def _end(self, job: Job, error: BaseException | None) -> None:
        _, ended, limit = job
        limit.busy -= 1
        self.busy -= 1
        if limit.queue:
            self._begin(limit.queue.popleft())
        ended(error)

    def retire(self) -> None:
        """End the threads that were not needed since the last call."""
        while self._threads > max(self._most, self.busy):
            self._threads -= 1
            self._jobs.put(None)
        self._most = self.busy

    def close(self) -> None:
        """End all threads, those that are busy when they are done: then nobody is told."""
        jobs, self._jobs = self._jobs, SimpleQueue()
        for _ in range(self._threads):
            jobs.put(None)
        self._threads = 0

    def _serve(self, jobs: SimpleQueue[Job | None]) -> None:
        """Body of a thread."""
        while (job := jobs.get()) is not None:
            error: BaseException | None = None
            try:
                job[0]()
            except BaseException as problem:
                error = problem
            self._wake(partial(self._end, job, error))
            # What the job refers to, such as the buffers of a command, is not this thread's until
            # there is another job.
            del job, error
