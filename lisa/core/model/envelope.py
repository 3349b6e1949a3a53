"""The envelope: the value of `body:<id>`, byte by byte.

    offset  size  content
    0       1     version, "1"
    1       8     send token: 8 random characters of A-Z a-z 0-9 - _, new for each send call
    9       1     mark: "-" accepted; "r" replaced an earlier message with the same id, "f" one in
                  flight, "b" one whose due time it took; "+", "R", "F" and "B" likewise, after at
                  least one group has settled the message
    10      1     kind of the body: "j" JSON, "s" text (UTF-8), "b" bytes
    11      4     length n of the headers, four lower-case hexadecimal digits
    15      n     headers: a JSON object of text to text; absent if there are none
    15+n    ..    the body

A process that does not know an envelope's version, or a body's kind, fails the message with that
reason: it is retried by its policy, because another process may be newer.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import functools
import math
import os
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import uuid_utils

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import WINDOW_HEADER, plain_text
from lisa.core.model.options import LARGEST_BODY_BYTES

VERSION = b"1"
HEAD_BYTES = 15
MAX_HEADER_BYTES = 0xFFFF

# In byte order; no id begins with a dash, which a command line would read as an option.
_SORTED_ALPHABET = string.digits + string.ascii_uppercase + "_" + string.ascii_lowercase + "~"
_PAIRS = [a + b for a in _SORTED_ALPHABET for b in _SORTED_ALPHABET]
_BASE64 = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
_TO_SORTED = bytes.maketrans(_BASE64.encode(), _SORTED_ALPHABET.encode())
_FROM_SORTED = bytes.maketrans(_SORTED_ALPHABET.encode(), _BASE64.encode())
_OWN_ID_CHARACTERS = 16  # 96 bits: 48 of time, 42 of a counter, 6 fixed ones
_GENERATED = re.compile(r"[0-9A-Z_a-z~]{22}\Z")
_TO_URLSAFE = bytes.maketrans(b"+/", b"-_")
_KINDS = frozenset(b"jsb")
_COLLECTIONS = (list, tuple, set, frozenset)
_WINDOW_FIRST = b'{"lisa-window":'
_WINDOW_END = HEAD_BYTES + len(_WINDOW_FIRST)
_WITHOUT_HEADERS = {b"j0000": "j", b"s0000": "s", b"b0000": "b"}


class UnknownFormat(InvalidMessage):
    """An envelope or body in a form that this build does not know; a newer one may know it."""


class Envelope(NamedTuple):
    """One decoded envelope; `body` is still encoded according to `kind`."""

    token: str
    mark: str
    kind: str
    headers: dict[str, str]
    body: bytes


def new_id() -> str:
    """A UUIDv7 in 22 characters that sort in order of creation."""
    encoded = binascii.b2a_base64(uuid_utils.uuid7().bytes, newline=False)
    return encoded[:22].translate(_TO_SORTED).decode("ascii")


def new_ids(count: int) -> list[str]:
    """Create up to 4096 ids, in order; several times faster than one by one.

    All ids derive from one UUIDv7: twelve of its random bits are replaced by the index in the list.
    Its timestamp and counter, which order ids of different calls, are unchanged.
    """
    pattern = new_id()
    # A pair of characters is twelve bits; the last holds eight random ones and the padding.
    stem, end = pattern[:18], pattern[20:]
    return [f"{stem}{pair}{end}" for pair in _PAIRS[:count]]


def new_own_id() -> str:
    """The generated part of the id of a message with a key: a new id's time and counter."""
    return new_id()[:_OWN_ID_CHARACTERS]


def id_time_ms(message_id: str) -> int | None:
    """Creation time of a generated id in epoch milliseconds; None for a custom id."""
    if not _GENERATED.match(message_id):
        return None
    raw = binascii.a2b_base64(message_id.encode("ascii").translate(_FROM_SORTED) + b"==")
    is_uuid7 = raw[6] >> 4 == 7 and raw[8] >> 6 == 2
    return int.from_bytes(raw[:6]) if is_uuid7 else None


def new_token() -> str:
    """A new send token."""
    # Equivalent to secrets.token_urlsafe(6) in half the time; every send creates a token.
    return binascii.b2a_base64(os.urandom(6), newline=False).translate(_TO_URLSAFE).decode("ascii")


_PLAIN: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def _encode_hook(value: object, mode: str = "json") -> object:
    if not isinstance(value, bool):
        for kind, plain in _PLAIN:  # a subclass, such as Markup or numpy.float64
            if isinstance(value, kind):
                return plain(value)
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode=mode)
    if value is None or isinstance(value, (bool, tuple, frozenset)):  # valid, except as keys
        raise TypeError(f"the key {value!r} is not text; quote it")
    raise TypeError(f"{type(value).__name__} has no JSON form")


_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)
# With an order, msgspec refuses keys that are not text; models make them text in mode "json".
_text_keys_only = msgspec.json.Encoder(
    enc_hook=functools.partial(_encode_hook, mode="python"), order="deterministic"
)
_decoder = msgspec.json.Decoder()
_header_decoder = msgspec.json.Decoder(dict[str, str])


