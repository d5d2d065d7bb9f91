"""A session in full feature phase: what is in flight, what is sent, what comes, and when it ends.

slots       one command in flight, and who waits for it
sending     the queue, the command window, CmdSN order
session     what the target answers, losses, the end
unasked     Logout, and PDUs that the target sends by itself
deadlines   what is done about a command that does not end
"""
