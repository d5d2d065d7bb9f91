"""A session in full feature phase: what is in flight, what is sent, what comes, and when it ends.

slots       one command in flight, and who waits for it
sending     the queue, the command window, CmdSN order
session     what the target answers and says unasked, losses, the end
logout      its request and its times
deadlines   what is done about a command that does not end
"""
