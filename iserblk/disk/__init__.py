"""A byte-addressed LUN: one core of operations, a face for threads and a face for trio."""
