"""LUNs as NBD devices and exports."""
