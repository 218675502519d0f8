"""Does a page fit a kernel? Findings and a verdict for each (layout, consumer).

    tight V4 page, 64 rows, stride 37376
      kvbridge, b12x, flashmla-sm90     in_place
      flashmla-sm100                    needs_stride 37440      stride % 576 = 512
      sglang-hisparse                   silent_misread          constants for 37440, checks nothing
    V4.1 page, split, for flashmla-sm100: silent_misread        528 bytes a row either way

Verdicts, best first: in_place, needs_stride (same page bytes, another distance between pages), needs_repack (rows must
be copied into other pages), unsupported (the consumer refuses), silent_misread (it does not). The demands are data in
`consumer_data.py`; what is compared with what is in `fit_pages.py` and `fit_strides.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.consumer_data import CONSUMERS
from kvbridge.contract import Consumer, HeadsError, IndexUnit, TopkError
from kvbridge.errors import KVBridgeError
from kvbridge.fit_pages import head_obstacles, page_rows_obstacles, record_obstacles, topk_obstacles
from kvbridge.fit_strides import address_obstacles, storage_row_span, stride_obstacles
from kvbridge.layout import DeclaredLayout, PageLayout, violations
from kvbridge.obstacles import Obstacle, Question, Verdict
from kvbridge.placement import pool_labels, pools_of
from kvbridge.rules import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from kvbridge.placement import AnyManifest, AnyPool

__all__ = [
    "CONSUMERS",
    "Consumer",
    "Fit",
    "IndexUnit",
    "PoolFit",
    "Verdict",
    "consumer_names",
    "fit_manifest",
    "fits",
    "get_consumer",
    "storage_row_span",
]


@dataclass(frozen=True, slots=True)
class Fit:
    """What a consumer makes of a layout.

    Attributes:
        consumer: Consumer name.
        verdict: The worst of all checks.
        findings: What stands in the way, and notes.
        needs_stride_bytes: Stride that would do; None where the stride is not what is wrong.
        padded_heads: Heads a call must be padded to; None where no head count was given or none fits.
        padded_topk: Width a row of slots must be padded to; None likewise.
    """

    consumer: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    needs_stride_bytes: int | None = None
    padded_heads: int | None = None
    padded_topk: int | None = None

    def document(self, pool: str) -> dict[str, str | int | None]:
        """JSON form of the verdict on one pool."""
        return {
            "pool": pool,
            "consumer": self.consumer,
            "verdict": self.verdict.value,
            "needs_stride_bytes": self.needs_stride_bytes,
        }


@dataclass(frozen=True, slots=True)
class PoolFit:
    """The fit of one pool of a manifest.

    Attributes:
        pool: Pool label.
        fit: The worst layer's.
    """

    pool: str
    fit: Fit

    def document(self) -> dict[str, str | int | None]:
        """JSON form of the verdict."""
        return self.fit.document(self.pool)


def consumer_names() -> tuple[str, ...]:
    """Names of the known consumers, kvbridge first."""
    return tuple(CONSUMERS)


def get_consumer(name: str) -> Consumer:
    """Looks a consumer up.

    Raises:
        KVBridgeError: No such consumer.
    """
    consumer = CONSUMERS.get(name)
    if consumer is None:
        raise KVBridgeError(f"consumer: got {name!r}, expected one of {list(CONSUMERS)}")
    return consumer


def fits(
    layout: PageLayout,
    consumer: Consumer | str,
    *,
    pages: int | None = None,
    slots: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    offset_bytes: int = 0,
    storage_bytes: int | None = None,
    heads: int | None = None,
    topk: int | None = None,
    index_unit: IndexUnit | None = None,
    slots_dtype: str | None = None,
    pool: str = "",
) -> Fit:
    """Compares a layout, and what else is known of a call, with a consumer's demands.

    Args:
        layout: A consistent layout.
        consumer: Consumer or its name.
        pages: Pages of the pool; the layout's own count by default.
        slots: int32 / int64 `[queries, width]`, checked against the pool and the consumer's sentinel rule.
        lengths: int32 / int64 `[queries]`, live slots of each query.
        offset_bytes: First page's start, from the start of the storage.
        storage_bytes: Size of the storage, where it is known.
        heads: Query heads of the rank.
        topk: Width of a row of slots; that of `slots` by default.
        index_unit: What the caller's slots count; None for not stated.
        slots_dtype: Dtype of the program's slots where `slots` only stands for them, `any` where that is unknown; the
            tensor's own by default.
        pool: Pool label for findings.

    Returns:
        Findings and the verdict. Slots and lengths yield findings but do not change the verdict on the pool.

    Raises:
        KVBridgeError: No such consumer.
    """
    kernel = get_consumer(consumer) if isinstance(consumer, str) else consumer
    question = Question(
        layout=layout,
        consumer=kernel,
        pages=layout.num_pages if pages is None else pages,
        offset=offset_bytes,
        storage_bytes=storage_bytes,
        index_unit=index_unit,
        pool=pool,
    )
    obstacles = list(record_obstacles(question))
    if not obstacles:
        obstacles = [*page_rows_obstacles(question), *stride_obstacles(question), *address_obstacles(question)]
    if heads is not None:
        obstacles += head_obstacles(question, heads)
    width = int(slots.shape[-1]) if topk is None and slots is not None and slots.ndim else topk
    if width is not None:
        obstacles += topk_obstacles(question, width)
    findings = [obstacle.finding for obstacle in obstacles]
    if slots is not None:
        from kvbridge.slots import consumer_findings

        findings += consumer_findings(
            slots, lengths, layout=layout, consumer=kernel, pages=question.pages, dtype=slots_dtype, pool=pool
        )
    refused = {obstacle.finding.code for obstacle in obstacles if obstacle.verdict is Verdict.UNSUPPORTED}
    return Fit(
        consumer=kernel.name,
        verdict=_worst(obstacles),
        findings=tuple(findings),
        needs_stride_bytes=next((o.needs_stride_bytes for o in obstacles if o.needs_stride_bytes), None),
        padded_heads=None if heads is None or HeadsError.code in refused else kernel.padded_heads(heads),
        padded_topk=None if width is None or TopkError.code in refused else kernel.padded_topk(width),
    )


def _worst(obstacles: list[Obstacle]) -> Verdict:
    return max((obstacle.verdict for obstacle in obstacles), key=lambda known: known.rank, default=Verdict.IN_PLACE)


def fit_manifest(
    manifest: AnyManifest, consumers: Iterable[Consumer | str], *, heads: int | None = None
) -> Iterator[PoolFit]:
    """Compares every consistent pool of a manifest with each consumer, all its layers' offsets included.

    Args:
        manifest: Pools that contradict themselves are left out: `audit_declared` explains those.
        consumers: Consumers or their names.
        heads: Query heads of the rank, where known.

    Yields:
        One fit for each pool and consumer: the worst layer's.

    Raises:
        KVBridgeError: No such consumer.
    """
    kernels = [get_consumer(entry) if isinstance(entry, str) else entry for entry in consumers]
    sizes = {storage.id: storage.storage_bytes for storage in manifest.storages}
    for pool, label in zip(pools_of(manifest), pool_labels(manifest), strict=True):
        layout = consistent_layout(pool)
        if layout is None:
            continue
        places = {(layer.offset_bytes, sizes.get(layer.storage or pool.storage or "")) for layer in pool.layers}
        for consumer in kernels:
            every = [
                fits(layout, consumer, offset_bytes=offset, storage_bytes=size, heads=heads, pool=label)
                for offset, size in sorted(places, key=lambda place: place[0]) or [(0, None)]
            ]
            yield PoolFit(label, max(every, key=lambda fit: fit.verdict.rank))


def consistent_layout(pool: AnyPool) -> PageLayout | None:
    """The layout of a pool, or None where it contradicts itself."""
    if next(violations(pool), None) is not None:
        return None
    fields = {name: getattr(pool, name) for name in DeclaredLayout.model_fields}
    return PageLayout(**fields | {"record": pool.record or ""})
