"""How a call of CSI fails: a code of gRPC, and words for the operator."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Status codes of gRPC (grpc/doc/statuscodes.md), those that CSI gives a meaning."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Refused(Exception):
    """``words``: one line, which the orchestrator shows to its users."""

    def __init__(self, code: Code, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


# Exit status of iserblk → code. Anything else: INTERNAL.
OF_STATUS = {
    4: Code.UNAVAILABLE,
    5: Code.UNAVAILABLE,
    7: Code.INVALID_ARGUMENT,
    8: Code.UNAVAILABLE,
    11: Code.UNAVAILABLE,
    21: Code.NOT_FOUND,
    23: Code.UNAVAILABLE,
    24: Code.UNAUTHENTICATED,
    27: Code.FAILED_PRECONDITION,
    28: Code.FAILED_PRECONDITION,
}
