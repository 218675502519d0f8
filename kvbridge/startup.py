"""The start-up audit that engine plugins run in every worker: one manifest written, one audit, one line in the log.

    KVBRIDGE_MANIFEST_DIR=DIR        writes DIR/sglang-target-pp0-tp1.json: the manifest of that worker's live pools
    KVBRIDGE_AUDIT=off|warn|error    audits it; error stops the engine before it serves, with the findings
    neither set                      the plugin does nothing

A worker goes on when the plugin itself fails, or meets pools that nobody described: only findings, and only under
`error`, stop an engine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvbridge.documents import DeclaredManifest
from kvbridge.engine import EngineError
from kvbridge.errors import KVBridgeError, LayoutError
from kvbridge.manifest import SCHEMA_VERSION, Rank
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding_of

DIRECTORY_VARIABLE = "KVBRIDGE_MANIFEST_DIR"
AUDIT_VARIABLE = "KVBRIDGE_AUDIT"

_LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}


class AuditMode(StrEnum):
    """What an audit's errors do."""

    OFF = "off"
    WARN = "warn"
    ERROR = "error"


class StartupAuditError(KVBridgeError):
    """A start-up audit under `error` found errors: the engine must not serve from these pools."""

    def __init__(self, place: str, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        lines = [f"  {describe(entry)}" for entry in self.findings]
        super().__init__("\n".join([f"kvbridge: {place}: {len(lines)} errors in the KV-cache layout", *lines]))


@dataclass(frozen=True, slots=True)
class Startup:
    """What the environment asks of a plugin.

    Attributes:
        mode: Audit mode.
        directory: Folder for manifests; None writes none.
        active: Whether anything was asked for.
    """

    mode: AuditMode
    directory: Path | None
    active: bool

    @classmethod
    def from_environment(cls, log: logging.Logger, environment: Mapping[str, str] | None = None) -> Startup:
        """Reads the variables; a value that is none of the modes is reported and taken as `warn`."""
        variables = os.environ if environment is None else environment
        text = variables.get(AUDIT_VARIABLE, "").strip().lower()
        folder = variables.get(DIRECTORY_VARIABLE, "").strip()
        mode = {mode.value: mode for mode in AuditMode}.get(text, AuditMode.WARN)
        if text and text != mode:
            log.error("kvbridge: %s: got %r, expected off, warn or error; taken as warn", AUDIT_VARIABLE, text)
        active = bool(folder) or (bool(text) and mode is not AuditMode.OFF)
        return cls(mode, Path(folder) if folder else None, active)

    def check(
        self,
        capture: Callable[[], tuple[DeclaredManifest, tuple[Finding, ...]]],
        *,
        worker: str,
        log: logging.Logger,
    ) -> None:
        """Captures, writes, audits and logs.

        Args:
            capture: Gives the live manifest and the findings that only live tensors can show.
            worker: Which worker this is, for the log and as the manifest's file name.
            log: The plugin's logger.

        Raises:
            StartupAuditError: The mode is `error` and there are findings of that severity. Nothing else is raised.
        """
        manifest: DeclaredManifest | None = None
        try:
            try:
                manifest, findings = capture()
            except LayoutError as fault:  # the pools contradict themselves before a manifest can be made of them
                findings = (finding_of(fault),)
            written = None if manifest is None else self._write(manifest, worker)
            if manifest is not None and self.mode is not AuditMode.OFF:
                from kvbridge.audit import audit_declared

                findings = (*findings, *audit_declared(manifest))
            self._report(manifest, findings, written, worker, log)
        except EngineError as reason:
            log.warning("kvbridge: %s: not audited: %s", worker, reason)
            return
        except Exception:
            log.exception("kvbridge: %s: the plugin failed by its own fault; the engine goes on unaudited", worker)
            return
        errors = [entry for entry in findings if entry.severity is Severity.ERROR]
        if errors and self.mode is AuditMode.ERROR:
            raise StartupAuditError(worker, errors)

    def _write(self, manifest: DeclaredManifest, worker: str) -> Path | None:
        if self.directory is None:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{worker}.json"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(dump_declared(manifest))
        partial.replace(path)
        return path

    def _report(
        self,
        manifest: DeclaredManifest | None,
        findings: tuple[Finding, ...],
        written: Path | None,
        worker: str,
        log: logging.Logger,
    ) -> None:
        layers = sum(len(pool.layers) for pool in manifest.pools) if manifest else 0
        pools = len(manifest.pools) if manifest else 0
        where = f"; manifest {written}" if written else ""
        if self.mode is AuditMode.OFF:
            log.info("kvbridge: %s: %d pools, %d layer caches, audit off%s", worker, pools, layers, where)
            return
        counts = [f"{sum(e.severity is severity for e in findings)} {severity.value}s" for severity in Severity]
        log.info(
            "kvbridge: %s: audit (%s) ran: %d pools, %d layer caches, %s%s",
            worker,
            self.mode.value,
            pools,
            layers,
            ", ".join(counts),
            where,
        )
        for entry in findings:
            log.log(_LEVELS[entry.severity], "kvbridge: %s: %s", worker, describe(entry))


def worker_name(engine: str, rank: Rank, *, role: str = "", replica: int | None = None) -> str:
    """Name of one worker, unique among the workers that may write into one folder.

    Args:
        engine: Engine name.
        rank: Which worker.
        role: Target, draft ...; left out when empty.
        replica: Data-parallel replica, where there are several.
    """
    parts = [engine, role, f"dp{replica}" if replica is not None else "", f"pp{rank.pipeline_parallel_rank}"]
    if rank.decode_context_parallel_size > 1:
        parts.append(f"dcp{rank.decode_context_parallel_rank}")
    return "-".join(part for part in (*parts, f"tp{rank.tensor_parallel_rank}") if part)


def describe(entry: Finding) -> str:
    """One line: severity, code, pool, field, got, expected, consequence."""
    pool = f"pool {entry.pool}: " if entry.pool else ""
    return f"{entry.severity.value} {entry.code}: {pool}{entry.message}; {entry.consequence}"


def dump_declared(manifest: DeclaredManifest) -> str:
    """JSON text of one manifest as stated, contradictions included: sorted keys, a final newline."""
    document = {"schema_version": SCHEMA_VERSION, "manifests": [manifest.model_dump(mode="json", exclude_none=True)]}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
