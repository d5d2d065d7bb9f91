"""What attach and the process of a server tell each other."""

from __future__ import annotations

import pytest

from iserblk.errors import IserblkError
from iserblk.nbd.kernel.orders import READY, error_of, from_words, refusal, words_of

URLS = ["iser://192.0.2.1/iqn.2026-11.example:disk/0?auth=md5&x=1", "iscsi://192.0.2.2/iqn.a:b/1"]
OPTIONS = {"io-timeout": "5", "metrics": "/run/a=b", "reserve-key": ""}


def test_words_come_back() -> None:
    assert from_words(words_of(URLS, OPTIONS)) == (URLS, OPTIONS)
    assert from_words([]) == ([], {})


def test_a_refusal_keeps_its_words_and_its_status() -> None:
    said = refusal("no LUN 9: “really”", 21)
    assert said != READY
    error = error_of(said)
    assert isinstance(error, IserblkError)
    assert (str(error), error.exit_status) == ("no LUN 9: “really”", 21)
    with pytest.raises(IserblkError):
        raise error
