"""SOURCE of a command: a manifest file, a model to plan for, or nothing.

manifests.json | -            {"schema_version", "manifests"}   read, contradictions kept
config.json or its folder     {"model_type", ...}              planned by every engine, or by --engine
deepseek-v3.2                 a built-in name                  planned
nothing                       deepseek-v4-flash                planned
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbridge.engine import OptionValue, PlanRequest, resolve_options
from kvbridge.errors import LayoutError, ManifestError
from kvbridge.inspect.command import Parser, UsageError
from kvbridge.inspect.options import (
    Choice,
    add_engine_arguments,
    choose_engines,
    parse_assignments,
    parse_memory,
    split_engine_options,
)
from kvbridge.inspect.reading import read_object
from kvbridge.inspect.terminal import printable
from kvbridge.manifest import SCHEMA_VERSION, Manifest, Pool
from kvbridge.models import ModelConfig, load_model, model_names

if TYPE_CHECKING:
    from kvbridge.documents import DeclaredManifest, DeclaredPool

DEFAULT_MODEL = "deepseek-v4-flash"
"""Model of a call without SOURCE."""

MAX_LAYERS = 4096
"""Most layers that are planned for; more is a damaged config.json, not a model."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One pool of a source.

    Attributes:
        declared: As stated.
        pool: The same, where it is consistent.
        faults: The contradictions, where it is not.
    """

    declared: DeclaredPool | Pool
    pool: Pool | None
    faults: tuple[LayoutError, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """One manifest of a source.

    Attributes:
        manifest: As stated.
        pools: Its pools.
        document: JSON form.
    """

    manifest: DeclaredManifest | Manifest
    pools: tuple[PoolEntry, ...]
    document: Mapping[str, object]

    def labelled(self) -> dict[str, PoolEntry]:
        """Pools by a name that is unique in the manifest: `c4`, `swa@0` ..."""
        from kvbridge.placement import pool_labels

        return dict(zip(pool_labels(self.manifest), self.pools, strict=True))

    @property
    def title(self) -> str:
        """Engine, version, model and origin in one line."""
        engine, rank = self.manifest.engine, self.manifest.rank
        parts = [f"{engine.name} {engine.version}", self.manifest.model or "unnamed model", self.manifest.origin]
        for axis, label in (("tensor", "TP"), ("pipeline", "PP"), ("decode_context", "DCP")):
            size = getattr(rank, f"{axis}_parallel_size")
            if size != 1:
                parts.append(f"{label} rank {getattr(rank, f'{axis}_parallel_rank')} of {size}")
        return printable(" \u00b7 ".join(parts))


@dataclass(frozen=True, slots=True)
class Source:
    """What a command was given.

    Attributes:
        manifests: One or more.
        default: Whether no SOURCE was named.
    """

    manifests: tuple[SourceManifest, ...]
    default: bool = False


def add_source_arguments(parser: Parser, *, memory: bool = True) -> None:
    """Adds SOURCE and everything that decides a plan."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help=f"manifest JSON, a model's config.json or its folder, - for stdin, or one of {', '.join(model_names())} "
        f"(default: {DEFAULT_MODEL}, all engines)",
    )
    add_engine_arguments(parser, memory=memory)


def parse_with_engine_options(parser: Parser, tokens: list[str]) -> Namespace:
    """Parses a command line whose parser has source arguments."""
    rest, options = split_engine_options(tokens, parser)
    arguments = parser.parse_args(rest)
    arguments.given_options = parse_assignments(arguments.engine_options) | options
    return arguments


def load_source(arguments: Namespace) -> Source:
    """Reads or plans the manifests a command was given.

    Raises:
        ManifestError: A file that is not parseable or off schema, no such model.
        EngineError, UsageError: See `choose_engines`.
    """
    memory_bytes = parse_memory(getattr(arguments, "memory", None))
    return load(
        arguments.source,
        engine=arguments.engine,
        version=arguments.engine_version,
        options=arguments.given_options,
        memory_bytes=memory_bytes,
    )


def load(
    source: str | None,
    *,
    engine: str | None = None,
    version: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    memory_bytes: int | None = None,
) -> Source:
    """As `load_source`, from plain values."""
    return load_found(
        find_source(source or DEFAULT_MODEL),
        source,
        engine=engine,
        version=version,
        options=options,
        memory_bytes=memory_bytes,
    )