def encode_body(body: object) -> tuple[bytes, bytes]:
    """Kind and bytes of a body: bytes and str unchanged, anything else as JSON.

    JSON accepts msgspec structs, dataclasses and pydantic models. Raises InvalidMessage for other
    types, and for NaN and infinities.
    """
    if type(body) is not dict:  # fast path: most bodies are dicts
        if isinstance(body, (bytes, bytearray, memoryview)):
            return b"b", bytes(body)
        if isinstance(body, str):
            try:
                return b"s", body.encode()
            except UnicodeEncodeError as error:
                raise InvalidMessage(f"the body cannot be written as UTF-8: {error}") from None
    try:
        encoded = _encoder.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessage(f"the body cannot be written as JSON: {error}") from None
    # msgspec writes NaN as null, so only a body with a null needs the slow check.
    if b"null" in encoded and _has_nan(body):
        raise InvalidMessage("the body holds NaN or an infinity, which JSON cannot write")
    if _may_lose_keys(body, (body,) if type(body) is dict else (), encoded):
        _check_keys(body, "")
    return b"j", encoded


def _has_nan(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping) and any(map(_has_nan, value)):
        return True
    return any(_has_nan(part) for _, part in _parts(value))


def _may_lose_keys(value: object, dicts: Sequence[Any], encoded: bytes) -> bool:
    """Whether keys of a mapping may have become one in JSON, as 1 and "1" do.

    Each send pays for this check. It compares no keys, but reports any that is not text.

    dicts: the bodies in `value` that are dicts; without another mapping only their keys count.
    """
    try:
        if encoded.count(b"{") > len(dicts):
            _text_keys_only.encode(value)
        else:
            for body in dicts:
                "".join(body)  # the fastest check that all keys are texts
    except (TypeError, ValueError, OverflowError):  # the latter two: values of models
        return True
    return False


def _check_keys(value: object, path: str) -> None:
    """Raise InvalidMessage if two keys of a mapping have the same text in JSON, as 1 and "1"."""
    if isinstance(value, Mapping):
        seen: dict[str, object] = {}
        for key in value:
            text = key if type(key) is str else _key_text(key)
            if text in seen:
                raise InvalidMessage(
                    f"the body has two keys {f'{path}.{text}'.lstrip('.')!r}, {seen[text]!r} and "
                    f"{key!r}, of which JSON keeps one; remove one"
                )
            seen[text] = key
    for name, part in _parts(value):
        if not isinstance(part, (str, int, float, bytes)):
            _check_keys(part, f"{path}{name}")


def _key_text(key: object) -> str:
    """The text of a key that is not text, as JSON has it."""
    return str(next(iter(_decoder.decode(_encoder.encode({key: 0})))))


