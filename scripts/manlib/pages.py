"""The manual pages. Their text is that of the commands' help and of the documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fuse_mount import helper, umount_helper
from iserblk import __version__
from iserblk.options import OPTION_NAMES
from manlib.commands import Command, Option
from manlib.documents import Documents, body
from manlib.markdown import Block, Section, walk
from manlib.roff import Page, bold, inline, italic

_LINK = re.compile(r"\[([^]]+)\]\(([^)#]*)(?:#([^)]*))?\)")
_OF_URLS = ("Authentication", "For one host alone")  # of common.md
_HOMES = {  # of the documents that are about several commands
    "urls.md": "iserblk-url(7)",
    "options.md": "iserblk-url(7)",
    "named.md": "iserblk.conf(5)",
    "units.md": "iserblk.conf(5)",
    "common.md": "iserblk(1)",
    "cli.md": "iserblk(1)",
}
_ENVIRONMENT = {
    "LIBISCSI_CHAP_USERNAME, LIBISCSI_CHAP_PASSWORD": "User and secret of CHAP, where a URL has"
    " none.",
    "LIBISCSI_CHAP_TARGET_USERNAME, LIBISCSI_CHAP_TARGET_PASSWORD": "The target's, for mutual"
    " CHAP.",
    "CREDENTIALS_DIRECTORY": "Where `chap-secret-credential` looks; systemd sets it.",
    "NOTIFY_SOCKET": "Where to tell that the command is ready; systemd sets it.",
    "LISTEN_FDS, LISTEN_PID": "Sockets for `iserblk nbd`; systemd sets it.",
    "ISERBLK_READY_FD": "A descriptor to which nbdkit's plugin writes how its login ended;"
    " `iserblk nbd --nbdkit` sets it.",
    "ISERBLK_OWED": "A file in which nbdkit's plugin notes losses of writes of which the clients of"
    " a device have not been told; `iserblk attach --nbdkit` sets it.",
    "ISERBLK_CONFIG_DIR": "The directory of named LUNs, in place of the usual ones.",
    "XDG_CONFIG_HOME": "Users other than root have named LUNs of their own in a directory below it;"
    " without it, below ~/.config.",
    "XDG_RUNTIME_DIR": "Users other than root have the sockets of metrics in a directory below it.",
    "ISERBLK_PLAIN": "1: do not use the compiled form of the data path.",
}
_FILES = {
    "/etc/iserblk/NAME.conf": "A named LUN, see `iserblk.conf(5)`.",
    "/etc/iscsi/initiatorname.iscsi": "The name of this machine's initiator.",
    "/run/iserblk": "State and sockets of attached devices, and of metrics.",
    "/run/iserblk-target": "Sockets of metrics of the targets that systemd runs.",
}
_HELPER_OPTIONS = {
    "o": ("OPT,OPT", "Options, as for `iserblk mount`."),
    "f": ("", "Check what was given, and mount nothing (`mount --fake`)."),
    "v": ("", "Log everything."),
    "N": ("NAMESPACE", "Not supported: refused."),
    "s": ("", "Ignored (sloppy)."),
    "n": ("", "Ignored (there is no /etc/mtab to write)."),
    "t": ("TYPE", "Ignored: the type is iserblk."),
}
_UMOUNT_OPTIONS = {
    "f": ("", "Do not flush before, and fail the requests under way (`umount --force`)."),
    "l": ("", "Unmount when nothing uses the files any more, and wait for nothing"
          " (`umount --lazy`)."),
    "N": ("NAMESPACE", "Not supported: refused."),
    "n": ("", "Ignored (there is no /etc/mtab to write)."),
    "r": ("", "Ignored: what cannot be unmounted stays as it is."),
    "t": ("TYPE", "Ignored: the type is fuse.iserblk."),
    "v": ("", "Ignored."),
}  # fmt: skip


class Manual:
    """All pages. ``date``: of the pages, as YYYY-MM-DD."""

    def __init__(
        self, program: Command, commands: Sequence[Command], documents: Documents, date: str
    ) -> None:
        self._program, self._commands, self._documents = program, commands, documents
        self._date = date
        self._homes = dict(_HOMES)
        for part in documents.shared["common.md"].parts:
            if part.title in _OF_URLS:
                for each in walk(part):
                    self._homes[f"common.md#{each.anchor()}"] = _HOMES["urls.md"]
        for name, pages in documents.commands.items():
            for path, _ in pages:
                self._homes[path] = f"iserblk-{name}(1)"

    def pages(self) -> Iterator[Page]:
        yield self._iserblk()
        yield from map(self._command, self._commands)
        yield self._url()
        yield self._conf()
        yield self._mount_helper()
        yield self._umount_helper()
        yield self._plugin()

    def _page(self, name: str, section: int) -> Page:
        return Page(name, section, self._date, __version__)

    # --- commands -----------------------------------------------------------------------------

    def _iserblk(self) -> Page:
        page = self._page("iserblk", 1)
        page.named(["iserblk"], self._program.summary)
        page.heading("Synopsis")
        page.synopsis([rf"{bold('iserblk')} [{bold('-v')}|{bold('-q')}] {italic('COMMAND')} \&..."])
        page.heading("Description")
        for text in self._program.paragraphs:
            page.paragraph(text)
        page.paragraph("iserblk-url(7) describes addresses, options and authentication.")
        page.heading("Commands")
        for each in self._commands:
            page.definition(bold(f"iserblk-{each.name}") + "(1)", each.summary)
        page.heading("Options")
        _options(page, self._program.options)
        for part in self._documents.shared["common.md"].parts:
            if part.title not in _OF_URLS:
                page.heading(part.title)
                self._section(page, part)
        for title, rows in (("Environment", _ENVIRONMENT), ("Files", _FILES)):
            page.heading(title)
            for tag, text in rows.items():
                page.definition(bold(tag), text)
        _see_also(page, ["iserblk-url(7)", "iserblk.conf(5)", "mount.iserblk(8)",
                         *(f"iserblk-{each.name}(1)" for each in self._commands)])  # fmt: skip
        return page

    def _command(self, command: Command) -> Page:
        page = self._page(f"iserblk-{command.name}", 1)
        page.named([f"iserblk-{command.name}"], _as_name(command.summary))
        page.heading("Synopsis")
        words = [bold(f"iserblk {command.name}"), f"[{italic('option')} \\&...]"]
        page.synopsis([" ".join([*words, *map(italic, command.arguments)])])
        page.heading("Description")
        for text in command.paragraphs:
            page.paragraph(text)
        page.heading("Options")
        _options(page, command.own())
        if command.of_connection():
            page.subheading("Options of the connection")
            page.paragraph("iserblk-url(7) says more about these; a URL's own override them.")
            _options(page, command.of_connection())
        self._notes(page, command)
        page.heading("Exit status")
        if command.mounts:
            page.paragraph("That of mount(8): 0 done, 1 wrong usage, 2 system, 32 failed.")
        else:
            page.paragraph("0: done. iserblk(1) lists the others.")
        _see_also(page, ["iserblk(1)", "iserblk-url(7)", "iserblk.conf(5)"])
        return page

    def _notes(self, page: Page, command: Command) -> None:
        """What the documents have on the command."""
        pages = [each for _, each in self._documents.commands.get(command.name, [])]
        for number, document in enumerate(pages):
            if body(document) or document.parts:
                page.heading("Notes" if number == 0 else document.title)
                self._document(page, document)

    # --- other pages ----------------------------------------------------------------------------

    def _url(self) -> Page:
        page = self._page("iserblk-url", 7)
        page.named(["iserblk-url"], "addresses of LUNs, their options, and authentication")
        shared = self._documents.shared
        addresses = body(shared["urls.md"])
        page.heading("Synopsis")
        first = next(each for each in addresses if each.kind == "code")
        page.example(first.lines)
        page.heading("Description")
        self._blocks(page, [each for each in addresses if each is not first])
        for part in shared["urls.md"].parts:
            page.heading(part.title)
            self._section(page, part)
        page.heading(shared["options.md"].title)
        self._document(page, shared["options.md"])
        for title in _OF_URLS:
            page.heading(title)
            self._section(page, shared["common.md"].part(title))
        page.heading("All options")
        page.paragraph(f"{', '.join(f'`{name}`' for name in OPTION_NAMES)}.")
        _see_also(page, ["iserblk(1)", "iserblk.conf(5)", "mount.iserblk(8)"])
        return page

    def _conf(self) -> Page:
        page = self._page("iserblk.conf", 5)
        page.named(["iserblk.conf"], "LUNs that have a name on this machine")
        page.heading("Synopsis")
        page.synopsis(
            bold(f"{directory}/") + italic("NAME") + bold(".conf")
            for directory in ("/etc/iserblk", "~/.config/iserblk")
        )
        page.heading("Description")
        page.paragraph(
            "Each file is one LUN, or all of one target, with the options to use it with. It has"
            " lines `KEY=VALUE`, as systemd's EnvironmentFile=; lines that begin with # are"
            " comments. The units `iserblk-attach@NAME` and `iserblk-mount@NAME` read those of"
            " /etc/iserblk."
        )
        for name in ("named.md", "units.md"):
            page.heading(self._documents.shared[name].title)
            self._document(page, self._documents.shared[name])
        _see_also(page, ["iserblk(1)", "iserblk-attach(1)", "iserblk-mount(1)", "iserblk-url(7)",
                         "systemd.exec(5)", "fstab(5)"])  # fmt: skip
        return page

    def _mount_helper(self) -> Page:
        page = self._page("mount.iserblk", 8)
        page.named(["mount.iserblk"], "mount LUNs as files, for mount(8) and /etc/fstab")
        page.heading("Synopsis")
        where = [italic("URL"), italic("MOUNTPOINT"), f"[{bold('-o')} {italic('OPT,OPT')}]"]
        page.synopsis([
            " ".join([bold("mount -t iserblk"), *where]),
            " ".join([bold("mount.iserblk"), *where, f"[{bold('-sfnv')}]"]),
        ])  # fmt: skip
        page.heading("Description")
        page.paragraph(
            "mount(8) runs this for the type iserblk. It does the same as `iserblk mount`: it ends"
            " when the files are usable, and the server stays in the background. umount(8) or"
            " `iserblk umount` ends it."
        )
        page.heading("Options")
        for letter in helper.SHORT_OPTIONS.replace(":", ""):
            metavar, text = _HELPER_OPTIONS[letter]
            page.definition(_tag([f"-{letter}"], metavar), text)
        page.heading("Notes")
        for _, document in self._documents.commands["mount"]:
            self._document(page, document)
        page.heading("Units and fstab")
        self._document(page, self._documents.shared["units.md"])
        page.heading("Exit status")
        page.paragraph("That of mount(8): 0 done, 1 wrong usage, 2 system, 32 mount failed.")
        _see_also(page, ["iserblk-mount(1)", "iserblk-url(7)", "iserblk.conf(5)",
                         "umount.fuse.iserblk(8)", "mount(8)", "fstab(5)"])  # fmt: skip
        return page

    def _umount_helper(self) -> Page:
        page = self._page("umount.fuse.iserblk", 8)
        page.named(["umount.fuse.iserblk"], "unmount LUNs, for umount(8) and systemd")
        page.heading("Synopsis")
        page.synopsis([
            f"{bold('umount.fuse.iserblk')} {italic('MOUNTPOINT')} [{bold('-flnrv')}]",
        ])  # fmt: skip
        page.heading("Description")
        page.paragraph(
            "umount(8) runs this for what mount.iserblk(8) has mounted, and so does systemd at a"
            " shutdown. It does the same as `iserblk umount`: it flushes, unmounts, and ends when"
            " the server has logged out. If the flush fails, the LUNs stay mounted."
        )
        page.heading("Options")
        for letter in umount_helper.SHORT_OPTIONS.replace(":", ""):
            metavar, text = _UMOUNT_OPTIONS[letter]
            page.definition(_tag([f"-{letter}"], metavar), text)
        page.heading("Exit status")
        page.paragraph("That of mount(8): 0 done, 1 wrong usage, 32 still mounted.")
        _see_also(page, ["iserblk-umount(1)", "mount.iserblk(8)", "umount(8)"])
        return page

    def _plugin(self) -> Page:
        page = self._page("nbdkit-iserblk-plugin", 1)
        page.named(["nbdkit-iserblk-plugin"], "remote SCSI LUNs as exports of nbdkit")
        page.heading("Synopsis")
        page.synopsis([
            f"{bold('nbdkit -U')} {italic('SOCKET')} {bold('python')} {italic('PLUGIN')}"
            f" {bold('uri=')}{italic('URL')}"
            f" [{bold('uri=')}{italic('URL')} \\&...] [{italic('option')}={italic('value')}"
            " \\&...]",
            f"{bold('iserblk nbd --nbdkit')} \\&...",
        ])  # fmt: skip
        page.heading("Description")
        page.paragraph(
            "This plugin serves the LUNs of the URLs over NBD. `PLUGIN` is the file"
            " `nbd_plugin/iserblk.py` of iserblk. `iserblk nbd --nbdkit` starts nbdkit with it."
            " The exports are called lun0, lun1 and so on; the default export is that of the first"
            " URL. Secrets are better in a file than in a URL: `chap-secret-file=` and its full"
            " path."
        )
        page.heading("Parameters")
        page.definition(
            bold("uri=") + italic("URL"),
            "A LUN, or without `/LUN` all of a target, see iserblk-url(7). Repeatable.",
        )
        page.definition(
            f"{italic('option')}={italic('value')}",
            "An option of iserblk-url(7), with hyphens or underscores:"
            f" {', '.join(f'`{name}`' for name in OPTION_NAMES)}.",
        )
        page.heading("Examples")
        page.example(["nbdkit -U disk.sock python PLUGIN uri=iser://HOST/iqn.2026-11.example:disk/0",
                      "nbdinfo 'nbd+unix:///?socket=disk.sock'"])  # fmt: skip
        page.paragraph(
            "Without `-U` nbdkit listens on all addresses of the machine, and every client that"
            " reaches it can read and write."
        )
        _see_also(page, ["iserblk-nbd(1)", "iserblk-url(7)", "nbdkit(1)",
                         "nbdkit-python-plugin(3)"])  # fmt: skip
        return page

    # --- documents ----------------------------------------------------------------------------

    def _document(self, page: Page, document: Section) -> None:
        self._blocks(page, body(document))
        for part in document.parts:
            page.subheading(part.title)
            self._section(page, part)

    def _section(self, page: Page, section: Section) -> None:
        self._blocks(page, section.blocks)
        for part in section.parts:
            page.subheading(part.title)
            self._section(page, part)

    def _blocks(self, page: Page, blocks: Iterable[Block]) -> None:
        here = f"{page.name}({page.section})"
        for block in blocks:
            if block.kind == "code":
                page.example(block.lines)
            elif block.kind == "item":
                page.item(self._unlinked(block.lines[0], here))
            elif block.kind == "text":
                page.paragraph(self._unlinked(block.lines[0], here))
            else:
                for row in block.rows:
                    tag, *texts = (self._unlinked(cell, here) for cell in row)
                    default = f". Default: {texts[1]}." if texts[1:] and texts[1] else ""
                    page.definition(inline(tag), texts[0] + default)

    def _unlinked(self, text: str, here: str) -> str:
        """The text with pages in place of links."""

        def shown(match: re.Match[str]) -> str:
            words, file, anchor = match.groups()
            place = self._homes.get(f"{file}#{anchor}") or self._homes.get(file)
            if place == here:
                return str(words)
            name = file.rpartition("/")[2]
            told = words in (name, name.removesuffix(".md")) or words.lower() == anchor
            place = place or f"docs/{file}"
            return place if told else f"{words} ({place})"

        return _LINK.sub(shown, text)


def _as_name(summary: str) -> str:
    return summary[:1].lower() + summary[1:].rstrip(".")


def _tag(names: Sequence[str], metavar: str) -> str:
    tag = ", ".join(map(bold, names))
    return f"{tag} {italic(metavar)}" if metavar else tag


def _options(page: Page, options: Iterable[Option]) -> None:
    for option in options:
        text = option.text + (" May be repeated." if _is_silent(option) else "")
        page.definition(_tag(option.names, option.metavar), text)


def _is_silent(option: Option) -> bool:
    return option.repeatable and bool(option.metavar) and "repeat" not in option.text


def _see_also(page: Page, names: Iterable[str]) -> None:
    page.heading("See also")
    here = f"{page.name}({page.section})"
    words = [name.partition("(") for name in names if name != here]
    page.raw(", ".join(f"{bold(name)}({section}" for name, _, section in words))
