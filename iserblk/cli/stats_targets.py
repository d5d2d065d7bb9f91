"""A target in ``iserblk stats``: the lines of the report, and the object of ``--json``."""

from __future__ import annotations

from dataclasses import asdict

from iserblk.cli.output import size_words
from iserblk.cli.stats_rows import TargetRow, plain
from iserblk.metrics.target_reading import AddressReading, TargetReading


def address_words(address: AddressReading) -> str:
    return f"{plain(address.address)} {size_words(address.memory)}"


def target_lines(target: TargetReading) -> list[tuple[str, str]]:
    lines = [
        ("commands", f"{target.commands}, {target.in_flight} in flight"),
        ("sessions", str(target.sessions)),
        ("connections", f"{target.connections} of {target.connection_limit}"),
        (
            "before their login",
            f"{target.logins_unfinished} of {target.login_limit}, "
            f"{target.logins_given_up} ended as too many",
        ),
        ("logins", f"{target.logins}, {target.logins_refused} refused"),
        ("CHAP", f"{target.attempts_failed} failed, {target.attempts_delayed} delayed"),
        (
            "lost and kept",
            f"{target.kept} of {target.kept_limit}, {size_words(target.kept_memory)} of "
            f"{size_words(target.kept_memory_limit)}, {target.kept_given_up} given up as too many",
        ),
        (
            "memory for peers",
            f"{size_words(target.memory)} of {size_words(target.memory_limit)}, "
            f"{size_words(target.memory_beside)} of it beside data buffers; "
            f"{size_words(target.memory_free)} free",
        ),
        (
            "largest session",
            f"{size_words(target.largest_session)} of {size_words(target.session_limit)}",
        ),
        (
            "addresses",
            f"{target.address_count} with memory, each up to {size_words(target.address_limit)}",
        ),
        *[("address", address_words(each)) for each in target.addresses],
        (
            "short of memory",
            f"{target.memory_waiting} sessions wait, {target.memory_refused} commands refused",
        ),
        ("log lines left out", str(target.lines_left_out)),
    ]
    for lun in target.luns:
        if lun.threads or lun.waiting:
            lines.append(
                (f"LUN {lun.lun}", f"{lun.threads} threads at its disk, {lun.waiting} wait")
            )
    return lines


def target_json(row: TargetRow) -> dict[str, object]:
    target = row.target
    return {
        "where": row.where,
        "address": row.address,
        "pid": row.pid,
        "version": row.version,
        "target": target.target,
        "url": target.url,
        "commands": target.commands,
        "in_flight": target.in_flight,
        "sessions": target.sessions,
        "connections": target.connections,
        "connections_limit": target.connection_limit,
        "logins_unfinished": target.logins_unfinished,
        "logins_unfinished_limit": target.login_limit,
        "logins_given_up": target.logins_given_up,
        "logins": target.logins,
        "logins_refused": target.logins_refused,
        "chap_failures": target.attempts_failed,
        "chap_delays": target.attempts_delayed,
        "kept_connections": target.kept,
        "kept_connections_limit": target.kept_limit,
        "kept_memory_bytes": target.kept_memory,
        "kept_memory_limit_bytes": target.kept_memory_limit,
        "kept_given_up": target.kept_given_up,
        "memory_bytes": target.memory,
        "memory_beside_bytes": target.memory_beside,
        "memory_free_bytes": target.memory_free,
        "memory_limit_bytes": target.memory_limit,
        "session_memory_bytes": target.largest_session,
        "session_memory_limit_bytes": target.session_limit,
        "address_memory_limit_bytes": target.address_limit,
        "addresses": target.address_count,
        "largest_addresses": [
            {"address": each.address, "memory_bytes": each.memory} for each in target.addresses
        ],
        "memory_waiting": target.memory_waiting,
        "memory_refused": target.memory_refused,
        "log_lines_left_out": target.lines_left_out,
        "luns": [asdict(each) for each in target.luns],
    }
