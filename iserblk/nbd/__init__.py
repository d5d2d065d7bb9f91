"""LUNs as block devices of the kernel, by NBD (Network Block Device)."""
