"""The tree of errors: what each hands on to front-ends and to the shell."""

from __future__ import annotations

import errno

import pytest

from iserblk import errors
from iserblk.errors import IserblkError

EXIT_STATUSES = {1, 4, 5, 7, 8, 11, 13, 21, 23, 24, 27, 28}


def kinds(root: type[IserblkError] = IserblkError) -> list[type[IserblkError]]:
    found = [root]
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            found += kinds(kind)
    return found


@pytest.mark.parametrize("kind", kinds())
def test_each_has_an_errno_and_a_documented_exit_status(kind: type[IserblkError]) -> None:
    assert kind.errno in errno.errorcode
    assert kind.exit_status in EXIT_STATUSES


def test_the_tree_is_drawn_whole() -> None:
    drawn = errors.__doc__ or ""
    for kind in kinds():
        assert kind.__name__ in drawn, f"{kind.__name__} is not in the tree of the module"


def test_what_broke_its_protocol_is_named() -> None:
    error = errors.RemoteProtocolError("DDP", "no such STag", (1, 1, 0))
    assert (str(error), error.layer, error.terminate) == ("DDP: no such STag", "DDP", (1, 1, 0))


def test_a_refused_login_carries_its_status() -> None:
    error = errors.LoginError("moved, to [::1]:3261", 0x0102, "[::1]:3261")
    assert (error.status, error.address) == (0x0102, "[::1]:3261")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (errors.OutOfSpace, errno.ENOSPC),
        (errors.WriteProtected, errno.EROFS),
        (errors.NoSuchLun, errno.ENXIO),
        (errors.CommandTimeout, errno.EIO),
        (errors.NotSupported, errno.EOPNOTSUPP),
        (errors.ReservationConflict, errno.EBUSY),
    ],
)
def test_what_applications_see(kind: type[IserblkError], number: int) -> None:
    assert kind.errno == number


def test_of_a_group_the_first_known_error_counts() -> None:
    busy, gone, bug = errors.Busy("in use"), OSError(errno.EPIPE, "gone"), ZeroDivisionError()
    assert errors.first_error(ExceptionGroup("", [bug, gone, ExceptionGroup("", [busy])])) is busy
    assert errors.first_error(ExceptionGroup("", [bug, gone])) is gone
    group = ExceptionGroup("", [bug])
    assert errors.first_error(group) is group
    assert errors.first_error(bug) is bug
