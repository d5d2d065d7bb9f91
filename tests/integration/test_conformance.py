"""libiscsi's conformance tool against our target over TCP.

A group fails where a case fails, or skips something, and ``conformance`` does not say why.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.commands import serving
from tests.integration.conformance import (
    FAILS,
    PROGRAM,
    defect,
    groups,
    run,
    version,
    why_skipped,
)
from tests.support.interop import PROPERTY
from tests.support.target import TargetProcess, running_target

# Fewer than 2,097,152 blocks: with more, commands of six bytes cannot reach the end, and the cases
# about their ends skip.
SIZES = {512: "1000M", 4096: "4G"}
READ_ONLY = len(SIZES)
GROUPS = groups()
LUNS = [512, pytest.param(4096, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    if not GROUPS:
        pytest.skip(f"{PROGRAM} is not installed: run scripts/setup --tests")
    place = tmp_path_factory.mktemp("luns")
    specs = [f"{place}/{block}:size={size}:block={block}" for block, size in SIZES.items()]
    specs.append(f"{place}/read-only:size=1M:ro")
    (place / "read-only").write_bytes(bytes(1 << 20))
    specs += [f"{place}/fresh-{block}:size=64M:block={block}" for block in SIZES]
    with running_target(specs, place / "target.log") as running:
        yield running


@pytest.fixture(scope="module")
def with_chap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URL of a LUN for each block size, behind CHAP."""
    place = tmp_path_factory.mktemp("chap")
    accounts = place / "accounts"
    accounts.touch(mode=0o600)
    accounts.write_text("conformance:not-so-secret-here\n")
    luns = [
        word
        for block, size in SIZES.items()
        for word in ("--lun", f"{place}/{block}:size={size}:block={block}")
    ]
    arguments = ["target", "--listen", "127.0.0.1:0", "--iqn", "iqn.2026-11.example:chap", *luns]
    with serving(*arguments, "--chap-accounts", str(accounts), log=place / "log") as server:
        url = server.url.replace("iser://", "iscsi://conformance%not-so-secret-here@")
        yield [f"{url}/{number}" for number in range(len(SIZES))]


def urls(target: TargetProcess, group: str, block: int) -> list[str]:
    """The URLs that a group needs: two paths for MultipathIO, a read-only LUN for ReadOnly.
    MultipathIO has a fresh LUN, because its CompareAndWrite fills 256 blocks with zeroes, and
    expects them in 257."""
    lun = list(SIZES).index(block)
    if group == "ReadOnly":
        lun = READ_ONLY
    elif group == "MultipathIO":
        lun += READ_ONLY + 1
    url = target.url.replace("iser://", "iscsi://") + f"/{lun}"
    return [url, url] if group == "MultipathIO" else [url]


# shows: SYSTEM-51
@pytest.mark.timeout(400)  # some groups run each case again, and the machine may be busy
@pytest.mark.parametrize("block", LUNS)
@pytest.mark.parametrize("group", GROUPS or ["none"])
def test_group(
    request: pytest.FixtureRequest,
    target: TargetProcess,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    group: str,
    block: int,
) -> None:
    cases, where = GROUPS[group], urls(target, group, block)
    if group == "iSCSICHAP":
        where = [request.getfixturevalue("with_chap")[list(SIZES).index(block)]]
    # What the program skips on every path, before and after any case, in its own inquiries.
    preamble = run(tmp_path, "TestUnitReady", ["Simple"], *where).skipped
    left_out: dict[str, list[str]] = {}
    for case in cases:
        known = defect(f"{group}.{case}", block)
        if known is not None and not known.lines:
            left_out.setdefault(known.reason, []).append(case)
    some = [case for case in cases if not any(case in each for each in left_out.values())]
    failed: dict[str, list[tuple[int, str]]] = {}
    skipping: dict[str, Counter[str]] = {}
    whole = run(tmp_path, group, cases, *where) if some == cases else None
    if whole is not None and (len(cases) == 1 or not whole.skipped - preamble):
        failed = whole.failures
        if whole.skipped - preamble:
            skipping[cases[0]] = whole.skipped
    else:
        # Run each case alone to see which one skips: a case that ends its session makes the cases
        # behind it skip, too.
        for case in some:
            alone = run(tmp_path, group, [case], *where)
            failed |= alone.failures
            if alone.skipped - preamble:
                skipping[case] = alone.skipped
    passed = 0
    wrong = []
    for case in some:
        name = f"{group}.{case}"
        failures = failed.get(case)
        if failures:
            known = defect(name, block)
            lines = {line for line, _ in failures}
            if known is None or not lines <= known.lines:
                wrong.append(f"{name} failed: {failures}")
            else:
                left_out.setdefault(known.reason, []).append(case)
        elif case in skipping:
            reason = why_skipped(name, block)
            if reason is None:
                wrong.append(f"{name} skips, and nothing says why: {dict(skipping[case])}")
            else:
                left_out.setdefault(reason, []).append(case)
        else:
            passed += 1
    assert not wrong, "\n".join(wrong)
    words = [
        f"{'all' if len(those) == len(cases) > 1 else ', '.join(those)}: {reason}"
        for reason, those in left_out.items()
    ]
    row = {
        "table": "conformance",
        "group": group,
        "lun": "read-only" if group == "ReadOnly" else f"{block}-byte blocks",
        "passed": f"{passed} of {len(cases)}",
        "left_out": "; ".join(words),
        "version": f"libiscsi-bin {version()}",
    }
    record_property(PROPERTY, json.dumps(row))


@pytest.mark.parametrize("name", FAILS)
def test_known_defects_are_of_cases_there_are(name: str) -> None:
    group, _, case = name.partition(".")
    assert not GROUPS or case in GROUPS.get(group, ()) or defect(name, 512) is None


def test_a_defect_of_small_blocks_is_none_of_large_ones(
    target: TargetProcess, tmp_path: Path
) -> None:
    """The case that fails with 512-byte blocks passes with 4096-byte ones. Runs without --long."""
    where = urls(target, "GetLBAStatus", 4096)
    assert not run(tmp_path, "GetLBAStatus", ["UnmapSingle"], *where).failures
