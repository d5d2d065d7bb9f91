"""Texts and targets for tests of text segments."""

from __future__ import annotations

from hypothesis import strategies as st

from iserblk.iscsi.text import (
    decode_untrusted,
)
from iserblk.iscsi.text_target import send_targets_answer, understand_nothing

KEYS = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefz019.-+@_#", min_size=1, max_size=63)


VALUES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)  # type: ignore[arg-type]


TARGETS = {"iqn.2026-11.x:a": ["10.0.0.1:3260,1", "[::1]:3260,1"], "iqn.2026-11.x:b": ["h:1,1"]}


def answer_to(request: bytes, targets: dict[str, list[str]]) -> bytes:
    return send_targets_answer(decode_untrusted(request), targets, understand_nothing)
