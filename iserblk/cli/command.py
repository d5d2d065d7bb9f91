"""The commands' class: short help, all of the help, and what usage errors say."""

from __future__ import annotations

import click

from iserblk.names import suggestion
from iserblk.options import OPTION_NAMES
from iserblk.url import OF_ONE_SCHEME

_ALL = "iserblk.cli.command.all"  # in the context's ``meta``: all options are to be shown


# What other programs call it.
_MEANT = {
    "--port": "--listen",
    "--portal": "--listen",
    "--address": "--listen",
    "--bind": "--listen",
    "--ro": "--read-only",
    "--readonly": "--read-only",
    "--daemon": "--background",
    "--fork": "--background",
    "--detach": "--background",
    "--timeout": "--io-timeout",
    "--pid-file": "--pidfile",
}


class Rare(click.Option):
    """An option that few people set: ``--help-all`` shows it, and ``--help`` does not."""


def _show_all(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options, also those that few people set.",
)


class Command(click.Command):
    """A command of ``iserblk``. ``usage_status``: with which it ends after wrong usage."""

    usage_status = 7  # that of BadArgument

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if any(isinstance(each, Rare) for each in params):
            return [*params, _HELP_ALL]
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        every = ctx.meta.get(_ALL, False)
        records = [
            record
            for each in self.get_params(ctx)
            if isinstance(each, click.Option) and (every or not isinstance(each, Rare))
            if (record := each.get_help_record(ctx)) is not None
        ]
        with formatter.section("Options"):
            formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises click.UsageError, which knows the command also where click's own does not."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(self._no_such(ctx, error.option_name), ctx) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def _no_such(self, ctx: click.Context, name: str) -> str:
        said = f"No such option '{name}'"
        above = ctx.parent
        if above is not None and name in names_of(above.command, above):
            return f"{said} here: it stands before the command: `iserblk {name} {self.name} …`"
        own = names_of(self, ctx)
        key = name.removeprefix("--").replace("_", "-")
        if key in OPTION_NAMES and "--io-timeout" in own and f"--{key}" not in own:
            if key == "target-password":
                return f"{said}: every user would see it; put it into the file of chap-secret-file"
            scheme = "iscsi" if key in OF_ONE_SCHEME["iscsi"] else "iser"
            return f"{said}: it is an option of URLs: {scheme}://HOST/TARGET-IQN/LUN?{key}=VALUE"
        if name in _MEANT and _MEANT[name] in own:
            return f"{said}: is it {_MEANT[name]}?"
        return said + suggestion(name, own)


class UsageStatus(Command):
    """A command with the exit statuses of mount(8)."""

    usage_status = 1


def names_of(command: click.Command, context: click.Context) -> list[str]:
    """The options of a command, with their hyphens."""
    return [
        name
        for each in command.get_params(context)
        if isinstance(each, click.Option) and not each.hidden
        for name in (*each.opts, *each.secondary_opts)
    ]
