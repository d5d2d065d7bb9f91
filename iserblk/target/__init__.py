"""The embedded target: files as LUNs over iSER and over TCP.

iscsi     connections and sessions
scsi      executes SCSI commands
store     holds the bytes of a LUN: a file or block device, with an optional volatile cache
seam      the interface between iscsi and scsi
ports     portal groups: iSCSI portal groups, and SCSI target port groups (ALUA)
lunspec   parses the option ``--lun``
server    listens, and runs all of it in trio
"""
