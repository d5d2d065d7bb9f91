"""``iserblk copy``: copies between LUNs, files and block devices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import click

from iserblk.cli.command import Command
from iserblk.cli.endpoints import (
    FileEnd,
    Opened,
    named_places,
    open_destination,
    open_source,
    same_place,
    two_ends,
)
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import print_json, size_words
from iserblk.cli.progress import progress
from iserblk.cli.running import run
from iserblk.cli.streams import Stream, is_stream
from iserblk.cli.transfer import Totals, copy, copy_in, copy_out
from iserblk.cli.transfer import verify as compare_again
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import BadArgument, IserblkError
from iserblk.loop.clock import monotonic

log = logging.getLogger(__name__)

_PART = "holds a part of the copy now"


@click.command("copy", cls=Command)
@click.argument("places", metavar="SRC… DST…", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="Afterwards read both again, and compare.")
@click.option(
    "--short", is_flag=True, help="Where SRC is -: it may end before a LUN or device is full."
)
@json_option
@connection_options
def command(
    places: tuple[str, ...], verify: bool, short: bool, as_json: bool, **options: str | None
) -> None:
    """Copy all of SRC to DST. Each is a URL that names one LUN, a file, or a block device; or
    several URLs of one LUN, through its portals. - is standard input, or standard output.

    Holes and zeroes are not sent; they become holes if DST can have holes. If DST is a file, it is
    created, or overwritten in place. A LUN or block device must be at least as large as SRC; its
    bytes behind SRC's end stay as they are. Files that a target serves are refused.
    """
    given = connection(options)
    source, destination = two_ends(named_places(places, given), "copy")
    piped = is_stream(source) or is_stream(destination)
    if is_stream(source) and is_stream(destination):
        raise BadArgument("copy: SRC and DST are both -: one of them is a LUN, file or device")
    if piped and verify:
        raise BadArgument("--verify cannot read - again: leave out --verify")
    if short and not is_stream(source):
        raise BadArgument("--short is for SRC -: leave out --short")
    left: list[str] = []  # what has become of a destination that is not whole

    async def transfer() -> tuple[Totals, float]:
        async with _source(source, given) as one, _destination(destination, given) as other:
            if same_place(one, other):
                raise BadArgument("source and destination are the same")
            if isinstance(other, Opened):
                await other.lock(to_write=True)
            try:
                totals, seconds = await _copy(one, other, short)
            except BaseException:
                if isinstance(other, FileEnd):
                    left.extend(_leave(other))
                raise
            if verify:
                assert not isinstance(one, Stream) and not isinstance(other, Stream)
                with progress(one.size, "verifying") as advance:
                    await compare_again(one, other, advance)
            return totals, seconds

    try:
        totals, seconds = run(transfer)
    except IserblkError as error:
        error.args = ("; ".join([str(error), *left]),)
        raise
    except SystemExit:  # a signal: nothing is said of what is as it was before
        for words in left:
            if words.endswith(_PART):
                log.error("interrupted: %s", words)
        raise
    size = totals.data + totals.zero
    told_aside = is_stream(destination)
    if as_json:
        print_json(
            {
                "bytes": size,
                "data_bytes": totals.data,
                "zero_bytes": totals.zero,
                "seconds": round(seconds, 3),  # of the copy alone
                "verified": verify,
            },
            err=told_aside,
        )
    elif not told_aside or log.isEnabledFor(logging.WARNING):
        click.echo(
            f"copied {size_words(size)} ({size_words(totals.zero)} of zeroes) in {seconds:.1f} s, "
            f"{size_words(size / max(seconds, 1e-9))}/s{', verified' if verify else ''}",
            err=told_aside,
        )


@asynccontextmanager
async def _source(
    place: Sequence[str], options: Mapping[str, str]
) -> AsyncIterator[AsyncDisk | FileEnd | Stream]:
    if is_stream(place):
        stream = Stream(0, "stdin")
        await stream.lock(to_write=False)
        yield stream
    else:
        async with open_source(place, options) as end:
            yield end


@asynccontextmanager
async def _destination(
    place: Sequence[str], options: Mapping[str, str]
) -> AsyncIterator[AsyncDisk | FileEnd | Stream]:
    if is_stream(place):
        yield Stream(1, "stdout")
    else:
        async with open_destination(place, options) as end:
            yield end


async def _copy(
    one: AsyncDisk | FileEnd | Stream, other: AsyncDisk | FileEnd | Stream, short: bool
) -> tuple[Totals, float]:
    """Returns the totals, and the seconds it took. Nothing of the destination is changed before all
    has been checked."""
    if isinstance(other, Stream):
        assert not isinstance(one, Stream)
        began = monotonic()
        with progress(one.size, "copying") as advance:
            totals = await copy_out(one, other, advance)
        return totals, monotonic() - began
    fits = isinstance(other, FileEnd) and other.regular  # it becomes as large as the source
    if one.size is not None and not fits:
        _check_sizes(one.size, other.size)
    if not isinstance(one, Stream):
        if isinstance(other, FileEnd) and fits:
            await other.resize(one.size)
        began = monotonic()
        with progress(one.size, "copying") as advance:
            totals = await copy(one, other, advance)
        return totals, monotonic() - began
    began = monotonic()
    with progress(one.size, "copying") as advance:
        totals, more = await copy_in(one, other, None if fits else other.size, advance)
    if isinstance(other, FileEnd) and fits:
        await other.resize(one.done)
        await other.flush()
    seconds = monotonic() - began
    if one.size is not None:
        if one.done < one.size:
            raise IserblkError(f"stdin ended after {one.done} bytes, and had {one.size} before")
    elif more:
        raise IserblkError(
            f"stdin has more than the {other.size} bytes of the destination: these are written, and"
            " the rest is not"
        )
    elif not fits and one.done < other.size:
        if not short:
            raise IserblkError(
                f"stdin ended after {one.done} bytes, and the destination has {other.size}: its"
                " other bytes are as they were; if that was all, add --short"
            )
        _check_sizes(one.done, other.size)
    return totals, seconds


def _leave(file: FileEnd) -> Iterator[str]:
    """After a failed copy: says what the destination is now. Nothing is left of a file that was
    not there before."""
    if file.created:
        file.remove()
        yield f"{file.path} is removed again"
    elif file.regular:
        yield f"{file.path} {_PART}"


def _check_sizes(source: int, destination: int) -> None:
    if destination < source:
        raise BadArgument(
            f"the destination is too small: it has {destination} bytes, the source {source}"
        )
    if destination > source:
        log.warning(
            "the destination is larger: its last %d bytes stay as they are", destination - source
        )
