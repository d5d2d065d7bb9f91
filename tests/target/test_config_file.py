"""The file of ``--config``: its values, and one line for each thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iserblk.errors import BadArgument
from iserblk.iscsi.chap import Accounts
from iserblk.scsi import alua
from iserblk.secret import Secret
from iserblk.target.access import Access, Grant
from iserblk.target.config import Slp, TargetConfig
from iserblk.target.config_file import read_config
from iserblk.target.lunspec import LunSpec, parse_lun_spec
from iserblk.target.ports import AccessStates, Listen, parse_listen
from tests.support.target import ROOT

IQN = "iqn.2026-11.example:disk"
A, B = (f"iqn.2026-11.example:host-{letter}" for letter in "ab")
SECRET = "s3cr3t-s3cr3t"
HEAD = f'iqn = "{IQN}"\n'
LUN = '[lun.0]\nfile = "/srv/disk"\n'
EXAMPLE = (ROOT / "docs/target.toml").read_text()


def of(text: str, directory: Path, mode: int = 0o600) -> TargetConfig:
    path = directory / "target.toml"
    path.write_text(text)
    path.chmod(mode)
    return read_config(path)


def test_the_least(tmp_path: Path) -> None:
    """What is not in the file is as without options on the command line."""
    config = of(HEAD + LUN, tmp_path, 0o644)
    assert config == TargetConfig(
        IQN, [Listen("127.0.0.1:3260")], slp=Slp(scopes=["DEFAULT"], directories=[]),
        luns={0: LunSpec("/srv/disk")},
    )  # fmt: skip
    assert (config.busy_poll_us, config.max_connections, config.error_recovery_level) == (
        1000,
        8,
        2,
    )


def test_the_example(tmp_path: Path) -> None:
    config = of(EXAMPLE, tmp_path)
    assert (config.iqn, config.max_connections) == (IQN, 4)
    assert config.portals == [
        parse_listen("127.0.0.1:3260"),
        parse_listen("127.0.0.1:3261,2,transport=tcp"),
    ]
    assert config.states == AccessStates({2: alua.ACTIVE_NON_OPTIMIZED})
    far = "iser://10.0.0.{}/iqn.2026-11.example:far/0"
    assert config.luns == {
        0: parse_lun_spec(f"{tmp_path}/system.img:size=20G"),
        1: parse_lun_spec("/srv/archive.img:ro:block=4096:serial=ARCHIVE-1"),
        7: parse_lun_spec(f"{far.format(1)} {far.format(2)}"),
    }
    secrets = {"alice": Secret("alices-secret-01"), "bob": Secret("bobs-secret-0002")}
    assert config.accounts == Accounts(secrets, "disk", Secret("the-targets-own-1"))
    assert config.access == Access({A: Grant(((0, 0), (1, 7)), "alice"), "*": Grant(((1, 1),))})
    assert "secret-0" not in repr(config)
    with pytest.raises(BadArgument, match=r"account\.alice\.secret: others can read this file; "):
        of(EXAMPLE, tmp_path, 0o640)


def test_every_key(tmp_path: Path) -> None:
    secret = tmp_path / "alice"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    text = f"""
        {HEAD}
        busy-poll = 0
        rcap = "verbs"
        header = 12
        max-connections = 1
        error-recovery-level = 0
        isns = "isns.example"
        metrics = "localhost:9100"
        explicit = true
        portal = [{{ listen = "[::1]:0", group = 0 }}]
        [slp]
        answer = true
        port = 4270
        directory-agents = ["da.example", "10.0.0.9:428"]
        scopes = "LAB"
        [group.0]
        transports = ["iwarp", "sctp"]
        settable = true
        state = "standby"
        [lun.16383]
        file = "a"
        size = 1048576
        wce = false
        soft-threshold = "900K"
        tas = false
        [lun.5]
        file = "b:ro"
        volatile-cache = "8M"
        wce = true
        [lun.6]
        url = "iscsi://far/{IQN}2/0"
        ro = true
        [account."al ice"]
        secret-file = "alice"
        [initiator]
        "{A.upper()}" = {{ luns = "all" }}
        "{B}" = {{ luns = [] }}
    """
    config = of(text, tmp_path, 0o644)  # the secret is in another file
    assert config == TargetConfig(
        IQN,
        [Listen("[::1]:0", 0, frozenset({"iwarp", "sctp"}))],
        rdma=True,
        header=12,
        isns=("isns.example", 3205),
        metrics="localhost:9100",
        slp=Slp(True, 4270, [("da.example", 427), ("10.0.0.9", 428)], ["LAB"]),
        busy_poll_us=0,
        max_connections=1,
        error_recovery_level=0,
        luns={
            16383: LunSpec(
                f"{tmp_path}/a",
                size=1 << 20,
                write_cache=False,
                soft_threshold=900 << 10,
                tas=False,
            ),
            5: LunSpec(f"{tmp_path}/b:ro", volatile_cache=8 << 20, write_cache=True),
            6: parse_lun_spec(f"iscsi://far/{IQN}2/0:ro"),
        },
        accounts=Accounts({"al ice": Secret(SECRET)}),
        access=Access({A: Grant(((0, 16383),)), B: Grant(())}),
        states=AccessStates({0: alua.STANDBY}, frozenset({0}), True),
    )


def test_the_mark_of_some_editors(tmp_path: Path) -> None:
    assert of(f"\ufeff{HEAD}{LUN}", tmp_path) == of(HEAD + LUN, tmp_path)


def test_empty_tables_open_nothing(tmp_path: Path) -> None:
    """[initiator] with all initiators taken out of it lets none in, in place of all."""
    config = of(f"{HEAD}{LUN}[initiator]\n", tmp_path)
    assert config.access is not None and not config.access.allows(A, 0)
    with pytest.raises(BadArgument, match="account: there is none in it"):
        of(f"{HEAD}{LUN}[account]\n", tmp_path)


WRONG = [
    ("iqn = \n", r"Invalid value \(at line 1"),
    ("x\n", r"\(at line 1"),
    (HEAD + HEAD + LUN, r"Cannot overwrite a value \(at line 2"),
    (f"{HEAD}n = {'1' * 5000}", "4300 digits"),
    (f"{HEAD}n = {'[' * 5000}", "nested too deeply"),
    (LUN, "iqn: is missing"),
    (f"iqn = 7\n{LUN}", "iqn: write text between quotes"),
    (f'iqn = "disk"\n{LUN}', "iqn: 'disk' is no iSCSI name"),
    (HEAD, "lun: a target needs a LUN"),
    (f"{HEAD}ign = 1\n{LUN}", "ign: unknown key; the keys here are: account, busy-poll, chap"),
    (f'{HEAD}"a\\nb" = 1\n{LUN}', r'"a\\nb": unknown key'),
    (f'{HEAD}rcap = "tcp"\n{LUN}', "rcap: write one of: iwarp, verbs"),
    (f"{HEAD}header = 20\n{LUN}", "header: write 28 or 12"),
    (f"{HEAD}busy-poll = true\n{LUN}", "busy-poll: write a number from 0 to 10000"),
    (f"{HEAD}max-connections = 65\n{LUN}", "max-connections: write a number from 1 to 64"),
    (f"{HEAD}error-recovery-level = -1\n{LUN}", "error-recovery-level: write a number from 0 to 2"),
    (f'{HEAD}isns = "a b"\n{LUN}', r"isns: 'a b': write HOST\[:PORT\]"),
    (f"{HEAD}metrics = 9100\n{LUN}", "metrics: write PATH or HOST:PORT"),
    (f'{HEAD}metrics = "192.0.2.1:9100"\n{LUN}', "metrics '192.0.2.1:9100': metrics are served on"),
    (f'{HEAD}metrics = "here"\n{LUN}', "metrics 'here': give the whole path of a Unix socket"),
    (f"{HEAD}slp = 1\n{LUN}", r"slp: this is a table: write \[slp\]"),
    (f"{HEAD}{LUN}[slp]\nanswer = 1", "slp.answer: write true or false"),
    (f"{HEAD}{LUN}[slp]\nscopes = []", "slp.scopes: write a list such as"),
    (f'{HEAD}{LUN}[slp]\ndirectory-agents = ["a/"]', "slp.directory-agents: 'a/'"),
    (f"{HEAD}explicit = true\n{LUN}", "explicit: needs a group with settable = true"),
    (f"{HEAD}portal = 1\n{LUN}", r"portal: write \[\[portal\]\]"),
    (f"{HEAD}{LUN}[[portal]]\n", r"portal\[1\].listen: is missing"),
    (f'{HEAD}{LUN}[[portal]]\nlisten = "a\\u0000:0"', r"portal\[1\].listen: write HOST:PORT"),
    (f'{HEAD}{LUN}[[portal]]\nlisten = "a:0"\ngroup = 65536', r"portal\[1\].group: write a number"),
    (f'{HEAD}{LUN}[[portal]]\nlisten = "a:0"\ntag = 1', r"portal\[1\].tag: unknown key"),
    (f"{HEAD}{LUN}[group.2]\n", "group.2: no portal is in this group"),
    (f"{HEAD}{LUN}[group.x]\n", "group.x: a portal group has a number from 0 to 65535"),
    (f'{HEAD}{LUN}[group.1]\ntransports = ["udp"]', "group.1.transports: the transports are iwarp"),
    (f'{HEAD}{LUN}[group.1]\nstate = "on"', "group.1.state: write one of: optimized"),
    (f"{HEAD}lun = 7", r"lun: write \[lun.NUMBER\], and keys below it"),
    (f'{HEAD}[[lun]]\nfile = "x"', r"lun: write \[lun.NUMBER\], and keys below it"),
    (f'{HEAD}[LUN.0]\nfile = "x"', "LUN: unknown key; the keys here are: .*lun"),
    (f'{HEAD}lun.7 = "x"', r"lun.7: write \[lun.NUMBER\]"),
    (f'{HEAD}[lun.16384]\nfile = "x"', "lun.16384: a LUN has a number from 0 to 16383"),
    (f'{HEAD}[lun.07]\nfile = "x"', "lun.07: a LUN has a number"),
    (f'{HEAD}[lun."1.5"]\nfile = "x"', 'lun."1.5": a LUN has a number'),
    (f'{HEAD}[lun."iser://alice%{SECRET}@h/{IQN}/0"]', r'lun."\(a URL\)": a LUN has a number'),
    (f'{HEAD}[lun."alice%{SECRET}@h/{IQN}/0"]', r'lun."\(a URL\)": a LUN has a number'),
    (f'{HEAD}{LUN}["iscsi:alice%{SECRET}@h/"]', r'"\(a URL\)": unknown key'),
    (f"{HEAD}[lun.0]", "lun.0: write either file = or url ="),
    (f'{LUN}url = "iser://h/{IQN}x/0"\n[x]\n{HEAD}', "iqn: is missing"),
    (f'{HEAD}{LUN}url = "iser://h/{IQN}x/0"', "lun.0: write either file = or url ="),
    (f'{HEAD}{LUN}size = "1X"', "lun.0: `size=1X`: write a number of bytes"),
    (f"{HEAD}{LUN}size = 1.5", "lun.0.size: write a number, or text"),
    (f"{HEAD}{LUN}block = 1000", "lun.0: `block=1000`: the block size is"),
    (f"{HEAD}{LUN}wce = 1", "lun.0.wce: write true or false"),
    (f"{HEAD}{LUN}tas = 1", "lun.0.tas: write true or false"),
    (f"{HEAD}{LUN}ro = 1", "lun.0.ro: write true or false"),
    (
        f'{HEAD}[lun.0]\nfil = "x"',
        "lun.0.fil: unknown key; the keys here are: block, file, ro, serial, size, soft-threshold,"
        " tas, url, volatile-cache, wce; is it file",
    ),
    (f"{HEAD}{LUN}read-only = true", "lun.0.read-only: unknown key; the keys here are: .*ro"),
    (f'{HEAD}{LUN}wce = false\nvolatile-cache = "1M"', "lun.0: `wce=0` and `volatile-cache=`"),
    (f'{HEAD}[lun.0]\nurl = "iser://h/{IQN}/0"\nsize = 1', "lun.0.size: is for a file"),
    (f'{HEAD}[lun.0]\nurl = "disk"', "lun.0.url: "),
    (f"{HEAD}[lun.0]\nurl = []", "lun.0.url: write a URL"),
    (f'{HEAD}[lun.0]\nurl = "iser://h/{IQN}x/0?io-time=1"', "lun.0.url: unknown option 'io-time'"),
    (f'{HEAD}[lun.0]\nurl = ["iser://h/{IQN}x/0?io-timeout=x"]', "lun.0.url: io-timeout='x': give"),
    (f'{HEAD}[lun.0]\nfile = "iser://alice%{SECRET}@h/{IQN}/0"', "lun.0.file: this is a URL"),
    (f'{HEAD}[lun.0]\nfile = "alice%{SECRET}@h/{IQN}/0"', "with iser:// or"),
    (f"{HEAD}{LUN}[account.alice]", "account.alice: write either secret = or secret-file ="),
    (f'{HEAD}{LUN}[account]\nalice = "{SECRET}"', r"account.alice: write \[account.USER\]"),
    (f'{HEAD}{LUN}[account.alice]\nsecret = ["{SECRET}"]', "account.alice.secret: write text"),
    (f'{HEAD}{LUN}[account.alice]\nsecret = "{SECRET}\\n"', "alice.secret: a secret is one line"),
    (f'{HEAD}{LUN}[account.alice]\nsecret-file = "no"', "alice.secret-file: .*/no: No such"),
    (f'{HEAD}{LUN}[account.alice]\npassword = "{SECRET}"', "account.alice: write either"),
    (f'{HEAD}{LUN}[account.""]\nsecret = "{SECRET}"', 'account."": a user has a name'),
    (f'{HEAD}{LUN}[chap]\nuser = "disk"\nsecret = "{SECRET}"', "chap: mutual CHAP needs accounts"),
    (f'{HEAD}{LUN}[chap]\nsecret = "{SECRET}"', "chap.user: is missing"),
    (f'{HEAD}{LUN}[chap]\nuser = "disk"', "chap: write either secret = or"),
    (
        f'{HEAD}{LUN}[chap]\nuser = "disk"\nsecret = "{SECRET}"\n'
        f'[account.alice]\nsecret = "{SECRET}"',
        "account: mutual CHAP: an account has the same secret as the target",
    ),
    (f'{HEAD}{LUN}[initiator."{A}"]', f'initiator."{A}".luns: is missing'),
    (f"{HEAD}{LUN}[initiator.me]\nluns = [0]", "initiator.me: 'me' is no iSCSI name"),
    (f'{HEAD}{LUN}[initiator."{A}"]\nluns = 0', r'luns: write \[0, "2-4"\], or'),
    (f'{HEAD}{LUN}[initiator."{A}"]\nluns = [0.5]', r'luns: write \[0, "2-4"\], or'),
    (f'{HEAD}{LUN}[initiator."{A}"]\nluns = ["4-2"]', "luns: '4-2' is no LUN"),
    (f'{HEAD}{LUN}[initiator."{A}"]\nluns = [0]\nuser = "eve"', r"user: there is no \[account\]"),
    (f'{HEAD}{LUN}[initiator."*"]\nluns = [0]\nuser = "eve"', r"user: \* has no user"),
    (
        f'{HEAD}{LUN}[initiator."{A}"]\nluns = [0]\n[initiator."{A.upper()}"]\nluns = [0]',
        "is there twice",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong_files(text: str, words: str, tmp_path: Path) -> None:
    """One line, which begins with the file, names the line or the key, and has no secret."""
    with pytest.raises(BadArgument, match=words) as caught:
        of(text, tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/target.toml: ")
    assert "\n" not in said and SECRET not in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"--config .*/no: No such file"):
        read_config(tmp_path / "no")
    with pytest.raises(BadArgument, match="not a regular file"):
        read_config(tmp_path)
    (tmp_path / "latin").write_bytes(b"# \xff")
    with pytest.raises(BadArgument, match="latin: the file is not UTF-8 text"):
        read_config(tmp_path / "latin")
    # A file that is cut off might still be TOML, with fewer LUNs in it.
    with pytest.raises(BadArgument, match="more than 1048576 bytes"):
        of(HEAD + LUN + "#" * (1 << 20), tmp_path)


@pytest.mark.parametrize(
    "lun",
    [
        f'url = "iscsi://alice%{SECRET}@far/{IQN}2/0"',
        f'url = ["iscsi://far/{IQN}2/0?target_password={SECRET}"]',
    ],
)
def test_a_url_with_a_secret(lun: str, tmp_path: Path) -> None:
    config = of(f"{HEAD}[lun.0]\n{lun}", tmp_path)
    assert SECRET not in repr(config)
    with pytest.raises(BadArgument, match=r"lun\.0\.url: others can read") as caught:
        of(f"{HEAD}[lun.0]\n{lun}", tmp_path, 0o604)
    assert SECRET not in str(caught.value)


def test_a_secret_file_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text(SECRET)
    (tmp_path / "alice").chmod(0o640)
    with pytest.raises(BadArgument, match=r"account\.alice\.secret-file: .*/alice: others can"):
        of(f'{HEAD}{LUN}[account.alice]\nsecret-file = "alice"', tmp_path)


VALUES = [
    "true",
    "-1",
    "1e400",
    '"x"',
    "[]",
    "{}",
    "[[1]]",
    "1979-05-27",
    "{ a = {} }",
    '"\\u0000"',
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_change_to_the_example(tmp_path: Path, data: st.DataObject) -> None:
    """Every value may be of another type, and every character another one: it is taken, or refused
    in one line."""
    lines = EXAMPLE.splitlines()
    number = data.draw(st.sampled_from([i for i, line in enumerate(lines) if "=" in line]))
    if data.draw(st.booleans()):
        key = lines[number].partition("=")[0]
        lines[number] = f"{key}= {data.draw(st.sampled_from(VALUES))}"
    else:
        at = data.draw(st.integers(0, len(lines[number])))
        lines[number] = (
            lines[number][:at] + data.draw(st.text(max_size=2)) + lines[number][at + 1 :]
        )
    try:
        of("\n".join(lines), tmp_path)
    except BadArgument as error:
        assert str(error).startswith(f"{tmp_path}/target.toml: ")
        assert len(str(error).splitlines()) == 1
        assert "secret-0" not in str(error)


# -- one that takes the place of another ----------------------------------------------------------


def test_what_takes_a_restart() -> None:
    one = TargetConfig(IQN, [parse_listen("h:1")], luns={0: LunSpec("/a")})
    one.check_successor(
        TargetConfig(
            IQN, [parse_listen("h:1")], luns={1: LunSpec("/b")},
            accounts=Accounts({"a": Secret(SECRET)}), access=Access({}), busy_poll_us=1,
        )
    )  # fmt: skip
    with pytest.raises(BadArgument, match="restart the target to change its portals and their gr"):
        one.check_successor(TargetConfig(IQN, [parse_listen("h:1"), parse_listen("h:2")]))
    other = TargetConfig(IQN + "2", [parse_listen("h:1")], True, 12, ("h", 1), Slp(True), "")
    with pytest.raises(BadArgument, match=r"name, rcap, header, isns, slp, metrics$"):
        one.check_successor(other)


def test_users_and_groups_must_exist() -> None:
    with pytest.raises(BadArgument, match="no account of the user 'alice'"):
        TargetConfig(IQN, access=Access({A: Grant((), "alice")}))
    with pytest.raises(BadArgument, match="there is no portal group 3; the groups are: 1"):
        TargetConfig(IQN, states=AccessStates({3: 0}))
