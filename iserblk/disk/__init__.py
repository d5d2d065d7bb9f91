"""A byte-addressed LUN: one core of operations, with an interface for threads and one for trio."""
