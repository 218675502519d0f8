"""Private cache folders for built code: content-addressed, published atomically, verified before use.

    $KVBRIDGE_CACHE_DIR/<kind>/     (else $XDG_CACHE_HOME/kvbridge/<kind>, else ~/.cache/kvbridge/<kind>), mode 0700
        <key><suffix>               the artefact; key = digest of everything that decides its bytes
        <key>.json                  its SHA-256 and notes; written after the artefact
        <key>.lock                  held while building

Whoever can write there can have code run, so the folder must belong to the user. Two processes that need the same
artefact wait for one build; bytes that do not match the recorded digest are built again, never loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.kernels.errors import KernelError


class CacheFolderError(KernelError):
    """The folder belongs to somebody else, or is a link."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """A verified artefact.

    Attributes:
        file: Where it lies.
        content: Its bytes, whose digest was checked.
        note: What was noted when it was built.
    """

    file: Path
    content: bytes
    note: Mapping[str, Any]


def private_folder(kind: str) -> Path:
    """Finds or makes the private folder for one kind of artefact.

    Raises:
        CacheFolderError: It exists, but not as a folder of this user.
    """
    root = os.environ.get("KVBRIDGE_CACHE_DIR")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbridge"
    folder = base / kind
    base.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise CacheFolderError(
            f"cache folder {folder}: got owner {status.st_uid} and mode {stat.filemode(status.st_mode)}, expected a "
            f"folder of user {os.geteuid()}; set KVBRIDGE_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def digest(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def find(folder: Path, key: str, suffix: str) -> Artefact | None:
    """Loads an artefact whose bytes match the recorded digest; None where there is none, or it is corrupt."""
    file = folder / f"{key}{suffix}"
    try:
        note = json.loads((folder / f"{key}.json").read_text())
        content = file.read_bytes()
        if note["sha256"] == digest(content):
            return Artefact(file, content, note)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def publish(folder: Path, key: str, suffix: str, content: bytes, note: Mapping[str, Any]) -> Artefact:
    """Writes an artefact and its note, each by one atomic rename; the note last."""
    full = {**note, "sha256": digest(content)}
    file, record = folder / f"{key}{suffix}", folder / f"{key}.json"
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{key}.") as scratch:
        artefact, written = Path(scratch) / "artefact", Path(scratch) / "note"
        artefact.write_bytes(content)
        written.write_text(json.dumps(full, sort_keys=True))
        record.unlink(missing_ok=True)
        artefact.replace(file)
        written.replace(record)
    return Artefact(file, content, full)


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Holds the lock of one key against other processes."""
    descriptor = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
