"""The subjects of sections: which processes they have, by the names that goals use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchlib import goals
from benchlib.goals import NBDKIT, OURS, OURS_NBDKIT, SERVER, Kind
from benchlib.load import Job
from benchlib.sections import SECTIONS, measure
from benchlib.subjects import Bench

from tests.cli.commands import good_json

JOB = Job("4k-randread-d4-c2", "randread", 4096, 4, 2)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    file = tmp_path / "lun"
    file.write_bytes(os.urandom(1 << 20))
    with ExitStack() as stack:
        yield Bench(stack, tmp_path, file, file)


@pytest.mark.parametrize(
    ("subject", "processes"),
    [
        (OURS, [SERVER, "target", "fio"]),
        pytest.param(
            OURS_NBDKIT,
            [SERVER, NBDKIT, "target", "fio"],
            marks=pytest.mark.skipif(not shutil.which("nbdkit"), reason="nbdkit is not installed"),
        ),
    ],
)
def test_processes_are_called_as_in_the_goals(
    bench: Bench, subject: str, processes: list[str]
) -> None:
    section = next(each for each in SECTIONS if each.name == "nbd")
    endpoint = section.openers[subject](bench)
    sample = measure(endpoint, JOB, 0.2)
    assert list(sample.cpu_seconds) == list(sample.peak_rss) == processes
    about = {
        goal.other
        for goal in goals.goals()
        if (goal.section, goal.subject) == ("nbd", subject) and goal.kind is not Kind.RATIO
    }
    assert about and about <= set(processes)


def test_variants_share_no_server_and_a_variant_has_one(bench: Bench) -> None:
    openers = next(each for each in SECTIONS if each.name == "nbd").openers
    with_journal, without, flushed = (
        openers[name](bench) for name in (OURS, goals.OURS_NO_JOURNAL, goals.OURS_FLUSHED)
    )
    assert with_journal.servers[SERVER] is not without.servers[SERVER]
    assert flushed.servers[SERVER] is without.servers[SERVER]
    assert with_journal.servers["target"] is without.servers["target"]


def test_two_ways_through_one_gateway(bench: Bench) -> None:
    openers = next(each for each in SECTIONS if each.name == "gateway").openers
    job = Job("4k-randwrite-d4", "randwrite", 4096, 4)
    ends = [openers[name](bench) for name in (goals.GATEWAY_TCP_ISER, goals.GATEWAY_ISER_ISER)]
    for end in ends:
        sample = measure(end, job, 0.2)
        assert list(sample.cpu_seconds) == ["gateway", "target", "iserblk bench"]
    assert ends[0].servers["gateway"] is ends[1].servers["gateway"]
    assert ends[0].servers["target"] is openers[OURS](bench).servers["target"]


@pytest.mark.parametrize("subject", [goals.OURS_TWO, goals.OURS_ISCSI_TWO])
def test_sessions_of_two_connections(bench: Bench, subject: str) -> None:
    openers = next(each for each in SECTIONS if each.name == "connections").openers
    end = openers[subject](bench)
    command = end.command(JOB, 0.2)
    (url,) = (word for word in command if "://" in word)
    (disk,) = good_json("info", url)["disks"]
    assert disk["connection"]["connections"] == 2
    sample = measure(end, JOB, 0.2)
    assert list(sample.cpu_seconds) == ["target", "iserblk bench"]


def test_each_section_has_a_peer_to_compare_with() -> None:
    for section in SECTIONS:
        for row in section.rows("*"):
            assert goals.peer_of(section.name, row.subject) in section.openers
