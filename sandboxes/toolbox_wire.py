"""What the toolbox writes and reads as JSON, without the module `json`, which takes a box longer to import than to run.

Runs inside the box, beside `toolbox`: standard library only, Python 3.8 and later.
"""

from __future__ import annotations

TYPE_CHECKING = False  # the module typing costs several milliseconds at each start
if TYPE_CHECKING:
    from typing import Any


class Context:
    """How the scanner reads, as `json.loads` does."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012 (it is only looked at)


try:
    from _json import encode_basestring_ascii, make_scanner

    scan: Any = make_scanner(Context)  # type: ignore[arg-type]
except ImportError:  # another Python than CPython
    import json

    encode_basestring_ascii = json.encoder.encode_basestring_ascii
    scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def decode(text: bytes) -> Any:
    """The object that `text` holds. Raises ValueError when it is none."""
    try:
        return scan(text.decode(), 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def encode(message: dict[str, Any]) -> bytes:
    """A flat object of words, numbers and truths."""
    pairs = [f"{encode_basestring_ascii(name)}: {word(value)}" for name, value in message.items()]
    return ("{" + ", ".join(pairs) + "}").encode()


def word(value: Any) -> str:
    """One value."""
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
