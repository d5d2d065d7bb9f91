"""Stores, which hold the bytes of a LUN: a file or block device, and an optional volatile cache."""
