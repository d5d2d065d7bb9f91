"""``iserblk trim``: gives space back (pyfuse3 has no way to do that through a file)."""

from __future__ import annotations

import sys

import click

from iserblk.cli.command import Command
from iserblk.cli.endpoints import check_one_lun, only_disk
from iserblk.cli.options import Size, connection, connection_options, json_option
from iserblk.cli.output import print_json, size_words
from iserblk.cli.running import run
from iserblk.disk.aio import open_disks
from iserblk.disk.writers import is_shared, note_use
from iserblk.errors import BadArgument, IserblkError
from iserblk.metrics.records import Recorded
from iserblk.named.resolving import urls_of


@click.command("trim", cls=Command)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option("--offset", type=Size(), help="First byte; default 0.")
@click.option("--length", type=Size(), help="Bytes; default: up to the end of the LUN.")
@click.option("--all", "everything", is_flag=True, help="The whole LUN, without a question.")
@json_option
@connection_options
def command(
    urls: tuple[str, ...],
    offset: int | None,
    length: int | None,
    everything: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Tell the LUN that a range is not needed any more: its data is lost, its space is free.

    Only whole blocks inside the range are trimmed; their content is undefined afterwards. Several
    URLs of one LUN are several ways to it.
    """
    given = connection(options)
    found = urls_of(urls, given, to_write=True)
    check_one_lun(found)
    if offset is None and length is None:
        if not everything:
            _ask()
    elif everything:
        raise BadArgument("--all is the whole LUN; leave out --offset and --length, or --all")
    first = offset or 0

    async def trim() -> tuple[int, int]:
        async with open_disks(found, given) as disks:
            disk = only_disk(disks.disks)
            note_use(recorded, [disk.info], shared=is_shared(found, given))
            count = max(disk.size - first, 0) if length is None else length
            if first + count > disk.size:
                raise BadArgument(
                    f"{disk.info.url} has {disk.size} bytes: the range that begins at --offset "
                    f"{first} leaves it"
                )
            await disk.trim(first, count, patient=True)
            await disk.flush()
            return whole_blocks(first, count, disk.info.block_size)

    with Recorded("trim") as recorded:
        begin, count = run(trim)
    if as_json:
        print_json({"offset": begin, "length": count})
    elif count:
        click.echo(f"trimmed {size_words(count)} from offset {begin}")
    else:
        click.echo("trimmed nothing: there is no whole block in the range")


def whole_blocks(offset: int, length: int, block: int) -> tuple[int, int]:
    """The whole blocks inside a range: the offset of the first, and their bytes."""
    begin = -(-offset // block) * block
    return begin, max((offset + length) // block * block - begin, 0)


def _ask() -> None:
    """Raises BadArgument where no user can be asked, and IserblkError where the answer is no."""
    if not sys.stdin.isatty():
        raise BadArgument(
            "this trims the whole LUN, and loses all its data: add --all, or give --offset and"
            " --length"
        )
    if not click.confirm("Trim the whole LUN? All its data is lost.", err=True):
        raise IserblkError("nothing was trimmed")
