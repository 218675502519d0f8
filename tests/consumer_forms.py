"""The same V4 pages in every form a pool can have, for engines' own readers and writers.

tight   [payload][payload]...              padded  [payload|tail]...
slab    [payload]..foreign..[payload]...   slab-offset  ..foreign..[payload]..foreign..

Whatever is no payload is NaN (0x7F), so that a reader that strays cannot go unseen. Runs in the engines' interpreters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvbridge.layout import PageLayout

SLAB_BYTES = 163 * 576 * 4  # vLLM's slab of the tiny model, four times, so that pages of 256 rows fit
SLAB_OFFSET = 17_280
NAN = 0x7F


class Form(NamedTuple):
    """One form of a pool.

    Attributes:
        layout: What a page is.
        storage: uint8, all bytes.
        offset: First page's start.
        pages: uint8 `[pages, payload]` on the storage.
    """

    layout: PageLayout
    storage: torch.Tensor
    offset: int
    pages: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """uint8 `[pages, page_rows, 1, 584]`, the shape engines give a pool."""
        rows = self.layout.page_rows
        shape, stride = (self.layout.num_pages, rows, 1, 584), (self.layout.page_stride_bytes, 584, 584, 1)
        return self.storage.as_strided(shape, stride, self.offset)


def v4_payload(num_pages: int, page_rows: int, *, seed: int = 0) -> torch.Tensor:
    """uint8 `[pages, payload]` of finite values near 1."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (num_pages, page_rows, 576), dtype=torch.uint8, generator=random)
    data[..., :448] = data[..., :448] & 0xBF  # e4m3 codes below 2, no NaN among them
    rope = torch.randn(num_pages, page_rows, 64, generator=random).to(torch.bfloat16)
    data[..., 448:] = rope.view(torch.uint8)
    scales = torch.randint(122, 130, (num_pages, page_rows, 8), dtype=torch.uint8, generator=random)
    scales[..., 7] = 0xFF  # the unused byte
    return torch.cat([data.flatten(1), scales.flatten(1)], dim=1)


def forms(num_pages: int = 4, page_rows: int = 64) -> dict[str, Form]:
    """Every form of one pool, with the same payload."""
    payload = v4_payload(num_pages, page_rows)
    common = {"page_rows": page_rows, "num_pages": num_pages, "pool": "c4"}
    slab = {"policy": "packed", "alignment": 576, "page_stride_bytes": SLAB_BYTES}
    built = {
        "tight": (PageLayout.for_rows("v4", **common), 0),
        "padded": (PageLayout.for_rows("v4", policy="aligned", alignment=576, **common), 0),
        "slab": (PageLayout.for_rows("v4", **slab, **common), 0),
        "slab-offset": (PageLayout.for_rows("v4", **slab, **common), SLAB_OFFSET),
    }
    return {name: _form(layout, offset, payload) for name, (layout, offset) in built.items()}


def _form(layout: PageLayout, offset: int, payload: torch.Tensor) -> Form:
    storage = torch.full((layout.num_pages * layout.page_stride_bytes,), NAN, dtype=torch.uint8)
    pages = storage.as_strided(payload.shape, (layout.page_stride_bytes, 1), offset)
    pages.copy_(payload)
    return Form(layout, storage, offset, pages)
