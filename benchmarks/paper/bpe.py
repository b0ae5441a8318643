"""GPT-2 tokenization with the `tokenizers` package. Tokens are cached, because encoding a split takes 4 to 7 s."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.datasets import GPT2_BPE_SHA256, WIKITEXT2_SHA256, BpeFiles
from benchmarks.paper.sources import cache_folder, written_whole
from trimtab.core.errors import DependencyError, FormatError

VOCAB_SIZE = 50_257
TOKEN_DTYPE = np.dtype("<u2")  # ids 0 to 50,256, the same bytes on every machine
# Split -> (number of tokens, sha256 of the token array), the expected result of encoding the whole split.
WIKITEXT2_TOKENS: Mapping[str, tuple[int, str]] = {
    "train": (2_448_382, "6f6e4b8e337e6ca2543efc87c8ab83441094e4f66dc4e9cc806c40c8d2444bf5"),
    "valid": (258_659, "17bc83b54d943c68889ab3b9cb01f17b86fe0216e9738ee39806d2631aac2ef9"),
}
# A pre-token always ends before a top-level heading (" = Title = "), so splitting there changes no token. Encoding a
# few articles at a time avoids the 1.6 GB that encoding the whole split takes.
_BEFORE_HEADING = re.compile(r"(?<=\n)(?= = [^=])")
_PIECES_AT_ONCE = 32


def load_encoder(files: BpeFiles) -> Any:
    """Return a `tokenizers.ByteLevelBPETokenizer` built from the encoder and merges files.

    Raises:
        DependencyError: `tokenizers` is not installed.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise DependencyError(
            "tokenizers",
            got=f"none ({error})",
            expected="the package that applies a byte-pair encoding",
            hint="pip install tokenizers",
        ) from error
    return tokenizers.ByteLevelBPETokenizer(str(files.encoder), str(files.merges))


def encode(encoder: Any, text: str) -> np.ndarray:
    """Return the token ids of `text`, (N,) uint16. Encodes a few articles at a time to limit memory."""
    pieces = _BEFORE_HEADING.split(text)
    ids = [np.zeros(0, TOKEN_DTYPE)]
    for start in range(0, len(pieces), _PIECES_AT_ONCE):
        encoded = encoder.encode_batch(pieces[start : start + _PIECES_AT_ONCE])
        ids += [np.array(piece.ids, TOKEN_DTYPE) for piece in encoded]
    return np.concatenate(ids)


def wikitext2_tokens(split: str, text: bytes, files: BpeFiles) -> np.ndarray:
    """Return the tokens of a WikiText-2 split, (N,) uint16, from the cache if present.

    Args:
        split: "train" or "valid".
        text: Content of the split, UTF-8.
        files: GPT-2 encoder and merges.

    Raises:
        DependencyError: `tokenizers` is not installed.
        FormatError: The tokens differ from the expected sha256, for example with another `tokenizers` release.
    """
    num_tokens, digest = WIKITEXT2_TOKENS[split]
    # The reader verifies text and vocabulary, so their hashes identify the result.
    key = hashlib.sha256("".join((WIKITEXT2_SHA256[split], *GPT2_BPE_SHA256.values())).encode()).hexdigest()[:16]
    path = cache_folder() / "tokens" / f"wikitext-2-{split}-{key}.npy"
    kept = _read(path)
    if kept is not None and _digest(kept) == digest:
        return kept
    tokens = encode(load_encoder(files), text.decode())
    if _digest(tokens) != digest:
        raise FormatError(
            f"WikiText-2 {split} tokens",
            got=f"{len(tokens):,} tokens with sha256 {_digest(tokens)}",
            expected=f"{num_tokens:,} with {digest}",
            hint="The tokenizers package encodes differently: install another release of it.",
        )
    _keep(path, tokens)
    return tokens


def _digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def _read(path: Path) -> np.ndarray | None:
    """Return the array of a cache file, None if missing or unreadable. The caller verifies the content."""
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


def _keep(path: Path, tokens: np.ndarray) -> None:
    try:
        with written_whole(path) as stream:
            np.save(stream, tokens, allow_pickle=False)
    except OSError:  # A read-only home only means that the next call encodes again.
        return
