"""kvbridge: what a KV-cache page is, stated once, for SGLang, vLLM and the MLA kernels that read both.

    layout = PageLayout.for_rows("v4", page_rows=64, policy="aligned", alignment=576)
    view = PageView.from_tensor(tensor, layout)       # no copy; refuses what is inconsistent

The names below are loaded when first used, so that importing the package, or reading a schema, costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbridge.errors import KVBridgeError, LayoutError
    from kvbridge.layout import PageLayout
    from kvbridge.records import RECORDS, get_record
    from kvbridge.view import PageView

__version__ = "0.1.0"

_HOMES = {
    "KVBridgeError": "errors",
    "LayoutError": "errors",
    "PageLayout": "layout",
    "PageView": "view",
    "RECORDS": "records",
    "get_record": "records",
}

__all__ = ["RECORDS", "KVBridgeError", "LayoutError", "PageLayout", "PageView", "__version__", "get_record"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvbridge' has no attribute {name!r}")
    return getattr(import_module(f"kvbridge.{home}"), name)
