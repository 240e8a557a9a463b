"""The bytes that each token stands for, by the kind of a tokenizer's decoder.

Text is made from bytes, not from the text of single tokens: a character may be spread over several
tokens, and only its bytes can be concatenated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from dflash_jax.config import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, inverted: character -> byte.

    Bytes that print as themselves in Latin-1 stand for themselves; the 68 others take the code points from
    256 on in order (Radford et al., 2019).
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """Bytes of tokens, and whether the text as a whole loses one leading space (SentencePiece).

    Raises:
      ConfigError: the tokenizer's decoder is of a kind that is not supported.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]):
        decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
        piece_bytes, self.strips_leading_space = _reader(decoder)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, i in vocabulary.items():
            self._bytes[i] = token.encode("utf-8") if i in added else piece_bytes(token)
        self._special_ids = special_ids

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id beyond the vocabulary (padding rows of the embedding table)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def join(self, ids: Any, skip_special: bool) -> bytes:
        """Bytes of a sequence, the leading space not yet stripped."""
        return b"".join(self[i] for i in ids if not (skip_special and i in self._special_ids))


def _reader(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """(token -> bytes, strips one leading space) of the decoder section of a tokenizer.json."""
    if decoder is None:
        # Tokens of a decoder-less tokenizer are words; they are joined by spaces.
        return lambda token: b" " + token.encode("utf-8"), True
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level, False
    unknown = sorted(kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if unknown:
        raise ConfigError(
            f"the tokenizer has a decoder of type {unknown[0]}, which is not supported; supported are ByteLevel, "
            "Metaspace and SentencePiece's sequence of Replace, ByteFallback, Fuse and Strip"
        )
    replacements, strips = [], False
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ConfigError(f"the tokenizer's decoder replaces by {step['pattern']}, which is not supported")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            strips |= step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip":
            if (step["content"], step["start"], step["stop"]) not in ((" ", 1, 0), (" ", 0, 0)):
                raise ConfigError(f"the tokenizer's decoder strips {step}, which is not supported")
            strips |= step["start"] == 1
    fallback = "ByteFallback" in kinds

    def piece(token: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(token) if fallback else None
        if match:
            return bytes([int(match.group(1), 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return piece, strips


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # not made of stand-ins, as tokens that were added by hand: its own text
        return token.encode("utf-8")
