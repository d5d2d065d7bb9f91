"""The file of ``iserblk target --config``: TOML, whose keys have the names of the command line's
options. docs/commands/target-file.md has all of them, docs/target.toml is an example.

Paths in it are relative to the directory of the file. No error text has any part of a secret.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from iserblk.credentials import has_secret, read_guarded, read_secret
from iserblk.errors import BadArgument
from iserblk.iscsi.chap import Accounts
from iserblk.names import check_name, shown, suggestion
from iserblk.options import BUSY_POLL_US, parse_metrics
from iserblk.secret import Secret
from iserblk.target.access import ANY, Access, Grant, parse_luns
from iserblk.target.config import (
    BUSY_POLL,
    CONNECTIONS,
    DEFAULT_PORTAL,
    HEADERS,
    LEVELS,
    PORTS,
    PROVIDERS,
    SESSION_CONNECTIONS,
    Slp,
    TargetConfig,
)
from iserblk.target.lunspec import KEYS, LunSpec, file_spec, remote_spec
from iserblk.target.ports import MAXIMUM_TAG, STATES, TRANSPORTS, AccessStates, Listen
from iserblk.url import ISNS_PORT, MAXIMUM_LUN, SLP_PORT, may_be_url, parse_portal

_BARE = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_SHOWN = 80  # characters of a key
_OPTIMIZED = "optimized"
_FLAGS = ("wce", "tas")  # of LUNs


def read_config(path: Path) -> TargetConfig:
    """Read a file, and the files with secrets that it names. Raises BadArgument in one line, which
    names the file, and the line or the key."""
    what = str(path)
    content, private = read_guarded(what, f"--config {what}")
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise BadArgument(f"{what}: the file is not UTF-8 text") from None
    try:
        return _Reader(tomllib.loads(text), path.parent, private).config()
    except ValueError as error:  # TOMLDecodeError, or of a number with thousands of digits
        raise BadArgument(f"{what}: {error}") from None
    except RecursionError:
        raise BadArgument(f"{what}: arrays or tables are nested too deeply") from None
    except BadArgument as error:
        raise BadArgument(f"{what}: {' '.join(str(error).split())}") from None


class _Table:
    """One table of the file, called ``name`` ("" is the whole file). Each method takes the value of
    a key out of it, and raises BadArgument, which names the key, for one of another type."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        self.name = name
        self._values = dict(values)
        self._known: list[str] = []

    def at(self, key: str) -> str:
        """The key as the file has it, with the names of its tables. A URL is not shown: it may have
        a secret."""
        if may_be_url(key):
            key = "(a URL)"
        shown = key if _BARE.fullmatch(key) else json.dumps(key[:_SHOWN], ensure_ascii=False)
        return f"{self.name}.{shown}" if self.name else shown

    def has(self, key: str) -> bool:
        return key in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def may_have(self, keys: Iterable[str]) -> None:
        """Keys that are taken only where they are there."""
        self._known.extend(keys)

    def value(self, key: str) -> object:
        """None: the key is missing."""
        self._known.append(key)
        return self._values.pop(key, None)

    def text(self, key: str, words: str = "text between quotes") -> str:
        """ "": the key is missing."""
        value = self.value(key)
        if value is None:
            return ""
        if not _is_text(value):
            raise BadArgument(f"{self.at(key)}: write {words}")
        return str(value)

    def texts(self, key: str, words: str) -> list[str]:
        """A list of texts, or one text."""
        value = self.value(key)
        if value is None:
            return []
        given = value if isinstance(value, list) else [value]
        if not given or not all(map(_is_text, given)):
            raise BadArgument(f"{self.at(key)}: write {words}")
        return [str(each) for each in given]

    def number(self, key: str, bounds: tuple[int, int], default: int) -> int:
        value = self.value(key)
        if value is None:
            return default
        low, high = bounds
        if type(value) is not int or not low <= value <= high:
            raise BadArgument(f"{self.at(key)}: write a number from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise BadArgument(f"{self.at(key)}: write true or false")
        return bool(value)

    def table(self, key: str) -> _Table:
        """An empty one, if the key is missing."""
        value = self.value(key)
        if value is not None and not isinstance(value, dict):
            raise BadArgument(f"{self.at(key)}: this is a table: write [{self.at(key)}] above it")
        return _Table(self.at(key), value or {})

    def tables(self, key: str, form: str) -> dict[str, _Table]:
        """The tables in a table, by their names. ``form``: how to write one."""
        if self.has(key) and not isinstance(self._values[key], dict):
            raise BadArgument(f"{self.at(key)}: write [{form}], and keys below it")
        inner = self.table(key)
        for name, value in inner._values.items():
            if not isinstance(value, dict):
                raise BadArgument(f"{inner.at(name)}: write [{form}], and keys below it")
        return {name: inner.table(name) for name in inner.names()}

    def array(self, key: str) -> list[_Table]:
        """An array of tables; empty, if the key is missing."""
        value = self.value(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise BadArgument(f"{self.at(key)}: write [[{self.at(key)}]], and keys below it")
        return [_Table(f"{self.at(key)}[{i}]", each) for i, each in enumerate(value, 1)]

    def end(self) -> None:
        """Raises BadArgument if there is a key that nothing has taken."""
        for key in self._values:
            known = sorted({*self._known})
            meant = suggestion(key, known).removeprefix(": ")
            raise BadArgument(
                f"{self.at(key)}: unknown key; the keys here are: {', '.join(known)}"
                f"{meant and f'; {meant}'}"
            )


class _Reader:
    """Makes a configuration of the values of a file. ``private``: only the file's owner has access
    to it."""

    def __init__(self, values: Mapping[str, object], directory: Path, private: bool) -> None:
        self._top = _Table("", values)
        self._directory = directory
        self._private = private

    def config(self) -> TargetConfig:
        top = self._top
        iqn = top.text("iqn")
        if not iqn:
            raise BadArgument('iqn: is missing; write the target\'s name: iqn = "iqn.…"')
        check_name(iqn, "iqn:")
        rcap = top.text("rcap") or PROVIDERS[0]
        if rcap not in PROVIDERS:
            raise BadArgument(f"rcap: write one of: {', '.join(PROVIDERS)}")
        header = top.value("header")
        if header is not None and header not in HEADERS:
            raise BadArgument("header: write 28 or 12")
        transports, states = self._groups()
        portals = self._portals(transports)
        luns = {
            self._number(inner, "a LUN", MAXIMUM_LUN): self._lun(inner)
            for inner in top.tables("lun", "lun.NUMBER").values()
        }
        accounts = self._accounts()
        config = TargetConfig(
            iqn=iqn,
            portals=portals,
            rdma=rcap == PROVIDERS[1],
            header=HEADERS[1] if header == HEADERS[1] else HEADERS[0],
            isns=_place(top, "isns", ISNS_PORT),
            slp=self._slp(),
            metrics=self._metrics(),
            busy_poll_us=top.number("busy-poll", BUSY_POLL, BUSY_POLL_US),
            max_connections=top.number("max-connections", CONNECTIONS, SESSION_CONNECTIONS),
            error_recovery_level=top.number("error-recovery-level", LEVELS, LEVELS[1]),
            luns=luns,
            accounts=accounts,
            access=self._access(accounts),
            states=states,
        )
        top.end()  # before this: a key that is misspelt may be that of the LUNs
        if not luns:
            raise BadArgument("lun: a target needs a LUN; write [lun.0], and file = below it")
        return config

    # -- portals ----------------------------------------------------------------------------------

    def _groups(self) -> tuple[dict[int, frozenset[str]], AccessStates]:
        """What [group.N] say: transports, and ALUA states. Groups without a state are optimized."""
        transports: dict[int, frozenset[str]] = {}
        states: dict[int, int] = {}
        settable: set[int] = set()
        for group in self._top.tables("group", "group.NUMBER").values():
            tag = self._number(group, "a portal group", MAXIMUM_TAG)
            known = ", ".join(TRANSPORTS)
            given = group.texts("transports", f'a list such as ["tcp"], of: {known}')
            if not set(given) <= set(TRANSPORTS):
                raise BadArgument(f"{group.at('transports')}: the transports are {known}")
            transports[tag] = frozenset(given)
            state = STATES.get(group.text("state") or _OPTIMIZED)
            if state is None:
                raise BadArgument(f"{group.at('state')}: write one of: {', '.join(STATES)}")
            states[tag] = state
            if group.flag("settable"):
                settable.add(tag)
            group.end()
        explicit = self._top.flag("explicit")
        if explicit and not settable:
            raise BadArgument("explicit: needs a group with settable = true")
        return transports, AccessStates(states, frozenset(settable), explicit)

    def _portals(self, transports: Mapping[int, frozenset[str]]) -> list[Listen]:
        found = []
        for portal in self._top.array("portal"):
            place = portal.text("listen", 'HOST:PORT, e.g. listen = "10.0.0.1:3260"')
            if not place:
                raise BadArgument(f"{portal.at('listen')}: is missing; write HOST:PORT")
            tag = portal.number("group", (0, MAXIMUM_TAG), 1)
            found.append(Listen(place, tag, transports.get(tag, frozenset())))
            portal.end()
        if not found:
            found.append(Listen(DEFAULT_PORTAL, 1, transports.get(1, frozenset())))
        for tag in transports:
            if all(each.group != tag for each in found):
                raise BadArgument(f"group.{tag}: no portal is in this group")
        return found

    def _slp(self) -> Slp:
        slp = self._top.table("slp")
        directories = slp.texts("directory-agents", 'a list such as ["da.example"]')
        found = Slp(
            answer=slp.flag("answer"),
            port=slp.number("port", PORTS, SLP_PORT),
            directories=[_host_port(slp.at("directory-agents"), each, SLP_PORT)
                         for each in directories],
            scopes=slp.texts("scopes", 'a list such as ["DEFAULT"]') or ["DEFAULT"],
        )  # fmt: skip
        slp.end()
        return found

    def _metrics(self) -> str | None:
        text = self._top.text("metrics", 'PATH or HOST:PORT, e.g. "127.0.0.1:13261", or "off"')
        return parse_metrics("metrics", text) if text else None

    # -- LUNs -------------------------------------------------------------------------------------

    def _lun(self, lun: _Table) -> LunSpec:
        file = lun.text("file")
        urls = lun.texts("url", 'a URL, or a list of the URLs of one LUN: ["iscsi://…"]')
        read_only = lun.flag("ro")
        options = {"ro": ""} if read_only else {}
        lun.may_have(KEYS)
        for key in KEYS:
            if lun.has(key):
                options[key] = _option(lun, key)
        lun.end()
        if bool(file) == bool(urls):
            raise BadArgument(f"{lun.name}: write either file = or url = in it")
        if may_be_url(file):  # it is not shown: a URL may have a secret
            raise BadArgument(
                f"{lun.at('file')}: this is a URL: write url = in place of file =, with iser:// or"
                " iscsi:// in front"
            )
        if file:
            return file_spec(self._path(file), options, lun.name)
        options.pop("ro", None)
        if options:
            raise BadArgument(f"{lun.at(next(iter(options)))}: is for a file, not for a url")
        what = lun.at("url")
        try:
            secret = any([has_secret(url) for url in urls])
            spec = remote_spec(urls, read_only)
        except BadArgument as error:
            raise BadArgument(f"{what}: {error}") from None
        if secret:
            self._keep_private(what)
        return spec

    # -- who may log in, and see what -------------------------------------------------------------

    def _accounts(self) -> Accounts | None:
        secrets: dict[str, Secret] = {}
        given = self._top.has("account")
        for user, account in self._top.tables("account", "account.USER").items():
            if not user:
                raise BadArgument(f"{account.name}: a user has a name")
            secrets[user] = self._secret(account)
            account.end()
        if given and not secrets:
            raise BadArgument("account: there is none in it; write [account.USER]")
        own = self._top.table("chap")
        user = own.text("user")
        secret = self._secret(own) if own.names() or user else Secret()
        own.end()
        if user and not secrets:
            raise BadArgument("chap: mutual CHAP needs accounts of initiators: [account.USER]")
        if secret and not user:
            raise BadArgument("chap.user: is missing; write the user as which the target proves")
        if not secrets:
            return None
        try:
            return Accounts(secrets, user, secret)
        except BadArgument as error:
            raise BadArgument(f"account: {error}") from None

    def _secret(self, table: _Table) -> Secret:
        """The value of ``secret``, or the line of the file that ``secret-file`` names."""
        secret = table.text("secret")
        file = table.text("secret-file")
        if bool(secret) == bool(file):
            raise BadArgument(f"{table.name}: write either secret = or secret-file = in it")
        if file:
            path = self._path(file)
            return read_secret(path, f"{table.at('secret-file')}: {path}")
        self._keep_private(table.at("secret"))
        if "\n" in secret:
            raise BadArgument(f"{table.at('secret')}: a secret is one line")
        return Secret(secret)

    def _keep_private(self, key: str) -> None:
        if not self._private:
            raise BadArgument(
                f"{key}: others can read this file; `chmod 600` it, and change the secret"
            )

    def _access(self, accounts: Accounts | None) -> Access | None:
        grants: dict[str, Grant] = {}
        known = accounts.secrets if accounts else {}
        given = self._top.has("initiator")
        for name, table in self._top.tables("initiator", 'initiator."NAME"').items():
            if name != ANY:
                check_name(name, table.name + ":")
            luns = parse_luns(_luns(table), table.at("luns"))
            user = table.text("user")
            table.end()
            if user and name == ANY:
                raise BadArgument(f"{table.at('user')}: * has no user; name each initiator")
            if user and user not in known:
                raise BadArgument(f"{table.at('user')}: there is no [account] of this user")
            if name.lower() in grants:
                raise BadArgument(f"{table.name}: is there twice; case does not count in names")
            grants[name.lower()] = Grant(luns, user)
        return Access(grants) if given else None  # an empty table: nothing for any initiator

    # -- values -----------------------------------------------------------------------------------

    def _path(self, text: str) -> str:
        return os.path.join(self._directory, text)

    @staticmethod
    def _number(table: _Table, what: str, greatest: int) -> int:
        """The number that is the last part of a table's name."""
        _, _, text = table.name.rpartition(".")
        if not _NUMBER.fullmatch(text) or int(text) > greatest:
            raise BadArgument(f"{table.name}: {what} has a number from 0 to {greatest}")
        return int(text)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _option(lun: _Table, key: str) -> str:
    """A value of LunSpec, as ``--lun`` has it."""
    value = lun.value(key)
    if isinstance(value, bool) and key in _FLAGS:
        return "1" if value else "0"
    if isinstance(value, bool) or not isinstance(value, (str, int)) or key in _FLAGS:
        words = "true or false" if key in _FLAGS else 'a number, or text such as "1G"'
        raise BadArgument(f"{lun.at(key)}: write {words}")
    return str(value)


def _luns(table: _Table) -> str:
    """``luns``, as a line of ``--access`` has it."""
    value = table.value("luns")
    form = '[0, "2-4"], or "all", or "none"'
    if value is None:
        raise BadArgument(f"{table.at('luns')}: is missing; write {form}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(each) in (int, str) for each in value):
        raise BadArgument(f"{table.at('luns')}: write {form}")
    return ",".join(map(str, value)) if value else "none"


def _place(table: _Table, key: str, default: int) -> tuple[str, int] | None:
    text = table.text(key)
    return _host_port(table.at(key), text, default) if text else None


def _host_port(what: str, text: str, default: int) -> tuple[str, int]:
    try:
        return parse_portal(text, default)
    except BadArgument:
        raise BadArgument(f"{what}: {shown(text)}: write HOST[:PORT]") from None
