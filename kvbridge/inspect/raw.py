"""`--raw FILE`: one tensor declared in numbers, audited without allocating anything.

    {"storage_bytes", "offset_bytes", "shape", "stride_bytes", "dtype", "record", "page_rows"}
       -> show   the page it holds, how far it reaches into its storage, what contradicts itself
       -> check  the same findings, slots and lengths, and each consumer's verdict

JSON of show: {"schema_version", "ok", "findings", "layout", "needed_bytes", "storage_bytes"}.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvbridge.inspect.command import Exit, UsageError
from kvbridge.inspect.reading import read_object
from kvbridge.inspect.reporting import Limit, report, source_file
from kvbridge.inspect.terminal import Terminal, emit, printable
from kvbridge.manifest import SCHEMA_VERSION
from kvbridge.raw import RawAudit, RawTensor, audit_raw, validate_raw
from kvbridge.rule import Severity
from kvbridge.rules import Finding, failing

if TYPE_CHECKING:
    import torch


def _audit(arguments: Namespace) -> tuple[RawTensor, RawAudit]:
    given = [
        name
        for name, value in (
            ("SOURCE", arguments.source),
            ("--engine", arguments.engine),
            ("--engine-version", arguments.engine_version),
            ("engine options", arguments.given_options),
            ("--memory", arguments.memory),
        )
        if value
    ]
    if given:
        raise UsageError(f"--raw: got {', '.join(given)} beside it, expected a declared tensor alone")
    raw = validate_raw(read_object(arguments.raw, field="--raw"))
    return raw, audit_raw(raw)


def show_raw(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs `show --raw`."""
    raw, audit = _audit(arguments)
    failed = bool(failing(audit.findings, Severity.ERROR))
    if arguments.format in ("sarif", "github"):
        return report(audit.findings, (), arguments, terminal, limit=Limit(), file=source_file(arguments))
    if arguments.format == "json":
        document = {
            "schema_version": SCHEMA_VERSION,
            "ok": not failed,
            "findings": [entry.document() for entry in audit.findings],
            "layout": _layout(audit),
            "needed_bytes": _needed_bytes(raw, audit),
            "storage_bytes": raw.storage_bytes,
        }
        emit(json.dumps(document, indent=2, sort_keys=True) + "\n")
        return Exit.FINDINGS if failed else Exit.CLEAN
    emit("".join(_table(raw, audit, terminal)))
    return report(audit.findings, (), arguments, terminal, limit=Limit(), file=None)


def check_raw(arguments: Namespace, terminal: Terminal, *, consumers: Sequence[str], limit: Limit) -> Exit:
    """Runs `check --raw`."""
    from kvbridge.consumers import PoolFit, fits

    raw, audit = _audit(arguments)
    if limit.waste_percent is not None:
        raise UsageError(
            f"--fail-on: got waste={limit.waste_percent}% beside --raw, expected error, warning or note: a declared "
            "tensor does not tell padding from other layers' bytes"
        )
    found: list[Finding] = list(audit.findings)
    verdicts: list[PoolFit] = []
    if audit.layout is not None:
        pages = audit.geometry.num_pages if audit.geometry is not None else None
        slots, lengths = _tables(raw)
        for consumer in consumers:
            fit = fits(
                audit.layout,
                consumer,
                pages=pages,
                slots=slots,
                lengths=lengths,
                offset_bytes=raw.offset_bytes,
                storage_bytes=raw.storage_bytes,
                heads=arguments.heads,
                slots_dtype=raw.slots_dtype or "any",
                pool=raw.pool,
            )
            verdicts.append(PoolFit(raw.pool, fit))
            found += fit.findings
    return report(found, verdicts, arguments, terminal, limit=limit, file=source_file(arguments))


def _tables(raw: RawTensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Declared slots and lengths as tensors, for the consumers' own rules; none where rows differ in width."""
    if raw.slots is None or len({len(row) for row in raw.slots}) != 1:
        return None, None
    import torch

    lengths = None if raw.lengths is None else torch.tensor(raw.lengths, dtype=torch.int64)
    return torch.tensor(raw.slots, dtype=torch.int64), lengths


def _layout(audit: RawAudit) -> dict[str, object] | None:
    layout = audit.layout
    if layout is None:
        return None
    return {
        "record": layout.record,
        "plane": layout.plane,
        "kind": layout.kind.value,
        "page_rows": layout.page_rows,
        "payload_bytes": layout.payload_bytes,
        "page_bytes": layout.page_bytes,
        "page_stride_bytes": layout.page_stride_bytes,
        "padding": {"policy": layout.padding.policy.value, "alignment": layout.padding.alignment},
        "num_pages": None if audit.geometry is None else audit.geometry.num_pages,
        "fingerprint": layout.fingerprint,
    }


def _needed_bytes(raw: RawTensor, audit: RawAudit) -> int | None:
    """Bytes of the storage up to the last payload byte."""
    if audit.layout is None or audit.geometry is None:
        return None
    return raw.offset_bytes + audit.layout.span_bytes(audit.geometry.num_pages)


def _table(raw: RawTensor, audit: RawAudit, terminal: Terminal) -> Iterator[str]:
    rows: list[tuple[str, str]] = [
        ("tensor", f"{raw.dtype} {list(raw.shape)}, strides {list(raw.stride_bytes)} bytes"),
        ("storage", f"{raw.storage_bytes:,} bytes, tensor at offset {raw.offset_bytes:,}"),
    ]
    layout, needed = audit.layout, _needed_bytes(raw, audit)
    if layout is not None:
        rows += [
            ("record", f"{layout.record}: {layout.record_format.title}"),
            ("page", f"{layout.page_rows:,} rows, payload {layout.payload_bytes:,}, page {layout.page_bytes:,} bytes"),
            ("stride", f"{layout.page_stride_bytes:,} bytes, policy {layout.padding.policy.value}"),
        ]
    if audit.geometry is not None:
        rows.append(("pages", f"{audit.geometry.num_pages:,}"))
    if needed is not None:
        rows.append(("reaches", f"byte {needed:,} of {raw.storage_bytes:,}, {raw.storage_bytes - needed:,} to spare"))
    for name, text in rows:
        yield f"{terminal.paint(name.ljust(8), 'bold')}  {printable(text)}\n"
    yield "\n"
