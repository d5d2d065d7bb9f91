"""The only room that waits, and the only one that reads a clock."""
