"""Runs the command in this process, and hand-made manifests to run it on."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.inspect.__main__ import main
from kvbridge.manifest import EngineId, LayerPlacement, Manifest, Pool, Storage, dump_manifests


@dataclass(frozen=True)
class Outcome:
    """What one call of the command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as JSON."""
        return json.loads(self.out)


def call(*arguments: str | Path) -> Outcome:
    """Runs `python -m kvbridge.inspect ARGUMENTS` without a process of its own."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    return Outcome(code, *texts)


def pool(
    name: str,
    record: str,
    *,
    rows: int,
    tokens_per_row: int = 1,
    offset: int = 0,
    layers: int = 1,
    step: int = 0,
    **fields: Any,
) -> Pool:
    """A pool with evenly spaced layers."""
    places = tuple(
        LayerPlacement(name=f"layers.{index}.{name}", offset_bytes=offset + index * step) for index in range(layers)
    )
    return Pool.for_rows(
        record, page_rows=rows, tokens_per_row=tokens_per_row, pool=name, layers=places, storage="kv", **fields
    )


def slab_pools() -> tuple[Pool, Pool, Pool]:
    """vLLM's largest group for DeepSeek-V4-Flash: a slab of 1,002,240 bytes with 62 pages in it."""
    packed: dict[str, Any] = {"policy": "packed", "alignment": 576, "page_stride_bytes": 1_002_240, "group": "2"}
    return (
        pool("indexer", "indexer_fp8", rows=64, tokens_per_row=4, layers=21, step=8_640, **packed),
        pool("c4", "v4", rows=64, tokens_per_row=4, offset=181_440, layers=21, step=37_440, **packed),
        pool("c128", "v4", rows=2, tokens_per_row=128, offset=967_680, layers=20, step=1_728, **packed),
    )


def manifest(*pools: Pool, engine: str = "vllm", version: str = "0.33.0", pages: int = 4) -> Manifest:
    """A manifest over one storage that holds the pools' pages."""
    stride = max(entry.page_stride_bytes for entry in pools)
    return Manifest(
        engine=EngineId(name=engine, version=version),
        model="hand-made",
        origin="captured",
        storages=(Storage(id="kv", storage_bytes=pages * stride),),
        pools=pools,
    )


def write(path: Path, *manifests: Manifest) -> Path:
    """Writes a manifest document."""
    path.write_text(dump_manifests(manifests), encoding="utf-8")
    return path


def valid_document() -> dict[str, Any]:
    """A manifest document as parsed JSON: the slab above and a padded SGLang page."""
    slab = manifest(*slab_pools())
    page = pool("c4", "v4", rows=64, tokens_per_row=4, policy="aligned", alignment=576)
    document: dict[str, Any] = json.loads(dump_manifests([slab, manifest(page, engine="sglang", version="0.5.23")]))
    return document
