"""Captured manifests: of a model folder, by running SGLang's own allocator, and of a pool that is being served from.

    capture(model=folder)       config.json -> SGLang's configurator -> owner pool on the CPU -> manifest
    capture_pool(pool, ...)     a live pool -> manifest, contradictions included

The numbers come from the tensors: shape, stride, storage offset, storage size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbridge.documents import DeclaredManifest
from kvbridge.engine import EngineError, EngineMissingError, OptionValue, resolve_options
from kvbridge.engines.sglang import ENGINE
from kvbridge.engines.sglang.layouts import read_pool
from kvbridge.engines.sglang.live import declare
from kvbridge.engines.sglang.options import resolve_settings
from kvbridge.engines.sglang.plan import UNLIMITED_BYTES, given_options
from kvbridge.engines.sglang.workarounds import RELEASE
from kvbridge.errors import KVBridgeError
from kvbridge.manifest import Manifest, Rank
from kvbridge.models import Family, load_model

CAPTURED_TOKENS = 8192
"""Token capacity of a captured pool where `max-total-tokens` is not given: layouts do not depend on it."""

CAPTURED_REQUESTS = 4
"""Requests of a captured pool where `max-running-requests` is not given."""


def capture(*, model: Path, options: Mapping[str, OptionValue]) -> Manifest:
    """Builds SGLang's own pool for a model folder on the CPU and reads its tensors.

    Args:
        model: Folder with config.json.
        options: SGLang's options; capacity and requests are small where they are not given.

    Raises:
        EngineMissingError: SGLang is not installed in this interpreter.
        EngineError: SGLang refuses the model or an option.
        LayoutError: A tensor contradicts its layout.
    """
    release = sglang_version()
    if model.is_file():
        model = model.parent
    given = given_options(resolve_options(ENGINE, options))
    given.setdefault("max-total-tokens", CAPTURED_TOKENS)
    config = load_model(model)
    if config.family in (Family.V4, Family.V41):
        given.setdefault("max-running-requests", CAPTURED_REQUESTS)
    resolved = resolve_options(ENGINE, given)
    settings = resolve_settings(config, resolved)
    from kvbridge.engines.sglang.build import built_pool

    try:
        # What SGLang prints goes to stderr: stdout belongs to the manifest.
        with (
            redirect_stdout(sys.stderr),
            built_pool(model, settings=settings, options=resolved, budget_bytes=UNLIMITED_BYTES) as pool,
        ):
            declared = capture_pool(pool, model=config.name, options=given, release=release)
            if release != RELEASE:
                note = f"captured with the work-arounds of SGLang {RELEASE}; those of {release} were not read"
                declared = declared.model_copy(update={"notes": (*declared.notes, note)})
    except KVBridgeError:
        raise
    except Exception as error:  # SGLang refuses models with asserts and errors of every type
        raise EngineError(
            f"model {config.name}: SGLang {release} refused it: {type(error).__name__}: {error}"
        ) from error
    return declared.to_manifest()


def capture_pool(
    pool: Any,
    *,
    model: str | None = None,
    options: Mapping[str, OptionValue] | None = None,
    rank: Rank | None = None,
    release: str | None = None,
) -> DeclaredManifest:
    """Reads a live pool; what it contradicts stays in, for an audit to explain.

    Args:
        pool: A pool object of SGLang's `mem_cache`.
        model: Model name.
        options: Options that decided the layout.
        rank: Which worker.
        release: SGLang's version; the installed one by default.

    Raises:
        EngineError: A pool class whose layout is not known here.
    """
    return declare(
        read_pool(pool), version=release or sglang_version(), model=model, rank=rank, options=dict(options or {})
    )


def sglang_version() -> str:
    """Version of SGLang in this interpreter; SGLang is not imported.

    Raises:
        EngineMissingError: It is not installed.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise EngineMissingError(
            f"sglang: got no distribution in this interpreter, expected sglang {ENGINE.versions[-1]}"
        ) from None
