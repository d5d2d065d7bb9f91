"""``iserblk bench``: measures a LUN through the Python API, without a front-end."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
import trio

from iserblk.cli.command import Command, Rare
from iserblk.cli.endpoints import check_one_lun, only_disk
from iserblk.cli.histogram import Histogram
from iserblk.cli.options import Seconds, Size, connection, connection_options, json_option
from iserblk.cli.output import print_json
from iserblk.cli.progress import timed_progress
from iserblk.cli.running import run
from iserblk.disk import aio, blocking
from iserblk.disk.request_queue import open_queue
from iserblk.disk.seam import AsyncLun, LunInfo
from iserblk.disk.writers import is_shared, note_use
from iserblk.errors import BadArgument, IserblkError, WriteProtected
from iserblk.loop.clock import monotonic, nanoseconds
from iserblk.metrics.records import Recorded
from iserblk.named.resolving import urls_of

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_SLICES = 100  # of a run, in its picture
_SHORTEST_S = 0.02


@dataclass(slots=True, frozen=True)
class Job:
    pattern: str
    block: int  # bytes of one request
    depth: int  # requests in flight
    seconds: float
    watched: bool = False  # its throughput over time is wanted
    opened: Callable[[LunInfo], None] | None = None  # called when the LUN can be measured

    @property
    def writes(self) -> bool:
        return self.pattern.endswith("write")

    def check(self, size: int, info: LunInfo) -> None:
        if self.block > size:
            raise BadArgument(
                f"--bs {self.block} is more than the LUN {info.url}, which has {size} bytes"
            )
        if self.writes and info.read_only:
            raise WriteProtected(f"{info.url}: the LUN is read-only; choose --rw read or randread")
        if self.opened is not None:
            self.opened(info)

    def offsets(self, size: int) -> Iterator[int]:
        """Endless multiples of the block: random (the same in every run), or ascending, again and
        again from 0."""
        blocks = size // self.block
        if self.pattern.startswith("rand"):
            choose = random.Random(1).random
            while True:
                yield int(choose() * blocks) * self.block
        while True:
            yield from range(0, blocks * self.block, self.block)


@dataclass(slots=True)
class Result:
    """``cpu_seconds``: of this process, without the target and the kernel's threads. ``samples``:
    of a run that is watched, seconds since its begin, and how many requests had ended by then.
    ``interrupted``: a signal has ended it before its time."""

    url: str = ""
    interrupted: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies: Histogram = field(default_factory=Histogram)
    samples: list[tuple[float, int]] = field(default_factory=list)


@click.command("bench", cls=Command)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option(
    "--rw",
    "pattern",
    type=click.Choice(["randread", "randwrite", "read", "write"]),
    default="randread",
    show_default=True,
    help="What to do: read or write, at random places or one after the other.",
)
@click.option("--bs", type=Size(), default="4k", show_default=True, help="Size of a request.")
@click.option(
    "--depth",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--time",
    "seconds",
    type=Seconds(0.1, 86400),
    default=10.0,
    show_default=True,
    help="Seconds to measure.",
)
@click.option(
    "--face",
    type=click.Choice(["async", "queue", "blocking"]),
    default="async",
    show_default=True,
    help="Which API: for each request in flight a trio task (async) or a thread (blocking), or one"
    " task for all (queue).",
    cls=Rare,
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw latencies, and throughput over time, to FILE (SVG).",
    cls=Rare,
)
@click.option("--destroy", "--yes", is_flag=True, help="Allow writes to destroy the LUN's data.")
@json_option
@connection_options
def command(
    urls: tuple[str, ...],
    pattern: str,
    bs: int,
    depth: int,
    seconds: float,
    face: str,
    plot: Path | None,
    destroy: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Measure a LUN; print rates and latencies.

    Keeps --depth requests of --bs bytes in flight for --time seconds, with the pattern --rw.
    Several URLs of one LUN are several ways to it. Ctrl-C ends it before, and prints what was
    measured so far; the exit status is that of an interrupt.
    """
    given = connection(options)
    job = Job(pattern, bs, depth, seconds, watched=plot is not None)
    found = urls_of(urls, given, to_write=job.writes)
    check_one_lun(found)
    if bs < 1:
        raise BadArgument("--bs 0: give a size such as 4k")
    if job.writes and not destroy:
        raise BadArgument(f"--rw {pattern} destroys the LUN's data; add --destroy to allow it")
    if plot is not None and not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise BadArgument(f"--plot {plot}: there is no such directory, or you cannot write there")
    result = Result()
    try:
        with Recorded("bench") as recorded:
            writes, shared = job.writes, is_shared(found, given)
            opened = partial(note_use, recorded, writes=writes, shared=shared)
            job = replace(job, opened=lambda lun: opened([lun]))
            _FACES[face](found, given, job, result)
    except (KeyboardInterrupt, SystemExit):  # a signal
        if not result.latencies.count or not result.seconds:
            raise
        result.interrupted = True
        _report(job, face, result, as_json, plot)
        raise
    _report(job, face, result, as_json, plot)


