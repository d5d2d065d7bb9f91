"""The model itself: it catches each kind of wrong content."""

from __future__ import annotations

import pytest

from tests.model.blocks import GRANULE, ZEROES, Model, Wrong, content, version_of


def write(model: Model, granule: int, acknowledged: bool = True, fua: bool = False) -> bytes:
    """Run a group of one write of one granule; its content."""
    version = model.begin_write(granule, 1)
    model.end_write(granule, 1, version, acknowledged, fua)
    model.end_group()
    return content(version, granule)


def test_content_names_its_version_and_place() -> None:
    assert version_of(content(7, 3), 3) == 7
    assert version_of(content(7, 3), 4) is None
    assert version_of(ZEROES, 4) == 0
    torn = content(7, 3)[: GRANULE // 2] + content(8, 3)[GRANULE // 2 :]
    assert version_of(torn, 3) is None


def test_an_older_write_must_not_come_back() -> None:
    model = Model(4)
    old, new = write(model, 1), write(model, 1)
    model.check_read(1, new)
    for wrong in (old, ZEROES):
        with pytest.raises(Wrong, match="legal are"):
            model.check_read(1, wrong)


def test_what_nobody_wrote() -> None:
    model = Model(4)
    write(model, 1)
    with pytest.raises(Wrong, match="nobody"):
        model.check_read(1, b"x" * GRANULE)
    with pytest.raises(Wrong):
        model.check_read(2, content(1, 1))


def test_a_failed_write_may_have_happened_but_not_before_a_newer_one() -> None:
    model = Model(4)
    first = write(model, 0)
    failed = write(model, 0, acknowledged=False)
    model.check_read(0, failed, "one")
    with pytest.raises(Wrong, match="before that"):
        model.check_read(0, first, "one")
    model.check_read(0, first, "two")  # the connection was lost between them
    write(model, 0)
    with pytest.raises(Wrong):
        model.check_read(0, failed)


def test_writes_at_the_same_time_come_in_any_order() -> None:
    model = Model(4)
    one, two = model.begin_write(0, 2), model.begin_write(1, 2)
    model.check_read(0, ZEROES)
    model.end_write(0, 2, one, True)
    model.end_write(1, 2, two, True)
    model.end_group()
    for version in (one, two):
        model.check_read(1, content(version, 1))
    for granule, version in ((0, two), (2, one), (1, 0)):
        with pytest.raises(Wrong):
            model.check_read(granule, content(version, granule))


def test_a_power_failure_takes_what_was_not_flushed() -> None:
    model = Model(4)
    flushed = write(model, 0)
    model.flushed()
    later = write(model, 0)
    model.lost()
    model.check_read(0, flushed)
    model.check_read(0, later)
    with pytest.raises(Wrong):
        model.check_read(0, ZEROES)


def test_what_was_written_through_is_there() -> None:
    model = Model(4)
    write(model, 0)
    through = write(model, 0, fua=True)
    model.lost()
    model.check_read(0, through)
    with pytest.raises(Wrong):
        model.check_read(0, content(1, 0))


def test_a_trim_may_do_nothing() -> None:
    model = Model(4)
    old = write(model, 0)
    model.begin_write(0, 1, zeroes=True)
    model.end_write(0, 1, 0, True, trim=True)
    model.end_group()
    model.check_read(0, old)
    model.check_read(0, ZEROES)
    model.begin_write(0, 1, zeroes=True)
    model.end_write(0, 1, 0, True)
    model.end_group()
    with pytest.raises(Wrong):
        model.check_read(0, old)


@pytest.mark.parametrize("perhaps", [False, True])
def test_a_flush_that_failed_without_a_reason_may_have_reported_a_loss(perhaps: bool) -> None:
    """Written while the client could not keep it, then lost or not. A flush that succeeds says that
    nothing was lost, but for a loss that was reported before."""
    model = Model(4, durable=True)
    old = write(model, 1)
    model.turned()
    new = write(model, 1)
    model.power()
    if perhaps:
        model.perhaps_told()
        assert model.may_tell
    model.flushed()
    model.check_read(1, new)
    model.end_group()
    if perhaps:
        model.check_read(1, old)
    else:
        with pytest.raises(Wrong, match="legal are"):
            model.check_read(1, old)
