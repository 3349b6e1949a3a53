"""Shows users' text as it is: characters that would hide or reorder other text are escaped."""

from __future__ import annotations

import re

_HIDING = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
    # Joiners have a meaning only between characters of other scripts and within emoji.
    "|(?<![^\0-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\0-\x7f])"
)
"""Control characters except tab and line feed, those that set a direction, and invisible ones."""


def visible(text: str) -> str:
    """A text in which every such character is replaced by its escape, as in JSON."""
    return text if text.isascii() and text.isprintable() else _HIDING.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
