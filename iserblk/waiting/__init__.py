"""Waiting: descriptors in trio and in its place, busy polling, and strands for short requests."""
