"""libiscsi's iscsi-test-cu: runs it, reads its report, and lists cases that fail or skip."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.interop import package

PROGRAM = "iscsi-test-cu"
LIMIT_S = 100  # one run of the program
_RESULTS = "CUnitAutomated-Results.xml"
_SKIPPED = re.compile(r"\[SKIPPED\]\s*(.*)")

# -- what is known of its cases --------------------------------------------------------------------

_OPTIONAL = "an optional command that the target does not have"

# A regular expression for GROUP.CASE → why the case may skip something.
SKIPS = {
    r"OrWrite\.": f"ORWRITE: {_OPTIONAL}",
    r"ReadDefectData1[02]\.": f"READ DEFECT DATA: {_OPTIONAL}; a file has no defects",
    r"WriteAtomic16\.": f"WRITE ATOMIC(16): {_OPTIONAL}",
    r"ExtendedCopy\.Large": "segment descriptor 0Ah is optional, and the target does not have it",
    r"ReadOnly\.": f"only its ORWRITE: {_OPTIONAL}",
    r"PreventAllow\.": "for removable media; a LUN is none",
    r"StartStopUnit\.NoLoej|StartStopUnit\.Simple": "for removable media; a LUN is none",
    r"Sanitize\.": f"SANITIZE: {_OPTIONAL}",
}
# More of them, for the LUN with 4096-byte blocks.
SKIPS_4096 = {
    r"(CompareAndWrite|WriteSame1[06])\.(InvalidDataOutSize|UnmapUnaligned)": (
        "for physical blocks of several logical ones; passes on the LUN with 512-byte blocks"
    ),
}


class Defect(NamedTuple):
    """A case that cannot pass: the lines at which it fails, and why. ``versions``: of libiscsi,
    known to have the defect. A case without lines never ends, and is not run."""

    lines: frozenset[int]
    block_sizes: tuple[int, ...]
    reason: str
    versions: tuple[str, ...] = ("1.19", "1.20")


FAILS = {
    "CompareAndWrite.InvalidDataOutSize": Defect(
        frozenset({63, 73}),
        (512,),
        "means to change the NUMBER OF LOGICAL BLOCKS of its command, but its hook changes every "
        "PDU that is no SCSI command: what it sends is right, and carried out (1.19 counted the "
        "blocks of the command wrongly, which was refused)",
        ("1.20",),
    ),
    "iSCSISendTargets.Invalid": Defect(
        frozenset(),
        (512, 4096),
        "expects an unknown key to be rejected, and waits for ever after NotUnderstood, which is "
        "the answer (RFC 7143 section 6.2)",
        ("1.20",),
    ),
    "GetLBAStatus.UnmapSingle": Defect(
        frozenset({135}),
        (512,),
        "asks for the block after the unmapped ones and expects the answer to begin eight further "
        "on, where a physical block has eight; passes on the LUN with 4096-byte blocks",
    ),
    "WriteSame16.Unmap": Defect(
        frozenset({175, 190, 193}),
        (512, 4096),
        "its last part writes 65,536 blocks by one WRITE(16), whatever the MAXIMUM TRANSFER LENGTH "
        "of the Block Limits page is, and a longer transfer is to be refused (SBC-3); the parts "
        "before it, of 1 to 256 blocks, pass",
    ),
    "WriteSame10.UnmapUntilEnd": Defect(
        frozenset({71}),
        (512, 4096),
        "sends FFh with UNMAP=1 and expects zeroes: such data is written (SBC-3: unmapping must "
        "not change what is read)",
    ),
    "iSCSIdatasn.iSCSIDataSnInvalid": Defect(
        frozenset({116}),
        (512, 4096),
        "its second part expects an error and sends a good command: connected anew it uses "
        "immediate data, which has no DataSN; the other three parts pass",
    ),
    **{
        f"ProutReserve.Access{kind}": Defect(
            frozenset({77, 91}),
            (4096,),
            "reads and writes 512 bytes as one block, whatever the LUN's block size is; passes on "
            "the LUN with 512-byte blocks",
        )
        for kind in ("EA", "WE", "EARO", "WERO", "EAAR", "WEAR")
    },
}


def why_skipped(name: str, block_size: int) -> str | None:
    """Why the case ``name`` (GROUP.CASE) may skip something; None: it must not."""
    known = SKIPS | (SKIPS_4096 if block_size == 4096 else {})
    return next((why for pattern, why in known.items() if re.match(pattern, name)), None)


def defect(name: str, block_size: int) -> Defect | None:
    """The defect of GROUP.CASE in the installed version; None: it must pass."""
    known = FAILS.get(name)
    if known is None or block_size not in known.block_sizes:
        return None
    return known if version().startswith(tuple(f"{each}." for each in known.versions)) else None


# -- running it ------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a run reported. ``failures``: failed case → (line, condition). ``skipped``: messages
    about skips; the program does not name their case."""

    failures: dict[str, list[tuple[int, str]]]
    skipped: Counter[str]


@cache
def version() -> str:
    """The version of libiscsi-bin; "" where it is not installed."""
    return package("libiscsi-bin").partition(" ")[2]


def groups() -> dict[str, list[str]]:
    """Group → cases; empty where the program is not installed."""
    if shutil.which(PROGRAM) is None:
        return {}
    said = subprocess.run([PROGRAM, "--list"], capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = {}
    for word in said.stdout.split():
        family, _, rest = word.partition(".")
        group, _, case = rest.partition(".")
        if family == "ALL" and case:
            found.setdefault(group, []).append(case)
    return found


def run(place: Path, group: str, cases: list[str], *urls: str) -> Outcome:
    """Run a whole group or one case of it in the directory ``place``, to which the program writes.
    Raises AssertionError where the report does not name exactly these cases."""
    name = f"ALL.{group}" if len(cases) > 1 else f"ALL.{group}.{cases[0]}"
    command = [PROGRAM, "--dataloss", "--fail", "--xml", "--test", name, *urls]
    report = place / _RESULTS
    report.unlink(missing_ok=True)
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    said = done.stdout + done.stderr
    assert report.exists(), said
    tree = ElementTree.parse(report)
    assert {_text(name) for name in tree.iter("TEST_NAME")} == set(cases), said
    failures: dict[str, list[tuple[int, str]]] = {}
    for failure in tree.iter("CUNIT_RUN_TEST_FAILURE"):
        where = int(_text(failure.find("LINE_NUMBER"))), _text(failure.find("CONDITION"))
        failures.setdefault(_text(failure.find("TEST_NAME")), []).append(where)
    assert failures or done.returncode == 0, said
    return Outcome(failures, Counter(_SKIPPED.findall(said)))


def _text(element: ElementTree.Element | None) -> str:
    assert element is not None
    return (element.text or "").strip()
