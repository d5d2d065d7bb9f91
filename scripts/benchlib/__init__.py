"""The modules of scripts/bench; docs/running-benchmarks.md explains how to use it.

    __main__   options                             report   tables and JSON
    sections   which subjects run which jobs       goals    targets: met or missed
    subjects   (front-end, target) pairs: ours, peers and ceilings
    servers    starting and ending one server      proc     /proc: CPU time, peak memory, ports
    load       clients: fio, iscsi-perf, ours      results  samples, medians, ratios
    storage    the backing files                   machine  describes this machine
    command    exit statuses and signals           profile  where the time goes, per layer
    growth     cost of a request as load grows     nbd_load its client, a program of its own
    lab        in the lab's guest: verbs  device   block devices, likewise
    scale      cost of a session as they grow      scale_load  its client, likewise

Imports nothing of iserblk: the bench sees what a user sees. Only ``scale_load`` does, which is a
user of the Python API.
"""
