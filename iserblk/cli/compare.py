"""``iserblk compare``: whether two LUNs, files or block devices have the same content."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import click

from iserblk.cli.command import Command
from iserblk.cli.endpoints import named_places, open_source, same_place, two_ends
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import print_json, size_words, system_words
from iserblk.cli.progress import progress
from iserblk.cli.running import run
from iserblk.cli.transfer import compare
from iserblk.errors import BadArgument, IserblkError
from iserblk.loop.clock import monotonic

log = logging.getLogger(__name__)

DIFFERENT = 1  # exit status


class NotCompared(IserblkError):
    """Nothing is known of the content: the text says why."""

    exit_status = DIFFERENT + 1


class _Comparing(Command):
    """Status 1 says that there is a difference, and nothing else: all that prevents an answer, or
    keeps it from being written, ends with another."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IserblkError as error:
            if error.exit_status != DIFFERENT:
                raise
            raise NotCompared(str(error)) from None
        except BrokenPipeError:  # of stdout, and nobody wants to know
            sys.exit(NotCompared.exit_status)
        except OSError as error:
            raise NotCompared(system_words(error)) from None
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception:  # a bug of iserblk
            traceback.print_exc()
            sys.exit(NotCompared.exit_status)


@click.command("compare", cls=_Comparing)
@click.argument("places", metavar="A… B…", nargs=-1, required=True)
@click.option("--strict", is_flag=True, help="Sizes that differ are a difference, too.")
@json_option
@connection_options
def command(places: tuple[str, ...], strict: bool, as_json: bool, **options: str | None) -> None:
    """Compare all of A with all of B. Each is a URL that names one LUN, a file, or a block device;
    or several URLs of one LUN, through its portals.

    The exit status is 0 if they have the same content, and 1 if they differ; then the first byte
    that does is named. If one is longer, its rest has to be zeroes. Nothing is written, and holes
    of both are not read. Files that a target serves for writing are refused.
    """
    if "-" in places:
        raise BadArgument(
            "compare reads no pipes: `iserblk copy` writes one to a file first; a file called - is"
            " ./-"
        )
    given = connection(options)
    ends = two_ends(named_places(places, given, writes=False), "compare")

    async def look() -> tuple[int | None, tuple[int, int], float]:
        async with open_source(ends[0], given) as one, open_source(ends[1], given) as other:
            if same_place(one, other):
                raise BadArgument("compare: both are the same")
            sizes = one.size, other.size
            began = monotonic()
            if strict and sizes[0] != sizes[1]:
                return min(sizes), sizes, 0.0
            with progress(max(sizes), "comparing") as advance:
                first = await compare(one, other, advance)
            return first, sizes, monotonic() - began

    first, sizes, seconds = run(look)
    if as_json:
        print_json(
            {
                "identical": first is None,
                "first_difference": first,
                "bytes": list(sizes),
                "seconds": round(seconds, 3),
            }
        )
    elif first is not None:
        click.echo(_difference(first, sizes))
    else:
        longer = max(sizes) - min(sizes)
        rest = f"; {longer} bytes of zeroes follow in {'AB'[sizes[1] > sizes[0]]}" if longer else ""
        click.echo(
            f"identical: {size_words(min(sizes))} in {seconds:.1f} s, "
            f"{size_words(max(sizes) / max(seconds, 1e-9))}/s{rest}"
        )
    if first is not None:
        sys.exit(DIFFERENT)


def _difference(first: int, sizes: tuple[int, int]) -> str:
    if sizes[0] == sizes[1]:
        return f"different: the first byte that differs is byte {first}"
    words = f"different: A has {sizes[0]} bytes, B {sizes[1]}"
    if first < min(sizes):
        return f"{words}; the first byte that differs is byte {first}"
    return f"{words}; the bytes from {first} on are in one of them only"
