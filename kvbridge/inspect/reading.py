"""Reads JSON that may hold anything: exact, bounded, and never with a crash.

    bytes -> UTF-8 -> JSON without duplicate keys, NaN or fractions of integers -> integers of at most 64 bits

Everything refused is a `ManifestError` that names the place: the command exits with 2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvbridge.errors import ManifestError

MAX_INTEGER = 2**63 - 1
"""Largest magnitude of an integer in a document; beyond it no address or size of a machine exists."""

MAX_DEPTH = 64
"""Deepest nesting of a document; a manifest needs 6."""

MAX_FILE_BYTES = 64 * 2**20
"""Largest document that is read."""


def read_bytes(source: str, *, field: str) -> bytes:
    """Reads a file, or stdin for `-`.

    Args:
        source: Path or `-`.
        field: What the file is, for messages.

    Raises:
        ManifestError: No such file, a folder, unreadable, or too large.
    """
    try:
        if source == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ManifestError(f"{field}: got {source!r} ({reason}), expected a readable JSON file") from error
    if len(content) > MAX_FILE_BYTES:
        raise ManifestError(f"{field}: got {source!r} of more than {MAX_FILE_BYTES} bytes, expected a smaller file")
    return content


def parse_json(content: bytes, *, field: str) -> object:
    """Parses JSON.

    Args:
        content: The bytes of a document.
        field: What the document is, for messages.

    Raises:
        ManifestError: Not UTF-8, not JSON, a duplicate key, a number that is no JSON number, or out of bounds.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{field}: got byte {content[error.start]:#04x} at position {error.start}, expected UTF-8 text"
        ) from error
    try:
        data = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_bounded_integer
        )
    except RecursionError:
        raise ManifestError(f"{field}: got JSON nested too deeply, expected at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ManifestError(f"{field}: got text that is not usable JSON ({error}), expected a JSON object") from error
    _check_depth(data, field)
    return data


def read_object(source: str, *, field: str) -> dict[str, object]:
    """Reads a file that must hold one JSON object.

    Raises:
        ManifestError: As `read_bytes` and `parse_json`, or the document is no object.
    """
    data = parse_json(read_bytes(source, field=field), field=f"{field} {source!r}")
    if not isinstance(data, dict):
        raise ManifestError(f"{field} {source!r}: got a JSON {type(data).__name__}, expected an object")
    return data


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} twice in one object")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _bounded_integer(digits: str) -> int:
    if len(digits) <= 20:
        value = int(digits)
        if -MAX_INTEGER <= value <= MAX_INTEGER:
            return value
    raise ValueError(f"integer {digits[:24]}{'...' if len(digits) > 24 else ''} is beyond 64 bits")


def _check_depth(data: object, field: str) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise ManifestError(f"{field}: got JSON nested too deeply, expected at most {MAX_DEPTH} levels")
