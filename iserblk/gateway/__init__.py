"""LUNs of other targets as LUNs of our own target: a disk (``iserblk.disk``) behind a store."""
