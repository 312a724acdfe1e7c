"""CaseOps: a lossless case transform. Words become lower-case and a marker says what their case was.

    "The New York IBM office"  ->  CAP "the" CAP " new" CAP " york" CAPS " ibm" " office"

A marker stands before the space of its word, so that the space stays with the word and "the", " new" and " ibm" need
one piece each, not one per case. Three private-use characters are the markers, and each is a piece of the tokenizer:
CAP: the next letter, behind at most one space, is a capital. CAPS: so are all letters of the run that follows.
ESC: the next character is a marker's character that the text itself holds.

decode(encode(text)) == text for every text. Only letters whose two cases belong to each other alone and take equally
many UTF-8 bytes are touched (no sharp s, dotless i, titlecase digraph, final sigma), so the bytes of a token are those
of the original text. The letters come from blocks whose cases no future Unicode version changes.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import shards

if TYPE_CHECKING:
    import sentencepiece as spm

CAP, CAPS, ESC = MARKERS = "\ue001\ue002\ue003"
BLOCKS = ((0x41, 0x24F), (0x370, 0x52F), (0x531, 0x586), (0x1E00, 0x1EFF))  # Latin, Greek, Cyrillic, Armenian
VERSION, MARKER_BYTES = 1, 3


class CaseTables(NamedTuple):
    """Translation tables between the cases, and the patterns that find what has to be changed."""

    to_lower: dict[int, str]
    to_upper: dict[int, str]
    encode: re.Pattern
    decode: re.Pattern


@functools.cache
def case_tables() -> CaseTables:
    """Built on first use, since it walks through some thousand characters."""
    letters = {chr(code) for first, last in BLOCKS for code in range(first, last + 1)}
    pairs = {c: c.lower() for c in sorted(letters) if c.lower() != c and is_pair(c, c.lower(), letters)}
    upper, lower = (f"[{''.join(cases)}]" for cases in (pairs.keys(), pairs.values()))
    return CaseTables(
        {ord(u): low for u, low in pairs.items()},
        {ord(low): u for u, low in pairs.items()},
        re.compile(f"[{MARKERS}]| ?(?:{upper}{{2,}}(?!{lower})|{upper})"),
        re.compile(f"{ESC}([{MARKERS}])|{CAPS}( ?{lower}+)|{CAP}( ?{lower})|([{MARKERS}])"),
    )


def is_pair(upper: str, lower: str, letters: set[str]) -> bool:
    """Whether the two characters turn into each other, stay inside the blocks and take equally many bytes."""
    return lower in letters and lower.upper() == upper and len(lower.encode("utf-8")) == len(upper.encode("utf-8"))


def encode(text: str) -> str:
    """The text with its case moved into markers."""
    to_lower, _, pattern, _ = case_tables()

    def replace(match: re.Match) -> str:
        found = match[0]
        if found in MARKERS:
            return ESC + found
        return (CAP if len(found.lstrip(" ")) == 1 else CAPS) + found.translate(to_lower)

    return pattern.sub(replace, text)


def decode(text: str) -> str:
    """What encode() was given. ValueError for a marker without a letter behind it: no encoded text holds one."""
    _, to_upper, _, pattern = case_tables()

    def replace(match: re.Match) -> str:
        if match[4]:
            raise ValueError(f"character {match.start()}: marker U+{ord(match[4]):04X} has no letter behind it")
        return match[1] or (match[2] or match[3]).translate(to_upper)

    return pattern.sub(replace, text)


class TokenTables(NamedTuple):
    """Of a tokenizer with the markers as pieces: what its tokens stand for in the text, each (vocab,)."""

    lengths: np.ndarray  # int64, UTF-8 bytes of the piece; 0 for markers, which stand for nothing
    starts_with_space: np.ndarray  # bool
    is_case_marker: np.ndarray  # bool, CAP and CAPS
    escape_id: int


def token_tables(tokenizer: spm.SentencePieceProcessor) -> TokenTables:
    marker_ids = [tokenizer.piece_to_id(marker) for marker in MARKERS]
    lengths = shards.surface_bytes(tokenizer)
    lengths[marker_ids] = 0
    is_case_marker = np.zeros(len(lengths), dtype=bool)
    is_case_marker[marker_ids[:2]] = True
    return TokenTables(
        lengths, shards.sentencepiece_byte_tables(tokenizer).has_leading_space, is_case_marker, marker_ids[2]
    )


def token_bytes(tokens: np.ndarray, tables: TokenTables) -> np.ndarray:
    """Scored bytes of the original text that each token stands for, (n,) int64; tokens: (n,) ids of whole documents.

    The rule of the metric: a document's very first space counts nothing. A marker's character behind ESC is text.
    A marker at the very end, where a shard was cut, stands for nothing.
    """
    found, escaped = tables.lengths[tokens], -1
    for place in np.flatnonzero(tokens[:-1] == tables.escape_id):
        if place != escaped:  # else this ESC is itself the text
            escaped = place + 1
            found[escaped] = MARKER_BYTES
    first = np.flatnonzero(tokens[:-1] == shards.BOS_ID) + 1
    first += tables.is_case_marker[tokens[first]]
    first = first[first < len(tokens)]
    found[first] -= tables.starts_with_space[tokens[first]]
    return found
