"""Text as UTF-8 bytes, one token each: enough for models whose words mean nothing."""

from __future__ import annotations

from collections.abc import Iterable

BYTES = 256


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes themselves; ids above stand for nothing and decode to U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`. Raises `UnicodeEncodeError` (a `ValueError`) for half a surrogate pair."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Any ids decode: what is no UTF-8 becomes U+FFFD."""
        # 0xFF occurs nowhere in UTF-8, so it decodes to U+FFFD by itself and cuts no neighbour short.
        return bytes(token if token < BYTES else 0xFF for token in ids).decode("utf-8", errors="replace")
