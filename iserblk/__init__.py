"""A userspace iSER/iSCSI initiator: remote SCSI LUNs as block devices and as files."""

__version__ = "0.1.0"
