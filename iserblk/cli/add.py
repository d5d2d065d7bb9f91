"""``iserblk add``: gives LUNs a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from fuse_mount.errors import UsageError
from fuse_mount.options import parse_options
from iserblk.cli.command import Command
from iserblk.cli.options import connection, connection_options
from iserblk.credentials import find_credentials, strip_secrets
from iserblk.disk.multipath.addresses import settle
from iserblk.errors import BadArgument
from iserblk.iscsi.chap import Credentials
from iserblk.named.files import Named, check_name, check_words, save, secret_path
from iserblk.names import shown
from iserblk.options import OPTION_NAMES, Options
from iserblk.secret import Secret
from iserblk.url import check_scheme, is_url, parse_url

_FOREIGN = ("chap-secret-file", "chap-secret-credential")  # sources that are left where they are


@click.command("add", cls=Command)
@click.argument("name", metavar="NAME")
@click.argument("urls", metavar="URL…", nargs=-1)
@click.option(
    "--device",
    "devices",
    metavar="/dev/nbdX",
    multiple=True,
    help="Where `attach NAME` attaches; repeatable, one for each LUN. Default: free devices.",
)
@click.option("--mountpoint", metavar="DIR", help="Where `mount NAME` mounts.")
@click.option(
    "-o",
    "words",
    metavar="OPT,OPT",
    multiple=True,
    help="Options of the connection as NAME=VALUE, and those of mount (ro, uid=, …), separated by"
    " commas.",
)
@click.option("--replace", is_flag=True, help="Replace the named LUN of that name.")
@connection_options
def command(
    name: str,
    urls: tuple[str, ...],
    devices: tuple[str, ...],
    mountpoint: str | None,
    words: tuple[str, ...],
    replace: bool,
    **options: str | None,
) -> None:
    """Give LUNs the name NAME, with options. Every command takes NAME in place of URL, and
    `iserblk enable NAME` attaches or mounts it at each boot.

    The name is kept in /etc/iserblk/NAME.conf; for other users than root in
    $XDG_CONFIG_HOME/iserblk. A CHAP secret is taken out of the URL, the environment or
    --chap-secret-fd, and kept beside it, in a file of its own that only its owner can read.
    """
    check_name(name)
    if not urls:
        raise click.UsageError("Missing argument 'URL…'.", click.get_current_context())
    for text in urls:
        if not is_url(text):
            raise BadArgument(
                f"{shown(text)} is no URL, and a named LUN is made of URLs: "
                "write iser://HOST/TARGET-IQN/LUN"
            )
    if devices and mountpoint:
        raise BadArgument("--device is for attach, --mountpoint for mount: give one of them")
    if mountpoint is not None and not mountpoint.startswith("/"):
        raise BadArgument("--mountpoint: give a full path, beginning with /")
    for device in devices:
        if not device.startswith("/dev/nbd"):
            raise BadArgument(f"--device {device}: name a device, e.g. /dev/nbd0")
    given, others = _split(words)
    given.update(connection(options))
    if others and devices:
        raise BadArgument(f"-o {others[0]}: attach has no such option")
    credentials = _check(urls, given)
    kept = {key: value for key, value in given.items() if key != "chap-secret-fd"}
    lines = _secrets(credentials)
    if lines:
        kept["chap-secret-file"] = str(secret_path(name))
        texts = [_without_secret(*pair) for pair in zip(urls, credentials, strict=True)]
    else:
        texts = list(urls)
    named = Named(name, tuple(texts), devices, mountpoint or "", _words(kept, others))
    click.echo(f"{name} is in {save(named, lines, replace=replace)}")


def _split(lists: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options of iserblk, and the other words of -o, which are mount's. Raises BadArgument."""
    options: dict[str, str] = {}
    others = []
    for word in ",".join(lists).split(","):
        name, equals, value = word.partition("=")
        key = name.replace("_", "-")
        if key in ("isid", "target-password"):
            raise BadArgument(f"-o {name}: cannot be kept in a named LUN")
        if key in OPTION_NAMES and equals:
            options[key] = value
        elif word:
            others.append(word)
    try:
        parse_options(others)
    except UsageError as error:
        raise BadArgument(str(error)) from None
    return options, others


def _check(urls: Sequence[str], given: Mapping[str, str]) -> list[Credentials | None]:
    """Check all that can be checked without the target, and find the credentials of each URL that
    a secret of the named LUN is to be made of."""
    foreign = [name for name in _FOREIGN if name in given]
    found: list[Credentials | None] = []
    credential = "chap-secret-credential" in given
    for text in urls:
        url = parse_url(text)
        settled = Options.from_pairs({**given, **url.options}.items())
        if "isid" in url.options:
            raise BadArgument("isid: cannot be kept in a named LUN: one session has it")
        credential |= bool(settled.chap_secret_credential)
        if settled.chap_secret_credential:
            check_scheme(url, settled)  # the credential exists in the unit alone
            found.append(None)
            continue
        credentials = find_credentials(url, settled)
        own = bool(foreign) or bool(settled.chap_secret_file)
        found.append(None if own else credentials)
    if not credential:
        settle(urls, given)
    return found


def _secrets(found: Sequence[Credentials | None]) -> list[Secret]:
    """The lines of the file with the secrets of all URLs."""
    lines: list[list[Secret]] = []
    for each in found:
        if each is not None:
            lines.append([secret for secret in (each.secret, each.target_secret) if secret])
    if not lines:
        return []
    if len(lines) < len(found) or any(each != lines[0] for each in lines):
        raise BadArgument(
            "the URLs have different CHAP secrets: give each its own chap-secret-file=, or add"
            " several named LUNs"
        )
    return lines[0]


def _without_secret(text: str, credentials: Credentials | None) -> str:
    """The URL, with what identifies the user, and without what the secret file has."""
    assert credentials is not None
    keys = {"target-user": credentials.target_user} if credentials.target_user else {}
    check_words("the user's name", [credentials.user, credentials.target_user])
    return strip_secrets(text, credentials.user, keys)


def _words(options: Mapping[str, str], others: Sequence[str]) -> tuple[str, ...]:
    words = [*others]
    for key, value in options.items():
        if "," in value or "\\" in value or "\n" in value:
            raise BadArgument(f"{key}: a comma cannot stand in an option: write it in the URL, as"
                              f" ?{key}=…")  # fmt: skip
        words.append(f"{key}={value}")
    return tuple(words)
