"""Completions for bash, zsh and fish: templates of shells/, filled with the commands and options.

A metavar says what completes a word. Kinds: ``url`` (URLs and named LUNs), ``portal``, ``name``,
``nbd`` (devices), ``attached``, ``mounted``, ``file``, ``directory``, ``pairs`` (a list of -o).
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuse_mount.options import FLAGS, NUMBERS
from iserblk.cli.options import CONNECTION
from iserblk.options import OPTION_NAMES
from manlib.commands import Command, Option, words_of

_TEMPLATES = Path(__file__).parent / "shells"
_OF_WORD = {"FILE": "file", "PATH": "file", "DIR": "directory", "/dev/nbdX": "nbd"}


@dataclass(slots=True, frozen=True)
class Value:
    """What completes a word: ``words`` as they are, and what there is of ``kinds``."""

    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


def completions(program: Command, commands: Sequence[Command]) -> dict[str, str]:
    """Path below the output directory, and text, of the file for each shell."""
    return {
        "share/bash-completion/completions/iserblk": _bash(program, commands),
        "share/zsh/site-functions/_iserblk": _zsh(program, commands),
        "share/fish/vendor_completions.d/iserblk.fish": _fish(program, commands),
    }


def of_option(option: Option) -> Value:
    if option.metavar == "OPT,OPT":
        return Value(kinds=("pairs",))
    found = (_OF_WORD.get(word) for word in re.findall("/dev/nbdX|[A-Z]+", option.metavar))
    return Value(tuple(option.words()), tuple(dict.fromkeys(kind for kind in found if kind)))


def of_arguments(command: Command) -> Value:
    """What any argument may be, whatever its place."""
    given = set(re.findall("[A-Za-z]+", " ".join(command.arguments)))
    takes_url = bool(given & {"URL", "SRC", "DST", "A", "B"})
    kinds = {
        "portal": "PORTAL" in given,
        "url": takes_url,
        "name": bool(given & {"NAME", "WHAT"}) and not takes_url,
        "nbd": "nbdX" in given and takes_url,
        "attached": ("nbdX" in given and not takes_url) or "WHAT" in given,
        "mounted": ("MOUNTPOINT" in given and not takes_url) or "WHAT" in given,
        "directory": "MOUNTPOINT" in given and takes_url,
        "file": bool(given & {"SRC", "DST", "A", "B", "FILE", "PATH"}),
    }
    return Value(kinds=tuple(kind for kind, has in kinds.items() if has))


def _pairs() -> dict[str, tuple[str, ...]]:
    """The options of a list of -o that have a value, with the words that the value may be."""
    words = {name: tuple(words_of(metavar)) for name, metavar, _ in CONNECTION}
    return {name: words.get(name, ()) for name in OPTION_NAMES if name != "target-password"}


def _fill(name: str, **values: str) -> str:
    text = (_TEMPLATES / name).read_text(encoding="utf-8")
    lists = (_TEMPLATES / "lists.sh").read_text(encoding="utf-8").splitlines()
    values["lists"] = "\n".join(line for line in lists if not line.startswith("#"))
    for key, value in values.items():
        text = text.replace(f"@{key.upper()}@", value)
    return text


# --- bash ----------------------------------------------------------------------------------------


def _bash(program: Command, commands: Sequence[Command]) -> str:
    lines = [f'    "") options="{_all_names(program)}" kinds=command ;;']
    for command in commands:
        kinds = " ".join(of_arguments(command).kinds)
        lines.append(f'    {command.name}) options="{_all_names(command)}" kinds="{kinds}" ;;')
    pairs = _pairs()
    return _fill(
        "iserblk.bash",
        commands="\n".join(lines),
        values="\n".join(_bash_values(commands)),
        pairs="\n".join(
            f'    {name}) choices="{" ".join(words)}" ;;' for name, words in pairs.items() if words
        ),
        flags=" ".join([*FLAGS, *(f"{name}=" for name in NUMBERS)]),
        names=" ".join(f"{name}=" for name in pairs),
        names_of_commands=" ".join(command.name for command in commands),
    )


def _all_names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


def _bash_values(commands: Sequence[Command]) -> Iterator[str]:
    for option, groups in _by_option(commands).items():
        for value, names in groups:
            pattern = "|".join(f"{name}:{option}" for name in names) if names else f"*:{option}"
            kinds = " ".join(value.kinds)
            yield f'    {pattern}) choices="{" ".join(value.words)}" kinds="{kinds}" ;;'


def _by_option(commands: Sequence[Command]) -> dict[str, list[tuple[Value, list[str]]]]:
    """For each name of an option that has a value: the values, and the commands with each; without
    commands if it is the same with all."""
    found: dict[str, dict[Value, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command in commands:
        for option in command.options:
            for name in option.names if option.metavar else ():
                found[name][of_option(option)].append(command.name)
    all_of = {
        name: {command.name for command in commands
               if any(name in option.names for option in command.options)}
        for name in found
    }  # fmt: skip
    return {
        name: [(value, [] if set(having) == all_of[name] else having)
               for value, having in groups.items()]
        for name, groups in found.items()
    }  # fmt: skip


# --- zsh -----------------------------------------------------------------------------------------


def _zsh(program: Command, commands: Sequence[Command]) -> str:
    arguments = []
    for command in commands:
        specs = [*_zsh_options(command)]
        kinds = of_arguments(command).kinds
        if kinds:
            specs.append(shlex.quote(f"*: :_iserblk_from {' '.join(kinds)}"))
        joined = " \\\n            ".join(specs)
        arguments.append(
            f"        {command.name})\n          _arguments -s \\\n            {joined} ;;"
        )
    pairs = [
        shlex.quote(f"{name}:{name}:({' '.join(words)})" if words else f"{name}:{name}: ")
        for name, words in _pairs().items()
    ]
    return _fill(
        "_iserblk",
        commands="\n".join(
            f"        {shlex.quote(f'{each.name}:{each.summary}')}" for each in commands
        ),
        arguments="\n".join(arguments),
        options=" ".join(_zsh_options(program)),
        flags=" ".join([*FLAGS, *(shlex.quote(f"{name}:{name}: ") for name in NUMBERS)]),
        pairs=" ".join(pairs),
    )


def _zsh_options(command: Command) -> Iterator[str]:
    for option in command.options:
        text = re.sub(r"([\[\]\\])", r"\\\1", option.summary())
        for name in option.names:
            spec = "*" if option.repeatable else f"({' '.join(option.names)})"
            if option.metavar:
                spec += f"{name}{'=' if name.startswith('--') else '+'}[{text}]"
                metavar = option.metavar.replace(":", r"\:")
                spec += f":{metavar}:{_zsh_action(command, option)}"
            else:
                spec += f"{name}[{text}]"
            yield shlex.quote(spec)


def _zsh_action(command: Command, option: Option) -> str:
    value = of_option(option)
    if value.kinds == ("pairs",):
        return "_iserblk_mount_pairs" if command.mounts else "_iserblk_pairs"
    if not value.kinds:
        return f"({' '.join(value.words)})" if value.words else " "
    words = f" -- {' '.join(value.words)}" if value.words else ""
    return f"_iserblk_from {' '.join(value.kinds)}{words}"


# --- fish ----------------------------------------------------------------------------------------


def _fish(program: Command, commands: Sequence[Command]) -> str:
    lines = [
        f"complete -c iserblk -n 'not __iserblk_command' -a {each.name} -d {_in_fish(each.summary)}"
        for each in commands
    ]
    lines += [
        f"complete -c iserblk -n 'not __iserblk_command' {_fish_option(option)}"
        for option in program.options
    ]
    same: dict[str, list[str]] = defaultdict(list)
    for command in commands:
        for option in command.options:
            same[_fish_option(option, command.mounts)].append(command.name)
        kinds = of_arguments(command).kinds
        if kinds:
            same[" ".join(_fish_arguments(kinds))].append(command.name)
    lines += [
        f"complete -c iserblk -n '__iserblk_in {' '.join(names)}' {words}"
        for words, names in same.items()
    ]
    pairs = [f"{name}={word}" for name, words in _pairs().items() for word in words or ("",)]
    return _fill("iserblk.fish", lines="\n".join(lines), pairs=" ".join(pairs))


def _in_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_option(option: Option, mounts: bool = False) -> str:
    words = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    ]
    if option.metavar:
        value = of_option(option)
        if value.kinds == ("pairs",):
            more = " ".join([*FLAGS, *(f"{name}=" for name in NUMBERS)]) if mounts else ""
            words.append(f"-x -a '(__iserblk_pairs {more})'".replace(" )", ")"))
        else:
            words.append("-r" if "file" in value.kinds else "-x")
            words += _fish_arguments(value.kinds)
            if value.words:
                words.append(f"-a '{' '.join(value.words)}'")
    return " ".join([*words, f"-d {_in_fish(option.summary())}"])


def _fish_arguments(kinds: Iterable[str]) -> Iterator[str]:
    ask = {
        "url": "__iserblk_url",
        "portal": "__fish_print_hostnames",
        "directory": "__fish_complete_directories",
    }
    kinds = list(kinds)
    asked = [ask.get(kind, f"__iserblk_lists {kind}") for kind in kinds if kind != "file"]
    if "file" in kinds:
        yield "-F"
    if asked:
        yield f"-a '({'; '.join(asked)})'"  # of several -a the last one counts