def _report(job: Job, face: str, result: Result, as_json: bool, plot: Path | None) -> None:
    _print(job, face, result, as_json)
    if plot is not None:
        from iserblk.cli.bench_plot import draw  # noqa: PLC0415 - not needed otherwise

        title = f"{_words(job, face)}: {_rate_words(job, result)}"
        draw(title, result.url, result.latencies, result.samples, job.block).write(plot)


Load = Callable[[AsyncLun, Job, Iterator[int], Result], Awaitable[None]]


def _in_trio(
    load: Load, urls: Sequence[str], options: dict[str, str], job: Job, result: Result
) -> None:
    async def body() -> None:
        async with aio.open_disks(urls, options) as disks:
            disk = only_disk(disks.disks)
            job.check(disk.size, disk.info)
            result.url = disk.info.url
            await load(disk, job, job.offsets(disk.size), result)

    run(body)


async def _load_by_tasks(disk: AsyncLun, job: Job, offsets: Iterator[int], result: Result) -> None:
    async def worker() -> None:
        buffer = memoryview(bytearray(os.urandom(job.block)))
        operation = disk.write if job.writes else disk.read_into
        add = result.latencies.add
        now = nanoseconds
        began = now()
        while began < end:
            await operation(buffer, next(offsets))
            ended = now()
            add(ended - began)
            began = ended

    with _timed(result, job, lambda: result.latencies.count):
        end = nanoseconds() + int(job.seconds * 1e9)
        async with trio.open_nursery() as nursery:
            for _ in range(job.depth):
                nursery.start_soon(worker)


async def _load_by_queue(disk: AsyncLun, job: Job, offsets: Iterator[int], result: Result) -> None:
    """The tag of a request is when it began."""
    add = result.latencies.add
    now = nanoseconds
    async with open_queue(disk) as queue:
        begin = queue.write if job.writes else queue.read
        with _timed(result, job, lambda: result.latencies.count):
            at = now()
            end = at + int(job.seconds * 1e9)
            for _ in range(job.depth):
                begin(memoryview(bytearray(os.urandom(job.block))), next(offsets), at)
            while queue.open:
                requests = await queue.ended()
                at = now()
                for request in requests:
                    if request.error is not None:
                        raise request.error
                    began = request.tag
                    assert isinstance(began, int)
                    add(at - began)
                    if at < end:
                        begin(request.buffer, next(offsets), at)


def _blocking(urls: Sequence[str], options: dict[str, str], job: Job, result: Result) -> None:
    with blocking.open_disks(urls, options) as disks:
        disk = only_disk(disks.disks)
        job.check(disk.size, disk.info)
        offsets = job.offsets(disk.size)
        result.url = disk.info.url
        errors: list[IserblkError] = []
        parts: list[Histogram] = []
        lock = threading.Lock()  # guards offsets, parts, and at the end result and errors

        def worker() -> None:
            buffer = memoryview(bytearray(os.urandom(job.block)))
            operation = disk.write if job.writes else disk.read_into
            latencies = Histogram()
            with lock:
                parts.append(latencies)
            now = nanoseconds
            began = now()
            try:
                while began < end and not errors:
                    with lock:
                        offset = next(offsets)
                    operation(buffer, offset)
                    ended = now()
                    latencies.add(ended - began)
                    began = ended
            except IserblkError as error:
                with lock:
                    errors.append(error)
            with lock:
                result.latencies.merge(latencies)

        threads = [threading.Thread(target=worker) for _ in range(job.depth)]
        with _timed(result, job, lambda: sum(part.count for part in parts.copy())):
            end = nanoseconds() + int(job.seconds * 1e9)
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:  # a signal: the threads must end before the disk is closed
                end = 0
                for thread in threads:
                    if thread.is_alive():
                        thread.join()
                raise
    if errors:
        raise errors[0]


