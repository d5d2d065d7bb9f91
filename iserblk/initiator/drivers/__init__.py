"""Who waits for a session: threads of the caller, or tasks of trio."""
