"""What kvbridge calls SGLang's pools, layers and storages, and the bank that collects them.

    layers.3.c4            layer 3's C4 rows, alone in a storage of the same name
    layers.3.c4_indexer    its indexer keys;  layers.3.c4_state, layers.3.c4_indexer_state: its compressors' rings

SGLang has no names for its buffers: a pool holds a list of tensors, one per layer, each a storage of its own.
Groups say who shares a page table: `full` (page of the token's slot), `swa` (page of its sliding-window slot),
`request` (ring of its request), `hisparse` (slots on the device that HiSparse maps to).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbridge.engines.sglang.formats import PageFormat
from kvbridge.layout import Padding, PaddingPolicy, PoolKind
from kvbridge.manifest import LayerPlacement, Pool, Storage

FULL, SWA, REQUEST, HISPARSE = "full", "swa", "request", "hisparse"


def layer_name(layer: int, cache: str) -> str:
    """Name of one layer's cache, and of the storage it lies in."""
    return f"layers.{layer}.{cache}"


@dataclass(slots=True)
class Bank:
    """Pools and storages, in the order SGLang allocates them."""

    pools: list[Pool] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plan(
        self,
        pool: str,
        fmt: PageFormat,
        *,
        cache: str,
        layers: Sequence[int],
        group: str,
        page_rows: int,
        num_pages: int | None,
        extra_rows: int = 0,
        plane: str | None = None,
        **fields: Any,
    ) -> None:
        """Adds a planned pool: every layer starts at byte 0 of a storage of its own.

        Args:
            pool: What it holds: swa, c4, indexer ...
            fmt: Page format.
            cache: Name of the cache inside a layer.
            layers: Layers that own one.
            group: Who shares its page table.
            page_rows: Rows of a page.
            num_pages: Pages; None leaves them open.
            extra_rows: Rows behind the last page that no page covers.
            plane: Plane, for records with several.
            **fields: Further fields of the layout.
        """
        if not layers:
            return
        names = [layer_name(layer, cache) for layer in layers]
        entry = Pool.for_rows(
            fmt.record,
            page_rows=page_rows,
            policy=fmt.policy,
            alignment=fmt.alignment,
            dtype=fmt.dtype,
            pool=pool,
            plane=plane,
            num_pages=num_pages,
            group=group,
            layers=tuple(LayerPlacement.built(name=name, offset_bytes=0, storage=name) for name in names),
            **fields,
        )
        self.pools.append(entry)
        size = None if num_pages is None else num_pages * entry.page_stride_bytes + extra_rows * entry.row_bytes
        self.storages.extend(Storage.built(id=name, storage_bytes=size) for name in names)

    def anchor(self, *, page_rows: int, num_pages: int | None) -> None:
        """Adds the token slots of the V4 family: SGLang hands them out, but no tensor holds a row for each."""
        self.pools.append(
            Pool.built(
                pool=FULL,
                kind=PoolKind.INDEX_ONLY,
                page_rows=page_rows,
                payload_bytes=0,
                page_bytes=0,
                page_stride_bytes=0,
                padding=Padding.built(policy=PaddingPolicy.EXACT),
                num_pages=num_pages,
                reserved_pages=1,
                group=FULL,
            )
        )
