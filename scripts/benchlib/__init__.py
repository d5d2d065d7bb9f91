"""What scripts/bench is made of; see docs/benchmarking.md.

    __main__   options                             report   tables and JSON
    sections   which subjects run which jobs       goals    targets: met or missed
    subjects   (front-end, target) pairs: ours, peers and ceilings
    servers    starting and ending one server      proc     /proc: CPU time, peak memory, ports
    load       clients: fio, iscsi-perf, ours      results  samples, medians, ratios
    storage    the backing files                   machine  what the run ran on
    command    exit statuses and signals           profile  where the time goes, per layer

Imports nothing of iserblk: the bench sees what a user sees.
"""
