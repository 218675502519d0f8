"""Audit of manifests: every contradiction as a finding, none as an exception.

    manifest -> pools    each pool's own fields, and derived figures that do not follow from them
             -> layers   [offset .. offset + span) inside its storage, inside its slab       (placement.py)
             -> groups   layers of one group disjoint, else an error; groups over the same bytes a note
             -> storages each once; memory within its budget
             -> waste    tail padding above a limit                                          (waste.py)

Nothing is allocated and no page is enumerated, so a slab of terabytes is checked like one of kilobytes. Tensors that
were declared in numbers (`--raw`) are checked by `kvbridge.raw.audit_raw`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvbridge.documents import DeclaredManifest
from kvbridge.errors import KindError
from kvbridge.layout import PageLayout, PoolKind, violations
from kvbridge.manifest import Manifest
from kvbridge.placement import AnyManifest, AnyPool, layer_findings, pool_labels, pools_of, sharing_findings
from kvbridge.rule import Severity
from kvbridge.rules import Finding, finding, finding_of

__all__ = ["audit_declared", "audit_manifest", "audit_placement", "pool_labels"]


def audit_declared(manifest: DeclaredManifest) -> tuple[Finding, ...]:
    """Finds every contradiction of a manifest as stated. Raises on no input that is on schema.

    Args:
        manifest: A document's manifest, consistent or not.

    Returns:
        Findings in the order of the manifest: pools, then placement, then the whole.
    """
    findings: list[Finding] = []
    for pool, label in zip(manifest.pools, pool_labels(manifest), strict=True):
        faults = list(violations(pool))
        if not faults:
            faults = list(pool.derived_violations(PageLayout(**pool.layout_fields())))
        findings.extend(finding_of(fault, pool=label) for fault in faults)
    return (*findings, *audit_placement(manifest))


def audit_manifest(manifest: Manifest) -> tuple[Finding, ...]:
    """Audits a manifest whose pools are consistent by construction: placement, groups, storages, memory."""
    return audit_placement(manifest)


def audit_placement(manifest: AnyManifest) -> tuple[Finding, ...]:
    """Audits where the layers of a manifest lie.

    Args:
        manifest: Pools that contradict themselves are placed as far as their numbers allow.
    """
    findings = list(_storage_findings(manifest))
    for pool, label in zip(pools_of(manifest), pool_labels(manifest), strict=True):
        findings.extend(_pool_findings(pool, label))
        findings.extend(layer_findings(manifest, pool, label))
    findings.extend(sharing_findings(manifest))
    return tuple(findings)


def _storage_findings(manifest: AnyManifest) -> Iterator[Finding]:
    counts = Counter(storage.id for storage in manifest.storages)
    for name, count in counts.items():
        if count > 1:
            yield finding("storage-duplicate", "storages", got=f"{count} times {name!r}", expected="each id once")
    pools = pools_of(manifest)
    used = {layer.storage for pool in pools for layer in pool.layers} | {pool.storage for pool in pools}
    for name in counts:
        if name not in used:
            yield finding("storage-unowned", "storages", got=name, expected="a storage that some pool names")
    for place, storage in enumerate(manifest.storages):
        if storage.storage_bytes is not None and storage.storage_bytes < 0:
            field = f"storages[{place}].storage_bytes"
            yield finding("storage-size", field, got=storage.storage_bytes, expected="at least 0")
    yield from _rank_findings(manifest)
    yield from _memory_findings(manifest)


def _memory_findings(manifest: AnyManifest) -> Iterator[Finding]:
    """Use above the budget: a note as far as reserved pages explain it (SGLang adds them on top), an error beyond."""
    memory = manifest.memory
    if memory is None or memory.used_bytes <= memory.budget_bytes:
        return
    excess = memory.used_bytes - memory.budget_bytes
    reserved = sum(pool.reserved_pages * pool.page_stride_bytes * len(pool.layers) for pool in pools_of(manifest))
    yield finding(
        "memory-budget",
        "memory.used_bytes",
        got=memory.used_bytes,
        expected=f"at most {memory.budget_bytes}",
        detail=f"excess {excess}, of which reserved pages explain {min(excess, max(reserved, 0))}",
        severity=Severity.NOTE if excess <= reserved else Severity.ERROR,
    )


def _pool_findings(pool: AnyPool, label: str) -> Iterator[Finding]:
    if pool.kind is PoolKind.INDEX_ONLY:
        if pool.layers or pool.storage:
            error = KindError(
                "layers" if pool.layers else "storage",
                got=len(pool.layers) or pool.storage,
                expected="none",
                detail="kind index_only owns no bytes",
            )
            yield finding_of(error, pool=label)
        return
    if pool.num_pages is not None and 0 <= pool.num_pages <= pool.reserved_pages:
        yield finding(
            "pool-empty",
            "num_pages",
            got=pool.num_pages,
            expected=f"at least {pool.reserved_pages + 1}",
            detail=f"{pool.reserved_pages} reserved",
            pool=label,
        )
    for name, count in Counter(layer.name for layer in pool.layers).items():
        if count > 1:
            yield finding("layer-duplicate", "layers", got=f"{count} times {name!r}", expected="each once", pool=label)


def _rank_findings(manifest: AnyManifest) -> Iterator[Finding]:
    for axis in ("tensor_parallel", "pipeline_parallel", "decode_context_parallel"):
        rank, size = getattr(manifest.rank, f"{axis}_rank"), getattr(manifest.rank, f"{axis}_size")
        if not 0 <= rank < size:
            yield finding("worker-rank", f"rank.{axis}_rank", got=rank, expected=f"0 <= rank < {size} ({axis}_size)")
