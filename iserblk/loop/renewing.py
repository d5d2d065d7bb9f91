"""An epoll instance in place of another that has a stale descriptor.

The kernel ends a registration when the last copy of a descriptor is closed. A descriptor that was
closed while registered, and of which a copy is left (``dup``, a child process), is reported for
ever, and no call names it any more: only the instance as a whole can be closed.
"""

from __future__ import annotations

import select


def renewed(old: select.epoll, masks: dict[int, int]) -> tuple[select.epoll, list[int]]:
    """A new instance with the descriptors of ``masks``, each with its mask, as far as ``old`` has
    them; and the numbers of the others: their descriptors were closed. The caller closes ``old``.
    Raises OSError when the system has no room; ``old`` can be used then."""
    new = select.epoll()
    gone: list[int] = []
    try:
        for fd, mask in masks.items():
            try:
                old.modify(fd, mask)  # fails also where the number is that of another file now
            except OSError:
                gone.append(fd)
            else:
                new.register(fd, mask)
    except OSError:
        new.close()
        raise
    return new, gone
