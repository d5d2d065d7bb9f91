"""What looks like a secret, or is known to be one, and what is neither."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from iserblk.doctor.hiding import HIDDEN, Hider
from iserblk.secret import Secret
from tests.support.target import ROOT

IQN = "iqn.2026-11.example:disk"
PLAIN = Hider()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"iser://alice%hush@h:3260/{IQN}/0", f"iser://…@h:3260/{IQN}/0"),
        (f"ISCSI://alice:hush@[fe80::1%eth0]/{IQN}", f"ISCSI://…@[fe80::1%eth0]/{IQN}"),
        (f"iser://alice%hu@sh@h/{IQN}", f"iser://…@h/{IQN}"),
        (f"iser://alice%hu sh@h/{IQN}", f"iser://…@h/{IQN}"),
        (f"iser://alice%hu/sh@h/{IQN}", f"iser://…@h/{IQN}"),
        (f"iser:/alice%hush@h/{IQN}", f"iser:…@h/{IQN}".replace("iser:", "iser://")),
        (f"alice%hush@h/{IQN}/0", f"…@h/{IQN}/0"),
        (
            f"iser://a%hush@h/{IQN} iser://b%hush@i/{IQN} end",
            f"iser://…@h/{IQN} iser://…@i/{IQN} end",
        ),
        (
            f"iser://h/{IQN}?target_password=hush&io-timeout=5",
            f"iser://h/{IQN}?target_password=***&io-timeout=5",
        ),
        ("target-password=hu sh", "target-password=***"),
        ("node.session.auth.password_in = hush", "node.session.auth.password_in = ***"),
        ('"chap_password": "hu\\"sh", "x": 1', '"chap_password": ***, "x": 1'),
        ("secret: 'hush'", "secret: ***"),
        ("node.session.auth.password = hu,sh;h more", "node.session.auth.password = *** more"),
        ("{'token': 'hu'sh, 'x': 1}", "{'token': ***, 'x': 1}"),
        ("Authorization: Bearer aGVsbG8taHVzaA==", "Authorization: Bearer ***"),
        ("token eyJhbGciOiJSUzI1.eyJpc3MiOiJr.c2ln", "token ***"),
        ("CHAP_N=alice, CHAP_R=0x68757368", "CHAP_N=alice, CHAP_R=***"),
        ("CHAP_C=0b68757368", "CHAP_C=***"),
        (
            "key -----BEGIN RSA PRIVATE KEY-----\nhush\n-----END RSA PRIVATE KEY----- end",
            "key *** end",
        ),
        ("-----BEGIN PRIVATE KEY-----\nhush", "***"),
        ("nbds://user:hush@h/", "nbds://…@h/"),
    ],
)
def test_what_looks_like_a_secret(text: str, shown: str) -> None:
    assert PLAIN.text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"iser://h:3260/{IQN}/0: connected",
        f"{IQN}: accepted as iqn.2026-11.io.github.iserblk:efe0",
        "chap-secret-file=/etc/iserblk/disk.chap",
        "--tls-psk=/etc/psk",
        "iserblk-attach@disk.service: started",
        "root@host logs in",
        "50% of 3 GiB",
        "-----BEGIN CERTIFICATE-----",
        "the secret is wrong",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert PLAIN.text(text) == text


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("user%hush@host", "…@host"),
        ("hush@host:3260", "…@host:3260"),
        (f"--lun=iser://u%hush@h/{IQN}:ro", f"--lun=iser://…@h/{IQN}:ro"),
        ("/srv/a@b.img", "/srv/a@b.img"),
        ("LIBISCSI_CHAP_PASSWORD=hu,sh and&more", "LIBISCSI_CHAP_PASSWORD=***"),
        ("--chap-secret=hu\nsh", "--chap-secret=***"),
        ("--listen", "--listen"),
    ],
)
def test_words_of_command_lines(word: str, shown: str) -> None:
    assert PLAIN.word(word) == shown


def test_known_secrets_are_hidden_whatever_is_around_them() -> None:
    hider = Hider([Secret("hush-hush"), Secret("hush-hush-more"), Secret(""), Secret(" ")])
    assert hider.text("xhush-hushx") == "x***x"
    assert hider.text("hush-hush-more") == "***"  # the longer one
    assert hider.text("one two") == "one two"


def test_a_short_secret_is_hidden_as_a_word() -> None:
    hider = Hider([Secret("ab1")])
    assert hider.text("ab1, (ab1) iser://u%ab1@h cab12 ab12") == "***, (***) iser://…@h cab12 ab12"


def test_bytes_that_are_no_text() -> None:
    secret = b"hush\xff\xfehush".decode(errors="surrogateescape")
    hider = Hider([Secret(secret)])
    for form in (secret, "hush\ufffd\ufffdhush", "hush\\xff\\xfehush", "hush%FF%FEhush"):
        assert hider.text(f"<{form}>") == "<***>"


def test_a_known_secret_as_programs_write_it() -> None:
    hider = Hider([Secret("hu/sh ä<&")])
    for form in (
        "hu%2Fsh%20%C3%A4%3C%26",
        "hu%2fsh%20%c3%a4%3c%26",
        "hu%2Fsh+%C3%A4%3C%26",
        "hu/sh ä&lt;&amp;",
        "hu/sh ä\\u003c\\u0026",
        "hu/sh \\u00e4<&",
        "hu/sh \\xe4<&",
        "hu/sh \\xc3\\xa4<&",
    ):
        assert hider.text(f"<{form}>") == "<***>"


def test_a_url_whose_end_is_cut_off_is_not_shown() -> None:
    text = f"{'x' * 8180} iser://user%hush-and-more@h/{IQN}"
    assert "hush" not in PLAIN.text(text)
    assert len(PLAIN.text("x" * 100_000)) < 10_000


def test_trees() -> None:
    hider = Hider([Secret("hush-hush"), Secret("ok")])
    tree = {"a": ["hush-hush", {"b": "x hush-hush"}, 7, None, True], "status": "ok", "text": "ok"}
    assert hider.tree(tree) == {
        "a": ["***", {"b": "x ***"}, 7, None, True],
        "status": "ok",
        "text": "***",
    }


def test_hostile_lines_do_not_keep_it_busy() -> None:
    """Quadratic patterns would take minutes for these."""
    for text in ("iser:" * 20_000, "@" * 100_000, "iser://" + "a:" * 50_000, "eyJ" * 30_000):
        PLAIN.text(text)


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "iserblk/doctor/machine.py",
        ROOT / "iserblk/doctor/portal.py",
        ROOT / "iserblk/doctor/rdma.py",
        *sorted((ROOT / "iserblk/initiator").rglob("*.py")),
        ROOT / "iserblk/credentials.py",
        ROOT / "iserblk/errors.py",
    ],
    ids=lambda path: path.name,
)
def test_remedies_of_ours_do_not_look_like_secrets(path: Path) -> None:
    """What the doctor shows of them would have a hole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert HIDDEN not in PLAIN.text(node.value), (path.name, node.lineno)
