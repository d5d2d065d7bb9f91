"""What the commands take: their options and arguments, as click knows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from iserblk.cli.command import UsageStatus
from iserblk.cli.main import COMMANDS, cli
from iserblk.cli.options import CONNECTION

_OF_A_CONNECTION = {(f"--{name}", metavar, text) for name, metavar, text in CONNECTION}
_TYPES = {"integer range": "N", "integer": "N", "float range": "SECONDS"}


@dataclass(slots=True, frozen=True)
class Option:
    """``names``: as typed, with their hyphens. ``metavar``: names the value; "" if there is none.
    ``of_connection``: iserblk.cli.options.CONNECTION has it."""

    names: tuple[str, ...]
    metavar: str
    text: str
    repeatable: bool
    of_connection: bool

    def summary(self) -> str:
        """The first sentence of the text, which a shell shows beside the option."""
        return re.split(r"(?<=[^.]{3})[.;] |\.$", self.text)[0]

    def words(self) -> list[str]:
        """The values that can be typed as they stand in the metavar: ``auto|verbs|N`` has two."""
        return words_of(self.metavar)


@dataclass(slots=True, frozen=True)
class Command:
    """``name``: "" for iserblk itself. ``paragraphs``: of its help text. ``arguments``: their
    metavars. ``mounts``: its exit statuses are those of mount(8)."""

    name: str
    summary: str
    paragraphs: tuple[str, ...]
    arguments: tuple[str, ...]
    options: tuple[Option, ...]
    mounts: bool

    def own(self) -> list[Option]:
        return [option for option in self.options if not option.of_connection]

    def of_connection(self) -> list[Option]:
        return [option for option in self.options if option.of_connection]


def words_of(metavar: str) -> list[str]:
    return [word for word in re.split(r"\|", metavar) if re.fullmatch("[a-z0-9][a-z0-9-]*", word)]


def program() -> Command:
    """``iserblk`` without a command."""
    context = click.Context(cli, info_name="iserblk", **cli.context_settings)
    return _command("", "use remote SCSI LUNs over iSER or iSCSI", cli, context)


def commands() -> Iterator[Command]:
    """The commands, in the order of ``iserblk --help``."""
    above = click.Context(cli, info_name="iserblk", **cli.context_settings)
    for name, summary in COMMANDS.items():
        command = cli.get_command(above, name)
        assert command is not None
        context = click.Context(command, parent=above, info_name=name)
        yield _command(name, summary, command, context)


def _command(name: str, summary: str, command: click.Command, context: click.Context) -> Command:
    given = command.get_params(context)
    return Command(
        name,
        summary,
        tuple(" ".join(each.split()) for each in re.split(r"\n\s*\n", command.help or "")),
        tuple(each.metavar or each.human_readable_name.upper() for each in given
              if isinstance(each, click.Argument)),
        tuple(_option(each, context) for each in given
              if isinstance(each, click.Option) and not each.hidden),
        isinstance(command, UsageStatus),
    )  # fmt: skip


def _option(option: click.Option, context: click.Context) -> Option:
    names = tuple(sorted((*option.opts, *option.secondary_opts), key=len))
    metavar = ""
    if not option.is_flag and not option.count:
        metavar = option.metavar or _metavar(option.type)
    text = " ".join((option.help or "").split())
    if text and text[-1] not in ".!":
        text += "."
    if isinstance(option.type, click.IntRange | click.FloatRange) and metavar:
        text += f" From {option.type.min} to {option.type.max}."
    default = option.get_default(context)
    if option.show_default and default is not None:
        value = " ".join(default) if isinstance(default, tuple | list) else str(default)
        text += f" Default {value}."
    of_connection = (names[-1], metavar, option.help) in _OF_A_CONNECTION
    return Option(names, metavar, text, option.multiple or option.count, of_connection)


# click.ParamType is not generic in click 8.1.
def _metavar(of: click.ParamType[Any]) -> str:  # type: ignore[type-arg, unused-ignore]
    if isinstance(of, click.Choice):
        return "|".join(of.choices)
    return _TYPES.get(of.name, of.name.upper())
