"""Drivers, which run a session and wait for it: in threads of the caller, or in trio tasks."""
