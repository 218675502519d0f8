"""`show`: the page table of a source, what a memory budget holds, and whether one kernel can read it all.

pool   record  rows  payload    page  stride  tail pad ...
c4     v4        64   37,376  37,440  37,440        64 ...
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator

from kvbridge.inspect.command import Exit, Parser, UsageError, add_format, add_no_color
from kvbridge.inspect.options import describe_installed
from kvbridge.inspect.sources import (
    PoolEntry,
    Source,
    SourceManifest,
    add_source_arguments,
    load_source,
    parse_with_engine_options,
)
from kvbridge.inspect.terminal import Cell, Terminal, emit, percent, printable, remark
from kvbridge.inspect.waste import waste_cells, waste_header
from kvbridge.layout import PoolKind
from kvbridge.manifest import SCHEMA_VERSION

SUMMARY = "Page table of every pool: rows, payload, page and stride in bytes, padding, layers, waste."
EXAMPLES = (
    "show",
    "show deepseek-v4.1-flash --engine sglang",
    "show deepseek-v4-flash --engine vllm --memory 80GiB",
    "show path/to/model --engine sglang --page-size 256 --format json",
    "show captured.json",
    "show --raw tensor.json",
)

_LEFT = ("pool", "record", "padding", "group", "consumer", "verdict", "engine", "installed", "rules of")


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `show`."""
    parser = Parser("show", "[SOURCE] [OPTIONS]", SUMMARY, EXAMPLES)
    add_source_arguments(parser)
    parser.add_argument(
        "--raw",
        metavar="FILE",
        help='one declared tensor instead of a SOURCE: {"storage_bytes", "offset_bytes", "shape", "stride_bytes", '
        '"dtype", "record", "page_rows"}',
    )
    add_format(parser, "table", "json", "sarif", "github")
    add_no_color(parser)
    return parse_with_engine_options(parser, tokens)


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    if arguments.raw is not None:
        from kvbridge.inspect.raw import show_raw

        if arguments.source is not None:
            raise UsageError(f"SOURCE: got {arguments.source!r} beside --raw, expected one of the two")
        return show_raw(arguments, terminal)
    source = load_source(arguments)
    faults = [fault for manifest in source.manifests for entry in manifest.pools for fault in entry.faults]
    if arguments.format in ("sarif", "github"):
        from kvbridge.inspect.reporting import report_source

        return report_source(source, arguments, terminal)
    if arguments.format == "json":
        emit(document_text(source.manifests))
    else:
        emit("".join(_tables(source, terminal)))
    for fault in faults:
        remark(f"error: {fault}")
    return Exit.FINDINGS if faults else Exit.CLEAN


def document_text(manifests: Iterable[SourceManifest]) -> str:
    """JSON of manifests: sorted keys, integers, two spaces, a final newline."""
    document = {"schema_version": SCHEMA_VERSION, "manifests": [manifest.document for manifest in manifests]}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _tables(source: Source, terminal: Terminal) -> Iterator[str]:
    if source.default:
        yield terminal.paint("Installed here", "bold") + "\n"
        rows = [(name, version or "not installed", ", ".join(known)) for name, version, known in describe_installed()]
        yield terminal.table(("engine", "installed", "rules of"), rows, left=_LEFT) + "\n"
    for manifest in source.manifests:
        yield terminal.paint(manifest.title, "bold", "cyan") + "\n"
        yield page_table(manifest, terminal)
        yield from _memory(manifest)
        for note in manifest.manifest.notes:
            yield f"note: {printable(note)}\n"
        yield "\n"
        yield waste_table(manifest, terminal)
        yield "\n"
    yield from _verdict(source, terminal)


_COLUMNS = (
    *("pool", "record", "rows", "tokens/row", "payload", "page", "stride", "tail pad", "waste"),
    *("foreign", "padding", "layers", "group", "offset", "pages"),
)


def _row(entry: PoolEntry) -> tuple[Cell, ...]:
    pool = entry.pool or entry.declared
    page_bytes = pool.page_bytes if pool.page_bytes is not None else pool.payload_bytes
    alignment = pool.padding.alignment
    return (
        f"{pool.pool}.{pool.plane}" if pool.plane else pool.pool,
        "slots only" if pool.kind is PoolKind.INDEX_ONLY else pool.record,
        pool.page_rows,
        pool.tokens_per_row,
        pool.payload_bytes,
        page_bytes,
        pool.page_stride_bytes,
        page_bytes - pool.payload_bytes,
        percent(page_bytes - pool.payload_bytes, page_bytes),
        pool.page_stride_bytes - page_bytes,
        pool.padding.policy.value + (f" {alignment}" if alignment is not None else ""),
        len(pool.layers),
        pool.group,
        min((layer.offset_bytes for layer in pool.layers), default=None),
        pool.num_pages,
    )


def page_table(manifest: SourceManifest, terminal: Terminal) -> str:
    """The page table of one manifest; columns that say nothing about any of its pools are left out."""
    rows = [_row(entry) for entry in manifest.pools]
    optional = ("foreign", "group", "offset", "pages")
    kept = [
        column
        for column, name in enumerate(_COLUMNS)
        if name not in optional or any(row[column] not in (None, 0) for row in rows)
    ]
    header = [_COLUMNS[column] for column in kept]
    return terminal.table(header, [[row[column] for column in kept] for row in rows], left=_LEFT)


def _memory(manifest: SourceManifest) -> Iterator[str]:
    plan = manifest.manifest.memory
    if plan is not None:
        reason = textwrap.wrap(printable(plan.reason), 110)
        yield (
            f"memory: {plan.budget_bytes:,} bytes hold {plan.num_blocks:,} blocks and {plan.tokens:,} tokens, "
            f"{plan.used_bytes:,} bytes allocated\n"
        )
        yield "".join(f"  {line}\n" for line in reason)


def waste_table(manifest: SourceManifest, terminal: Terminal) -> str:
    """Waste of every pool and packed group of one manifest."""
    pools = {label: entry.pool for label, entry in manifest.labelled().items() if entry.pool is not None}
    return terminal.table(waste_header(), waste_cells(pools), left=("waste of",))


def _verdict(source: Source, terminal: Terminal) -> Iterator[str]:
    """Whether one kernel can read the MLA pools of every manifest in place."""
    from kvbridge.consumers import Verdict, fit_manifest

    names, refused = [], []
    for manifest in source.manifests:
        name = manifest.manifest.engine.name
        pools = manifest.labelled().items()
        mla = {label for label, entry in pools if entry.pool and entry.pool.record and entry.pool.record_format.d_qk}
        found = [entry for entry in fit_manifest(manifest.manifest, ["kvbridge"]) if entry.pool in mla]
        good = [entry.pool for entry in found if entry.fit.verdict is Verdict.IN_PLACE]
        names.append(f"{name}: {', '.join(good) or 'none'}")
        refused += [f"{name} {entry.pool} {entry.fit.verdict.value}" for entry in found if entry.pool not in good]
    answer = terminal.paint("no", "red", "bold") if refused else terminal.paint("yes", "green", "bold")
    engines = printable(" and ".join(dict.fromkeys(entry.manifest.engine.name for entry in source.manifests)))
    yield f"Can one kernel (kvbridge.kernels.mla) read the MLA pages of {engines} in place? {answer}\n"
    yield f"  in place: {printable('; '.join(names))}\n"
    if refused:
        yield f"  not: {printable('; '.join(refused))}\n"
