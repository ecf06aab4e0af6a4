"""Proof of a shared secret over the bytes with which two engines find each other."""

from kvpush.errors import HandshakeError

MAGIC = b"kvps"
TAG_BYTES = 32
_HELLO = "hello"
_OFFER = "offer"
_ANSWER = "answer"
# The ids that begin every offer and answer, behind magic and version (docs/protocol.md).
_IDS = slice(5, 37)
_SESSION = slice(21, 37)


def seal(secret: str, what: str, body: bytes, context: bytes = b"") -> bytes:
    """Return `body` behind a proof that its sender has the secret; without one, `body` as it is.

    Parameters
    ----------
    secret : str
        "" for none.
    what : str
        What the bytes are: a proof of one thing is none of another.
    body : bytes
        The bytes.
    context : bytes
        What both sides know and these bytes belong to.
    """
    return MAGIC + _tag(secret, what, body, context) + body if secret else body


def unseal(secret: str, what: str, sealed: bytes, context: bytes = b"") -> bytes:
    """Return what :func:`seal` was given.

    Raises
    ------
    HandshakeError
        Only one side has a secret, or they differ, or the bytes were altered or belong to something else.
    """
    signed = sealed.startswith(MAGIC)
    if not secret:
        if signed:
            raise HandshakeError(
                f"the {what} is signed with a shared secret and this side has none: set KVPUSH_SECRET to the "
                "same on both sides"
            )
        return sealed
    if not signed:
        raise HandshakeError(
            f"the {what} is not signed and this side has a shared secret: set KVPUSH_SECRET to the same on "
            "both sides"
        )
    from hmac import compare_digest

    tag, body = sealed[len(MAGIC) :][:TAG_BYTES], sealed[len(MAGIC) + TAG_BYTES :]
    if not compare_digest(tag, _tag(secret, what, body, context)):
        raise HandshakeError(
            f"the {what} is signed with another secret, was altered, or belongs to another question: set "
            "KVPUSH_SECRET to the same on both sides"
        )
    return body


def tag_of(sealed: bytes) -> bytes:
    """Return the proof of sealed bytes: it stands for them. b"" if there is none."""
    return sealed[len(MAGIC) :][:TAG_BYTES] if sealed.startswith(MAGIC) else b""


def seal_hello(secret: str, hello: bytes) -> bytes:
    """Seal P's hello."""
    return seal(secret, _HELLO, hello)


def unseal_hello(secret: str, sealed: bytes) -> bytes:
    """Undo :func:`seal_hello`."""
    return unseal(secret, _HELLO, sealed)


def seal_offer(secret: str, offer: bytes) -> bytes:
    """Seal D's offer."""
    return seal(secret, _OFFER, offer)


def unseal_offer(secret: str, sealed: bytes) -> bytes:
    """Undo :func:`seal_offer`."""
    return unseal(secret, _OFFER, sealed)


def seal_answer(secret: str, offer: bytes, answer: bytes) -> bytes:
    """Seal P's answer to this (unsealed) offer: it holds for that offer's engine and session only."""
    return seal(secret, _ANSWER, answer, offer[_IDS])


def unseal_answer(secret: str, incarnation: str, sealed: bytes) -> bytes:
    """Undo :func:`seal_answer` on D, whose engine's incarnation (hexadecimal) made the offer."""
    session = sealed[len(MAGIC) + TAG_BYTES :][_SESSION]
    return unseal(secret, _ANSWER, sealed, bytes.fromhex(incarnation) + session)


def _tag(secret: str, what: str, body: bytes, context: bytes) -> bytes:
    import hmac  # brings OpenSSL with it: only those that have a secret pay for it

    # Every variable part but the last has its length, so that no two different inputs are the same bytes.
    head = b"".join(len(part).to_bytes(4, "little") + part for part in (MAGIC, what.encode(), context))
    return hmac.digest(secret.encode(), head + body, "sha256")
