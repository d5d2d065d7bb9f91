"""``iserblk copy``: copies between LUNs, files and block devices."""

from __future__ import annotations

import logging
import time

import click

from iserblk.cli.command import Command
from iserblk.cli.endpoints import (
    FileEnd,
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
from iserblk.cli.transfer import Totals, copy
from iserblk.cli.transfer import verify as compare_again
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import BadArgument

log = logging.getLogger(__name__)


@click.command("copy", cls=Command)
@click.argument("places", metavar="SRC… DST…", nargs=-1, required=True)
@click.option("--verify", is_flag=True, help="Afterwards read both again, and compare.")
@json_option
@connection_options
def command(places: tuple[str, ...], verify: bool, as_json: bool, **options: str | None) -> None:
    """Copy all of SRC to DST. Each is a URL that names one LUN, a file, or a block device; or
    several URLs of one LUN, through its portals.

    Holes and zeroes are not sent; they become holes if DST can have holes. If DST is a file, it is
    created, or overwritten in place. A LUN or block device must be at least as large as SRC; its
    bytes behind SRC's end stay as they are. Files that a target serves are refused.
    """
    given = connection(options)
    source, destination = two_ends(named_places(places, given), "copy")

    async def transfer() -> tuple[Totals, float]:
        async with (
            open_source(source, given) as one,
            open_destination(destination, given) as other,
        ):
            if same_place(one, other):
                raise BadArgument("source and destination are the same")
            if isinstance(other, FileEnd):
                await other.lock(to_write=True)
            # Nothing of the destination is changed before all has been checked.
            if isinstance(other, FileEnd) and other.regular:
                await other.resize(one.size)
            else:
                _check_sizes(one, other)
            began = time.monotonic()
            with progress(one.size, "copying") as advance:
                totals = await copy(one, other, advance)
            seconds = time.monotonic() - began
            if verify:
                with progress(one.size, "verifying") as advance:
                    await compare_again(one, other, advance)
            return totals, seconds

    totals, seconds = run(transfer)
    size = totals.data + totals.zero
    if as_json:
        print_json(
            {
                "bytes": size,
                "data_bytes": totals.data,
                "zero_bytes": totals.zero,
                "seconds": round(seconds, 3),  # of the copy alone
                "verified": verify,
            }
        )
        return
    click.echo(
        f"copied {size_words(size)} ({size_words(totals.zero)} of zeroes) in {seconds:.1f} s, "
        f"{size_words(size / max(seconds, 1e-9))}/s{', verified' if verify else ''}"
    )


def _check_sizes(source: AsyncDisk | FileEnd, destination: AsyncDisk | FileEnd) -> None:
    if destination.size < source.size:
        raise BadArgument(
            f"the destination is too small: it has {destination.size} bytes, "
            f"the source {source.size}"
        )
    if destination.size > source.size:
        log.warning(
            "the destination is larger: its last %d bytes stay as they are",
            destination.size - source.size,
        )
