"""Values and frames that cross a process boundary of the grader. Standard library only: the sandbox runs it too.

A value is written as JSON. What JSON has no word for is a one-key object::

    tuple {"t": [..]}   set {"s": [..]}   frozenset {"z": [..]}   dict {"d": [[key, value], ..]}
    bytes {"b": hex}    complex {"c": [re, im]}   float nan, inf {"f": "nan"}   int of 64 bits or more {"i": "0x.."}
    one of these types itself {"y": "int"}

Carried: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, nested to `MAX_DEPTH`, and
these types themselves (MBPP passes some as arguments).
An instance of a subclass arrives as its base value (an `IntEnum` as an int, a `defaultdict` as a dict), so that no
method of the sender's, `__eq__` least of all, ever runs at the receiver. Not carried: everything else (functions,
iterators, `range`, `deque`, objects), containers that contain themselves.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any, NoReturn

__all__ = [
    "MAX_DEPTH",
    "NotCarried",
    "TooDeep",
    "decode",
    "dumps",
    "encode",
    "loads",
    "read_exactly",
    "read_frame",
    "write_all",
    "write_frame",
]

MAX_DEPTH = 200
_HEADER = struct.Struct(">I")
_MAX_DIGITS = 25
_MAX_COLLISIONS = 1000
_TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}


class NotCarried(Exception):
    """A value that the encoding has no word for, or text that is not an encoded value."""


class TooDeep(NotCarried):
    """A value that is nested deeper than `MAX_DEPTH`, or contains itself."""


def encode(value: Any, depth: int = 0) -> Any:
    """The JSON-able form of `value`. Raises NotCarried."""
    if depth > MAX_DEPTH:
        raise TooDeep(f"a value nested deeper than {MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return value
    # Methods are taken from the base types, not from the value, whose class may have overridden them.
    if isinstance(value, int):
        exact = int.__pos__(value)
        return exact if -(1 << 63) <= exact < 1 << 63 else {"i": hex(exact)}
    if isinstance(value, float):
        number = float.__pos__(value)
        return number if float("-inf") < number < float("inf") else {"f": repr(number)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        exact_complex = complex.__pos__(value)
        return {"c": [encode(exact_complex.real), encode(exact_complex.imag)]}
    if isinstance(value, bytes):
        return {"b": bytes.hex(value)}
    below = depth + 1
    if isinstance(value, list):
        return [encode(item, below) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"t": [encode(item, below) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[encode(key, below), encode(item, below)] for key, item in dict.items(value)]}
    if isinstance(value, set):
        return {"s": [encode(item, below) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"z": [encode(item, below) for item in frozenset.__iter__(value)]}
    if any(value is t for t in _TYPES.values()):
        return {"y": value.__name__}
    raise NotCarried(f"a value of type {type(value).__name__}")


def decode(form: Any) -> Any:
    """The value whose `encode` is `form`, made of exact builtins only. Raises NotCarried."""
    try:
        return _decode(form)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotCarried(f"a malformed value ({type(error).__name__})") from error


def _decode(form: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    below = depth + 1
    if isinstance(form, list):
        return [_decode(item, below) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, body),) = form.items()
    if tag == "t":
        return tuple(_decode(item, below) for item in body)
    if tag == "d":
        pairs = [(_decode(key, below), _decode(item, below)) for key, item in body]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    # In two steps, as Python makes a set from a literal of constants: the order in which a set lists its members
    # depends on how it was made, and a program should see the one that it would see in the test's own process.
    if tag in ("s", "z"):
        members = [_decode(item, below) for item in body]
        _check_hashes(members)
        return set(frozenset(members)) if tag == "s" else frozenset(set(members))
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float(body)
    if tag == "c":
        real, imag = body
        return complex(_decode(real, below), _decode(imag, below))
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "y" and isinstance(body, str) and body in _TYPES:
        return _TYPES[body]
    raise ValueError(f"unknown tag {tag!r}")


def _check_hashes(members: list[Any]) -> None:
    """Refuses members chosen to have equal hashes, of which a set or dict takes quadratic time to make."""
    if len(members) - len(set(map(hash, members))) > _MAX_COLLISIONS:
        raise ValueError("too many members of equal hash")


def _int(digits: str) -> int:
    # int() of a long run of digits takes quadratic time, and an honest encoder writes long integers in hexadecimal.
    if len(digits) > _MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dumps(form: Any) -> bytes:
    return json.dumps(form, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(text: bytes | bytearray) -> Any:
    """Parses what `dumps` wrote. Raises NotCarried, whatever an untrusted process wrote instead."""
    try:
        return json.loads(text, parse_int=_int, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise NotCarried(f"not an encoded value ({type(error).__name__})") from error


def write_frame(fd: int, form: Any) -> None:
    """Writes a length of 4 bytes, then the JSON text. Blocks until all is written."""
    text = dumps(form)
    write_all(fd, _HEADER.pack(len(text)) + text)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of it. Blocks until it is done."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int, limit: int | None = None) -> Any:
    """Reads one frame; None at the end of the stream. Raises NotCarried for a frame of more than `limit` bytes."""
    header = read_exactly(fd, _HEADER.size)
    if header is None:
        return None
    (size,) = _HEADER.unpack(header)
    if limit is not None and size > limit:
        raise NotCarried(f"a value of more than {limit} bytes")
    text = read_exactly(fd, size)
    return None if text is None else loads(text)


def read_exactly(fd: int, size: int) -> bytearray | None:
    """So many bytes; None if the stream ends before. They are held once, whatever their number."""
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return data
