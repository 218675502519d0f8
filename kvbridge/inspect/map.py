"""`map`: a picture of a page, to scale, as text, SVG or HTML.

    map deepseek-v4-flash --engine vllm --pool c4 --format svg > c4.svg

Pools may share a name (compressor state has three records, vLLM's sliding window two groups): `--pool` also takes
`NAME:RECORD` and the labels that `check` prints, such as `swa@0`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from kvbridge.inspect.command import Exit, Parser, UsageError, add_no_color
from kvbridge.inspect.picture import Picture, make_picture
from kvbridge.inspect.sources import (
    Source,
    SourceManifest,
    add_source_arguments,
    load_source,
    parse_with_engine_options,
)
from kvbridge.inspect.terminal import Terminal, emit, remark
from kvbridge.inspect.waste import waste_cells, waste_header
from kvbridge.manifest import Pool

SUMMARY = "Picture of a page to scale: data rows, scale rows, tail pad and foreign bytes, with offsets."
EXAMPLES = (
    "map --engine vllm --pool c4",
    "map deepseek-v4.1-flash --engine sglang --pool c2",
    "map --engine vllm --pool c4 --format svg > c4.svg",
    "map captured.json --format html > pages.html",
)


def parse(tokens: list[str]) -> Namespace:
    """Reads the command line behind `map`."""
    parser = Parser("map", "[SOURCE] [OPTIONS]", SUMMARY, EXAMPLES)
    add_source_arguments(parser, memory=False)
    parser.add_argument(
        "--pool", metavar="NAME", help="pool to picture: NAME, NAME:RECORD or NAME@GROUP (default: all; svg takes one)"
    )
    parser.add_argument("--format", choices=("text", "svg", "html"), default="text", help="default: text")
    add_no_color(parser)
    return parse_with_engine_options(parser, tokens)


def run(arguments: Namespace, terminal: Terminal) -> Exit:
    """Runs the command."""
    source = load_source(arguments)
    pictured = [(manifest, _selected(manifest, arguments.pool)) for manifest in source.manifests]
    faults = [fault for manifest in source.manifests for entry in manifest.pools for fault in entry.faults]
    if not any(found for _, found in pictured) and not faults:
        raise UsageError(f"--pool: got {arguments.pool!r}, expected one of {', '.join(_names(source))}")
    if arguments.format == "svg":
        emit(_svg(pictured, source))
    elif arguments.format == "html":
        emit(_html(pictured))
    else:
        from kvbridge.inspect.picture_text import render_text

        pictures = (picture for manifest, found in pictured for picture in _pictures(manifest, found))
        emit("\n".join(render_text(picture, terminal) for picture in pictures))
    for fault in faults:
        remark(f"error: {fault}")
    return Exit.FINDINGS if faults else Exit.CLEAN


_Selection = dict[str, Pool]


def _selected(manifest: SourceManifest, wanted: str | None) -> _Selection:
    """Pools by label; all, or those that `--pool` names."""
    return {
        label: entry.pool
        for label, entry in manifest.labelled().items()
        if entry.pool is not None and wanted in (None, label, entry.pool.pool, f"{entry.pool.pool}:{entry.pool.record}")
    }


def _names(source: Source) -> list[str]:
    return list(dict.fromkeys(label for manifest in source.manifests for label in manifest.labelled()))


def _pictures(manifest: SourceManifest, pools: _Selection) -> Iterator[Picture]:
    neighbours = [entry.pool for entry in manifest.pools if entry.pool is not None]
    for label, pool in pools.items():
        yield make_picture(pool, title=f"{manifest.title} \u00b7 {label}", neighbours=neighbours)


def _svg(pictured: list[tuple[SourceManifest, _Selection]], source: Source) -> str:
    from kvbridge.inspect.picture_svg import render_svg

    pictures = [picture for manifest, pools in pictured for picture in _pictures(manifest, pools)]
    if len(pictures) != 1:
        engines = sorted({manifest.manifest.engine.name for manifest, pools in pictured if pools})
        raise UsageError(
            f"--format svg: got {len(pictures)} pools of {', '.join(engines) or 'no engine'}, expected one: choose "
            f"with --engine and --pool, of {', '.join(_names(source))}"
        )
    return render_svg(pictures[0])


def _html(pictured: list[tuple[SourceManifest, _Selection]]) -> str:
    from kvbridge.inspect.picture_html import Section, render_html

    return render_html(
        [
            Section(
                title=manifest.title,
                header=waste_header(),
                rows=waste_cells(pools),
                pictures=tuple(_pictures(manifest, pools)),
            )
            for manifest, pools in pictured
            if pools
        ]
    )
