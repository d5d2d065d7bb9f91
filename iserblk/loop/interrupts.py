"""Protection of coroutines from KeyboardInterrupt, also where they are compiled.

``trio.lowlevel.enable_ki_protection`` marks the code object of a Python function. A compiled
function has none: so the mark goes to a coroutine of this module, which stays as it is written and
awaits the compiled one. trio looks for the mark from the frame that an interrupt has met outwards;
compiled functions have no frames, and what they call counts as called by the coroutine here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import trio

P = ParamSpec("P")
T = TypeVar("T")


def uninterrupted(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """A decorator: KeyboardInterrupt is not raised in ``function``, nor in what it calls; only
    where it waits. A call takes about half a microsecond longer: for the bodies of tasks, and for
    what takes several commands."""

    @wraps(function)
    @trio.lowlevel.enable_ki_protection
    async def protected(*arguments: P.args, **named: P.kwargs) -> T:
        return await function(*arguments, **named)

    return protected
