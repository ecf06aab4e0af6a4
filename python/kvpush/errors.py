"""Exceptions of kvpush: one small tree, each also a builtin that a caller would catch.

The C++ core reports a code and one line of context; ``bindings/bind_status.cpp`` maps each code to
one class here. Messages say what was wrong, the values, and the fix.
"""


class KvpushError(RuntimeError):
    """Base of every error that kvpush raises."""


class InvalidArgument(KvpushError, ValueError):
    """An argument is wrong: the message has the value, the limit and the fix."""


class DuplicateKey(InvalidArgument):
    """A push with this key is open already in this engine."""


class QueueFull(KvpushError, BlockingIOError):
    """``max_open_transfers`` pushes or receives are open; poll and try again."""


class ClosedError(KvpushError):
    """The engine is closed."""


class HandshakeError(KvpushError, ConnectionError):
    """Offer and answer do not fit: the message names the field and both values."""


class PeerLost(KvpushError, ConnectionError):
    """The peer's session is not open (never was, was lost, or was closed)."""


class Exhausted(KvpushError, MemoryError):
    """A memory budget is spent (``landing_bytes``, ``max_quarantined_bytes``)."""


class Unsupported(KvpushError, NotImplementedError):
    """An explicit request cannot be met here: the message says what is missing and how to get it."""


class TransportError(KvpushError, OSError):
    """The transport's library or the operating system refused a call."""
