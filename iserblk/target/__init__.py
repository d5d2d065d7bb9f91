"""The embedded target: files as LUNs over iSER and over TCP.

iscsi     connections and sessions
scsi      what a command does
store     where the bytes are
seam      between iscsi and scsi
ports     portal groups, as both see them
lunspec   ``--lun``
server    all of it, in trio
"""
