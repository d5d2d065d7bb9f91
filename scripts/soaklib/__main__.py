"""scripts/soak: options, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from soaklib import plan, report
from soaklib.judging import LONG_S, judged
from soaklib.picture import draw
from soaklib.processes import Broken
from soaklib.world import Record, World

_MOST_PATH = 95  # of the directory: the paths of sockets in it have 107 bytes at most


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"soak: {message} (scripts/soak --help)", file=sys.stderr)
        sys.exit(7)


def _say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


@contextmanager
def _as_interrupts() -> Iterator[None]:
    """After these signals, as after Ctrl-C, everything ends in order."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    yield


def _run(world: World, seed: int, seconds: float) -> None:
    """Raises Broken, KeyboardInterrupt."""
    world.start()
    minute = 0
    for event in plan.events(seed, seconds, world.restarts, world.visitors):
        world.wait(event.at_s)
        if world.now() >= seconds:
            break
        if world.now() // 60 > minute:
            minute = int(world.now() // 60)
            count = len(world.record.happened)
            _say(f"{minute} minutes, {count} events, {len(world.record.findings)} findings")
        world.do(event)
    world.wait(seconds)


def _write(record: Record, directory: Path, title: str) -> list[str]:
    """The files; returns the text."""
    lives = judged(record.samples)
    for life in lives:
        record.findings += life.findings()
    lines = [title, *(f"left out: {each}" for each in record.left_out), ""]
    lines += [*report.processes(lives), "", *report.latencies(record.minutes), ""]
    counts: dict[str, int] = {}
    for _, words in record.happened:
        kind = words.partition(", for")[0]
        counts[kind] = counts.get(kind, 0) + 1
    lines += [*report.initiators(record.tried.total(), record.replays), ""]
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    lines += [f"{len(record.happened)} events: {told}" if told else "no events"]
    lines += [f"{record.compared} blocks of the files of the LUNs were compared at the end", ""]
    lines += record.findings or ["nothing was wrong"]
    (directory / "soak.txt").write_text("\n".join(lines) + "\n")
    events = [f"{at_s:9.1f} s  {words}\n" for at_s, words in record.happened]
    (directory / "events.txt").write_text("".join(events))
    with (directory / "samples.jsonl").open("w") as file:
        for name, samples in record.samples.items():
            for each in samples:
                file.write(json.dumps({"process": name, **each._asdict()}) + "\n")
    if any(record.samples.values()):
        draw(record.samples, record.minutes, title).write(directory / "soak.svg")
    return lines


def main(words: Sequence[str]) -> int:
    parser = _Parser(prog="scripts/soak", add_help=False)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    seconds = options.hours * 3600 + options.minutes * 60
    if not 0 < seconds < 1e7:
        parser.error("say for how long: --hours H or --minutes M, above 0")
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        if any(options.output.iterdir()):
            parser.error(f"--output {options.output}: not empty; name a new directory")
        if len(os.fsencode(options.output.absolute())) > _MOST_PATH:
            parser.error(f"--output {options.output}: at most {_MOST_PATH} bytes, for its socket")
        place = nullcontext(str(options.output.absolute()))
    else:
        place = nullcontext(tempfile.mkdtemp(prefix="iserblk-soak-"))
    with place as directory, _as_interrupts():
        return _soak(Path(directory), seed, seconds)


def _soak(directory: Path, seed: int, seconds: float) -> int:
    _say(f"seed {seed}, {seconds / 60:g} minutes, in {directory}")
    if seconds < LONG_S:
        _say(f"shorter than {LONG_S / 60:.0f} minutes: flatness is not judged")
    world = World(directory, seed, _say)
    stopped = False
    try:
        try:
            _run(world, seed, seconds)
        except Broken as error:
            world.find(str(error))
        except KeyboardInterrupt:
            stopped = True
            _say("stopped; everything ends now (again: at once)")
        lasted = world.now()
        world.end()
    except KeyboardInterrupt:
        stopped, lasted = True, world.now()
    finally:
        world.close()
    title = f"A soak of {lasted / 60:.1f} minutes, seed {seed}"
    print("\n".join(_write(world.record, directory, title)))
    if stopped:
        return 128 + signal.SIGINT
    return 1 if world.record.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
