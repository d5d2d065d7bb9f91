"""SCSI commands between a disk and an initiator: what a disk asks for, and what an initiator
implements. Neither knows the other."""
