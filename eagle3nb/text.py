"""Tokens and other people's texts, written so that nothing in them hides or changes how a page reads."""

import unicodedata
from typing import Any


def visible(text: str) -> str:
    """Text with control, format and direction characters made visible, so that it cannot change how a page reads."""
    hidden = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}  # Unicode categories
    return "".join(
        f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in hidden and char != "\n" else char for char in text
    )


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token; bytes that are no whole character of their own are written as ``\\xf0``."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    piece, byte_of = str(tokenizer.convert_ids_to_tokens(token)), {char: n for n, char in bytes_to_unicode().items()}
    if piece.startswith("<0x"):  # the byte fallback of SentencePiece
        data = bytes.fromhex(piece[3:5])
    elif all(char in byte_of for char in piece):  # byte-level BPE
        data = bytes(byte_of[char] for char in piece)
    else:
        return text
    return data.decode(errors="backslashreplace")


def quoted(tokenizer: Any, token: int) -> str:
    """The text of one token in quotes, as Python would write it; bytes of half a character as ``\\xf0``."""
    text = token_text(tokenizer, token)
    return f"'{text}'" if "\ufffd" in tokenizer.decode([token]) else repr(text)
