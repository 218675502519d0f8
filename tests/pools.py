"""Pools of random bytes for tests: views with guard bytes before, between and behind their pages."""

from __future__ import annotations

import torch

from kvbridge import PageLayout, PageView


def bind(layout: PageLayout, num_pages: int, *, offset: int = 0, seed: int = 0) -> PageView:
    """A pool at an offset of a storage of its own, every byte random.

    Args:
        layout: What the pages are.
        num_pages: Pages.
        offset: First page's start.
        seed: Seed of the bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    size = offset + num_pages * layout.page_stride_bytes + 64
    storage = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    shape, stride = (num_pages, layout.payload_bytes), (layout.page_stride_bytes, 1)
    return PageView.from_tensor(storage.as_strided(shape, stride, offset), layout)


def stored(view: PageView) -> bytearray:
    """Every byte of a view's storage."""
    return bytearray(view.pages.as_strided((view.storage_bytes,), (1,), 0).numpy().tobytes())
