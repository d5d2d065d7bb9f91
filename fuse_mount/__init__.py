"""LUNs as files: a FUSE file system with one file for each LUN of the given URLs.

    options.py      options of -o
    operations.py   the file system: lookup, open, read, write, fsync, …
    readers.py      lets pyfuse3 read requests with few turns of the trio loop
    mount.py        mounting, serving, unmounting, daemonising
    errors.py       exceptions, with the exit statuses of mount(8)
    __main__.py     python3 -m fuse_mount URL… MOUNTPOINT [-o OPTION,…]
    helper.py       mount.iserblk, for mount(8) and fstab
    umount_helper.py  umount.fuse.iserblk, for umount(8) and systemd at a shutdown

Everything runs in one trio loop with the iSCSI sessions: no request needs another thread.
"""