_FACES: dict[str, Callable[[Sequence[str], dict[str, str], Job, Result], None]] = {
    "async": partial(_in_trio, _load_by_tasks),
    "queue": partial(_in_trio, _load_by_queue),
    "blocking": _blocking,
}


@contextmanager
def _timed(result: Result, job: Job, count: Callable[[], int]) -> Iterator[None]:
    """Measure the body, also where it is ended before its time, and show how far it is. ``count``:
    how many of its requests have ended; may be called from any thread."""
    began, before = monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    try:
        with _watched(result.samples, began, job, count), _shown(began, job, count):
            yield
    finally:
        after = resource.getrusage(resource.RUSAGE_SELF)
        result.seconds = monotonic() - began
        result.cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@contextmanager
def _shown(began: float, job: Job, count: Callable[[], int]) -> Iterator[None]:
    """While the body runs, a thread shows how far it is: requests do nothing for it."""
    with timed_progress(job.seconds, "measuring") as (pause, tell):

        def show() -> None:
            at, done = monotonic() - began, 0
            while not ended.wait(pause):
                last, before = at, done
                at, done = monotonic() - began, count()
                if at < job.seconds:
                    tell(at, f"{(done - before) / (at - last):,.0f} IOPS")

        if not pause:
            yield
            return
        ended = threading.Event()
        with _beside(show, ended):
            yield


@contextmanager
def _beside(look: Callable[[], None], ended: threading.Event) -> Iterator[None]:
    """While the body runs, a thread runs ``look``, which returns when ``ended`` is set."""
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _watched(
    samples: list[tuple[float, int]], began: float, job: Job, count: Callable[[], int]
) -> Iterator[None]:
    """While the body runs, a thread takes samples: requests do nothing for it."""
    if not job.watched:
        yield
        return
    pause = max(job.seconds / _SLICES, _SHORTEST_S)
    ended = threading.Event()
    samples.append((0.0, 0))

    def watch() -> None:
        while not ended.wait(pause):
            samples.append((monotonic() - began, count()))

    try:
        with _beside(watch, ended):
            yield
    finally:
        now = monotonic() - began
        if len(samples) > 1 and now - samples[-1][0] < pause / 2:
            samples.pop()  # what is left of a slice is too short for a rate
        samples.append((now, count()))


def _words(job: Job, face: str) -> str:
    return f"{job.pattern}, {job.block} bytes, depth {job.depth}, {face} face"


def _rate_words(job: Job, result: Result) -> str:
    rate = result.latencies.count / result.seconds
    return f"{rate:,.0f} IOPS, {rate * job.block / 1e6:,.1f} MB/s"


def _print(job: Job, face: str, result: Result, as_json: bool) -> None:
    latencies = result.latencies
    rate = latencies.count / result.seconds
    percentiles = {f"p{each:g}": latencies.percentile(each) / 1e3 for each in PERCENTILES}
    spread = {
        "min": latencies.minimum / 1e3,
        "mean": latencies.mean / 1e3,
        **percentiles,
        "max": latencies.maximum / 1e3,
    }
    cpu_us = result.cpu_seconds * 1e6 / max(latencies.count, 1)
    if as_json:
        print_json(
            {
                "rw": job.pattern,
                "block_size": job.block,
                "depth": job.depth,
                "face": face,
                "seconds": round(result.seconds, 3),
                "interrupted": result.interrupted,
                "ios": latencies.count,
                "bytes": latencies.count * job.block,
                "iops": round(rate, 1),
                "bytes_per_second": round(rate * job.block),
                "latency_us": {name: round(value, 1) for name, value in spread.items()},
                "cpu_seconds": round(result.cpu_seconds, 3),
                "cpu_us_per_io": round(cpu_us, 2),
            }
        )
        return
    click.echo(_words(job, face))
    if result.interrupted:
        click.echo(f"  interrupted after {result.seconds:.1f} s of {job.seconds:g} s")
    click.echo(f"  {_rate_words(job, result)}")
    click.echo(
        "  latency µs: " + ", ".join(f"{name} {value:,.0f}" for name, value in spread.items())
    )
    share = 100 * result.cpu_seconds / result.seconds
    click.echo(f"  processor: {cpu_us:.1f} µs per request, {share:.0f} % of one core")