def _parts(value: object) -> Iterable[tuple[str, object]]:
    """The values inside a value, each with its step in a path."""
    if isinstance(value, Mapping):
        return [(f".{name}", part) for name, part in value.items()]
    if isinstance(value, _COLLECTIONS):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, msgspec.Struct):
        return _parts(msgspec.structs.asdict(value))
    if isinstance(value, enum.Enum):
        return [("", value.value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
    else:
        fields = getattr(type(value), "__attrs_attrs__", ())
    if fields:
        return _parts({field.name: getattr(value, field.name, None) for field in fields})
    dump = getattr(value, "model_dump", None)
    return _parts(dump()) if callable(dump) else ()


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object with these keys and values. Raises InvalidMessage if a key occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidMessage(f"the key {repeated!r} occurs twice")
    return made


def decode_body(kind: str, body: bytes) -> Any:
    """The body as it was sent: JSON values, str or bytes. Raises InvalidMessage."""
    if kind == "b":
        return body
    try:
        return body.decode() if kind == "s" else _decoder.decode(body)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(f"the body cannot be decoded: {error}") from None


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of the headers. Raises InvalidMessage unless names and values are text."""
    given = headers or {}
    if not isinstance(given, Mapping):
        raise InvalidMessage(f"headers are a mapping of text to text, not {headers!r}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(f"headers are text to text; {name!r}: {value!r} is not")
    return {plain_text(name): plain_text(value) for name, value in given.items()}


def encode_headers(headers: Mapping[str, str] | None) -> bytes:
    """Length and JSON of the headers, in the form that precedes the body. Raises InvalidMessage."""
    if not headers:
        return b"0000"
    headers = checked_headers(headers)
    if WINDOW_HEADER in headers:
        headers = {WINDOW_HEADER: headers[WINDOW_HEADER], **headers}
    try:
        encoded = _encoder.encode(headers)
    except (ValueError, UnicodeError) as error:
        raise InvalidMessage(f"the headers cannot be written as JSON: {error}") from None
    if len(encoded) > MAX_HEADER_BYTES:
        raise InvalidMessage(
            f"the headers take {len(encoded)} bytes; at most {MAX_HEADER_BYTES} are allowed"
        )
    return b"%04x" % len(encoded) + encoded


def encode_head(token: str) -> bytes:
    """The part of a new message's envelope that precedes the kind."""
    return b"1" + token.encode() + b"-"


def encode_tail(body: object, headers: bytes) -> bytes:
    """The envelope after its head: kind, encoded headers, body. Raises InvalidMessage."""
    kind, encoded = encode_body(body)
    if len(encoded) > LARGEST_BODY_BYTES:
        raise InvalidMessage(
            f"the body has {len(encoded)} bytes; no topic takes more than {LARGEST_BODY_BYTES}"
        )
    return kind + headers + encoded


_ALIKE: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    bytes: (b"b", bytes),
    str: (b"s", str.encode),
    dict: (b"j", _encoder.encode),
}


def encode_tails(bodies: Sequence[object], headers: bytes) -> list[bytes]:
    """`encode_tail` for many bodies; three times faster if all are bytes, all str or all dict."""
    kinds = set(map(type, bodies))
    kind, encode = _ALIKE.get(kinds.pop(), (b"", None)) if len(kinds) == 1 else (b"", None)
    if encode is not None:
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            encoded = list(map(encode, bodies))
            whole = b"".join(encoded) if kind == b"j" else b""
            is_sure = not whole or not (b"null" in whole or _may_lose_keys(bodies, bodies, whole))
            if max(map(len, encoded)) <= LARGEST_BODY_BYTES and is_sure:
                start = kind + headers
                return [start + part for part in encoded]
    # Encode one by one to find the body that is refused, or that may contain NaN or lose a key.
    return [encode_tail(body, headers) for body in bodies]


def encode_envelope(token: str, body: object, headers: Mapping[str, str] | None = None) -> bytes:
    """The whole envelope of a new message. Raises InvalidMessage."""
    return encode_head(token) + encode_tail(body, encode_headers(headers))


def decode_envelope(data: bytes) -> Envelope:
    """Decode an envelope. Raises InvalidMessage with the reason; UnknownFormat of a newer build."""
    if data[:1] != VERSION:
        raise UnknownFormat(f"unknown envelope version {data[:1]!r}; this build reads version 1")
    if len(data) < HEAD_BYTES:
        raise InvalidMessage("the envelope's head is cut short")
    if data[10] not in _KINDS:
        raise UnknownFormat(f"unknown kind of body {data[10:11]!r}; this build reads j, s and b")
    try:
        size = int(data[11:HEAD_BYTES], 16)
        end = HEAD_BYTES + size
        if end > len(data):
            raise InvalidMessage("the envelope's headers are cut short")
        headers = _header_decoder.decode(data[HEAD_BYTES:end]) if size else {}
        token, mark, kind = data[1:9].decode(), chr(data[9]), chr(data[10])
    except (ValueError, msgspec.DecodeError) as error:
        raise InvalidMessage(f"the envelope's head cannot be read: {error}") from None
    return Envelope(token, mark, kind, headers, data[end:])


def join_envelope(envelope: Envelope) -> bytes:
    """The reverse of `decode_envelope`. Raises InvalidMessage for invalid parts."""
    token, mark = envelope.token.encode(), envelope.mark.encode()
    if len(token) != 8 or len(mark) != 1 or envelope.kind not in ("j", "s", "b"):
        raise InvalidMessage(f"token, mark or kind is not valid: {envelope[:3]!r}")
    headers = encode_headers(envelope.headers)
    return b"".join((VERSION, token, mark, envelope.kind.encode(), headers, envelope.body))


def decode_content(data: bytes) -> tuple[Any, dict[str, str]]:
    """Only body and headers; several times faster for a message without headers.

    Raises InvalidMessage with the reason.
    """
    head = data[:HEAD_BYTES]
    kind = _WITHOUT_HEADERS.get(head[10:])
    if kind is not None and head[0] == VERSION[0] and head.isascii():
        return decode_body(kind, data[HEAD_BYTES:]), {}
    envelope = decode_envelope(data)
    return decode_body(envelope.kind, envelope.body), envelope.headers


def headers_of(data: bytes) -> dict[str, str]:
    """The headers of an envelope, whose body may be cut off; none if they cannot be read."""
    if data[11:HEAD_BYTES] == b"0000":
        return {}
    try:
        return _header_decoder.decode(data[HEAD_BYTES : HEAD_BYTES + int(data[11:HEAD_BYTES], 16)])
    except (ValueError, msgspec.DecodeError):
        return {}


def has_window(data: bytes | None) -> bool:
    """Whether the headers of an envelope name a window of the message; see `core.model.windows`."""
    return data is not None and data[HEAD_BYTES:_WINDOW_END] == _WINDOW_FIRST


def token_of(data: bytes) -> str:
    """The send token of an envelope, which may be damaged."""
    return data[1:9].decode("utf-8", "replace")


def fence_of(data: bytes) -> str:
    """Token and mark of an envelope, which may be damaged; the tombstone stores them."""
    return data[1:10].decode("utf-8", "replace")
