"""What scripts/bench is made of; see docs/benchmarking.md.

    __main__   options, order of rounds            report   tables and JSON
    sections   which subjects run which jobs       goals    targets: met or missed
    subjects   (front-end, target) pairs: ours, peers and ceilings
    servers    starting and ending one server      proc     /proc: CPU time, peak memory, ports
    load       fio and iscsi-perf, parsed          api      load on the Python API
    results    samples, medians, ratios            profile  where the time goes, per layer
    storage    the backing files               machine  what the run ran on

Imports no iserblk but in ``api``: the bench sees what a user sees.
"""
