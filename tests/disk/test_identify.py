"""What a LUN is asked after login."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

import pytest

from iserblk.disk import identify
from iserblk.errors import ScsiError
from iserblk.initiator.session import Session


def answers_lba_status(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> bool:
    def command(*_arguments: object, **_options: object) -> Generator[None, None, int]:
        if refuses:
            raise ScsiError("invalid field in the command (5/24/00)")
        yield
        return 24

    monkeypatch.setattr(identify, "command", command)
    steps = identify._Identify(cast(Session, None), 0, "lun0").answers_lba_status()
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return cast(bool, end.value)


@pytest.mark.parametrize("refuses", [True, False])
def test_extents_are_offered_only_where_the_lun_tells_them(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """LIO says that it is thinly provisioned, and refuses GET LBA STATUS (seen on Linux 6.1)."""
    assert answers_lba_status(monkeypatch, refuses) is not refuses
