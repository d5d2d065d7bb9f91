"""Which LUN it is, by what it says of itself, now and before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserblk.disk.lun.identify import Names
from iserblk.disk.lun.identity import check_lun, have_common, is_identified, is_same, lasting_name
from iserblk.disk.seam import LunInfo
from iserblk.errors import LunChanged
from tests.disk.fake_lun import FakeLuns, known

NAA, OTHER = "naa.60014050000000010000000000000001", "naa.60014050000000010000000000000002"
EUI, UUID = "eui.0010c500aabb0001", "uuid.c7dd4d3b-3d1f-5f1d-8f3f-000000000001"
TARGET = "name.iqn.2026-11.example:target"  # given for each of its LUNs
T10, LOCAL = "t10.IET     00010001", "naa.3000000000010001"


def names(*identifiers: str, serial: str = "1", product: str = "disk") -> Names:
    return Names("vendor", product, "1.0", serial, identifiers, (), ())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((NAA,), (NAA,)),
        ((NAA,), (NAA, EUI)),  # one more
        ((NAA, EUI), (EUI,)),  # one fewer
        ((NAA, T10), (NAA.upper().replace("NAA", "naa"), "t10.another text")),
        ((T10, LOCAL), (LOCAL, T10)),
        ((T10,), (T10, UUID)),  # all the former ones: our target, that was upgraded
        ((NAA, TARGET), (TARGET, NAA)),
        ((), ()),
        ((), (NAA,)),
    ],
)
def test_the_same(before: tuple[str, ...], now: tuple[str, ...]) -> None:
    assert is_same(names(*before), names(*now))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((NAA,), (OTHER,)),
        ((NAA, T10), (T10,)),  # the one that proves it is gone
        ((NAA, T10), (OTHER, T10)),
        ((NAA, TARGET), (OTHER, TARGET)),
        ((T10, LOCAL), (T10,)),
        ((T10,), ()),
        ((NAA,), (EUI,)),
    ],
)
def test_another(before: tuple[str, ...], now: tuple[str, ...]) -> None:
    assert not is_same(names(*before), names(*now))


def test_with_a_world_wide_identifier_its_maker_may_name_the_product_anew() -> None:
    assert is_same(names(NAA), names(NAA, product="disk of next year"))
    assert is_same(names(NAA), names(NAA, serial=""))
    assert not is_same(names(NAA), names(NAA, serial="2"))


@pytest.mark.parametrize("changed", [{"serial": "2"}, {"product": "another"}, {"serial": ""}])
def test_without_all_must_be_the_same(changed: dict[str, str]) -> None:
    assert not is_same(names(T10), names(T10, **changed))


def test_one_that_has_told_nothing_is_not_one_that_tells() -> None:
    assert is_same(names(serial=""), names(serial=""))
    assert not is_same(names(serial=""), names(NAA, serial=""))


def test_what_proves_that_luns_are_one() -> None:
    assert have_common((NAA, T10), (EUI, NAA))
    for one, other in [((T10, LOCAL),) * 2, ((NAA, TARGET), (OTHER, TARGET)), ((), ())]:
        assert not have_common(one, other)
    assert is_identified(names(NAA, T10)) and not is_identified(names(T10, LOCAL))


def test_the_name_of_a_device_outlives_an_upgrade_of_the_target() -> None:
    assert lasting_name((LOCAL, T10, UUID)) == lasting_name((LOCAL, T10)) == f"{LOCAL} {T10}"
    assert lasting_name((UUID,)) == UUID and lasting_name(()) == ""


def info(*identifiers: str, serial: str = "S1", size: int = 1 << 20) -> LunInfo:
    return replace(known(FakeLuns()).info, identifiers=identifiers, serial=serial, size=size)


def test_a_lun_may_grow() -> None:
    for known_as in (NAA, T10):
        check_lun(info(known_as), info(known_as, size=2 << 20))
    check_lun(info(NAA), info(NAA, size=2 << 20), elsewhere=True)


def test_where_only_the_size_tells_it_must_not_change() -> None:
    with pytest.raises(LunChanged, match="1048576 bytes, it has 2097152"):
        check_lun(info(serial=""), info(serial="", size=2 << 20))
    with pytest.raises(LunChanged, match="no world-wide identifier"):
        check_lun(info(T10), info(T10, size=2 << 20), elsewhere=True)
