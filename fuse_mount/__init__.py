"""LUNs as files: one FUSE file system whose files are the LUNs of the given URLs.

    options.py      what stands after -o
    operations.py   the file system: lookup, open, read, write, fsync, …
    mount.py        mounting, serving, unmounting, daemonising
    __main__.py     python3 -m fuse_mount URL… MOUNTPOINT [-o OPTION,…]

Everything runs in one trio loop with the iSCSI sessions: no thread is involved in a request.
"""