def load_found(
    found: ModelConfig | tuple[SourceManifest, ...],
    source: str | None,
    *,
    engine: str | None = None,
    version: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    memory_bytes: int | None = None,
) -> Source:
    """Plans a model that `find_source` found, or picks from the manifests that it read."""
    given = dict(options or {})
    if isinstance(found, ModelConfig):
        layers = max(found.num_layers, found.num_draft_layers, len(found.compress_ratios))
        if layers > MAX_LAYERS:
            raise ManifestError(f"num_hidden_layers: got {layers} layers, expected at most {MAX_LAYERS}")
        choices = choose_engines(engine, version=version, options=given)
        manifests = tuple(_plan(choice, found, memory_bytes) for choice in choices)
        return Source(manifests, default=source is None)
    if given or version is not None or memory_bytes is not None:
        raise UsageError(
            f"{source}: got engine options, a version or --memory for a manifest that is already made, "
            "expected a model to plan for"
        )
    manifests = tuple(entry for entry in found if engine in (None, entry.manifest.engine.name))
    if not manifests:
        engines = sorted({entry.manifest.engine.name for entry in found})
        raise UsageError(f"--engine: got {engine!r}, expected one of the engines in {source}: {engines}")
    return Source(manifests)


def find_source(source: str) -> ModelConfig | tuple[SourceManifest, ...]:
    """Reads a source: a model to plan for, or manifests that are already made."""
    if source.lower() in model_names():
        return load_model(source)
    path = Path(source)
    try:
        folder = source != "-" and path.is_dir()
        missing = source != "-" and not path.exists()
    except (OSError, ValueError) as error:
        raise ManifestError(f"SOURCE: got {source!r} ({error}), expected a file, a folder or a model name") from error
    if missing:
        raise ManifestError(
            f"SOURCE: got {source!r} (no such file), expected a manifest, a config.json, its folder, or one of "
            f"{', '.join(model_names())}"
        )
    if folder:
        path /= "config.json"
    data = read_object(str(path) if folder else source, field="SOURCE")
    if "manifests" in data or "schema_version" in data:
        return read_manifests(data)
    if "model_type" in data:
        return ModelConfig.from_config(data, name=path.resolve().parent.name or source)
    keys = ", ".join(repr(key) for key in sorted(data)[:8]) or "no keys"
    raise ManifestError(
        f"SOURCE {source!r}: got an object with {keys[:200]}, expected `manifests` (a manifest) or `model_type` "
        "(a config.json)"
    )


def read_manifests(data: Mapping[str, object]) -> tuple[SourceManifest, ...]:
    """Validates a parsed manifest document; contradictions inside it are kept.

    Raises:
        ManifestError: Off schema, or without a manifest.
    """
    if data.get("schema_version") is True:  # equal to 1 in Python, not in JSON
        raise ManifestError(f"schema_version: got true, expected {SCHEMA_VERSION}")
    from kvbridge.documents import validate_document

    declared = validate_document(data)
    if not declared:
        raise ManifestError("manifests: got an empty list, expected at least one manifest")
    documents = data["manifests"]
    if not isinstance(documents, list):
        raise ManifestError(f"manifests: got {type(documents).__name__}, expected a list")
    return tuple(
        SourceManifest(manifest, tuple(_declared_pool(pool) for pool in manifest.pools), document)
        for manifest, document in zip(declared, documents, strict=True)
    )


def _declared_pool(declared: DeclaredPool) -> PoolEntry:
    from kvbridge.layout import violations

    faults = tuple(violations(declared))
    if faults:
        return PoolEntry(declared, None, faults)
    pool = declared.to_pool()
    faults = tuple(declared.derived_violations(pool))
    return PoolEntry(declared, pool, faults)


def _plan(choice: Choice, model: ModelConfig, memory_bytes: int | None) -> SourceManifest:
    request = PlanRequest(
        model=model,
        version=choice.version,
        options=resolve_options(choice.engine, choice.options),
        memory_bytes=memory_bytes,
    )
    manifest = choice.engine.plan(request)
    return SourceManifest(manifest, tuple(PoolEntry(pool, pool) for pool in manifest.pools), manifest.document())
