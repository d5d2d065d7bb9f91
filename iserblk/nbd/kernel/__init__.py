"""LUNs as /dev/nbdX: nbdkit on a private socket, and the kernel's NBD client at its other end.

    /dev/nbdX ── kernel ── unix socket ── nbdkit, nbd_plugin/iserblk.py ── the LUN

One nbdkit per device. What belongs to a device stands in a directory of its own (``state``), so
that another process can end the attachment, or clean up after one that was killed half way:

    /run/iserblk/nbd0.lock      held (flock) while an attach or detach of nbd0 is under way
    /run/iserblk/nbd0/          mode 0700: what reaches the socket reads and writes the LUN
        socket, nbdkit.pid      where nbdkit listens; who it is
        client.pid              the nbd-client that connected: the kernel shows it in sysfs, too,
                                and so it is known whether the device is still ours
        state.json              what detach needs to know

nbd-client hands the sockets to the kernel and ends. nbdkit ends when the kernel has closed them
(its exitlast filter), even where nbd-client -d was used instead of us. nbdkit outlives the target:
without its server the kernel could only fail, and some kernels hang.
"""
