"""LUNs as /dev/nbdX: an NBD server on a private socket, and the kernel's NBD client at its other
end.

    /dev/nbdX ── kernel ── unix socket ── server ── the LUN

Each device has a server, which is a process of its own: module ``serving``, or nbdkit with
nbd_plugin/iserblk.py. Each device has a directory with its state (module ``state``), so that
another process can end the attachment, or clean up after an attach that was killed:

    /run/iserblk/nbd0.lock      held (flock) while an attach or detach of nbd0 is under way
    /run/iserblk/nbd0/          mode 0700: a process that reaches the socket can use the LUN
        socket, server.pid      where the server listens; its process id
        successors              where our server listens for the process that is to replace it
        client.pid              process id of the attach that connected the device. sysfs shows
                                that id, too; if both are equal, the device is still ours
        state.json              what detach, and a successor of the server, need to know

attach connects to the server (``links``), hands the sockets to the kernel (``netlink``), and ends.
The server ends when the kernel has closed them, also after a disconnect by nbd-client -d instead of
iserblk detach. It keeps running while the target is lost. ``attach --replace`` starts another
server, which takes the kernel's connections over (``succession``). If a server has died, requests
wait for some time for a successor, which connects anew, then fail.
"""
