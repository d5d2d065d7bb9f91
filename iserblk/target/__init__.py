"""The embedded target: files as LUNs over iSER."""
