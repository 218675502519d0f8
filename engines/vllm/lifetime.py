"""Is the memory under a view still vLLM's KV cache? Sleep, wake-up and re-allocation leave no trace in a tensor.

    sleep(level)             unmaps the cache's pages; address and size of the tensor stay     -> asleep
    wake_up(tags)            maps fresh pages at the same addresses; contents are gone    -> live, not contents_kept
    allocate_kv_cache again  another storage (elastic scaling, a profiling run before)         -> replaced
    storage freed, resized or moved                                                            -> freed, resized, moved

`watch()` hooks the two places where this happens. Source: vLLM 0.32.0 v1/worker/gpu_worker.py (sleep, wake_up),
device_allocator/sleep_mode_backend.py, v1/worker/utils.py (allocate_kv_cache). A CPU worker never sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvbridge.errors import StaleViewError
from kvbridge.view import Liveness, PageView

if TYPE_CHECKING:
    import torch

    from kvbridge.engines.vllm.live import Allocation


class CacheState(StrEnum):
    """What became of the memory under a view."""

    LIVE = "live"
    ASLEEP = "asleep"  # unmapped; any access faults
    REPLACED = "replaced"  # vLLM allocated its caches anew; the old ones serve nobody
    MOVED = "moved"
    RESIZED = "resized"
    FREED = "freed"


@dataclass(slots=True)
class _Watch:
    allocation: int = 0
    generation: int = 0
    asleep: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list)


_watch = _Watch()


@dataclass(frozen=True, slots=True)
class LiveCaches:
    """Views of one allocation that know what vLLM did to it since.

    Attributes:
        views: Layer name to view.
        allocation: Number of the allocation they were made from.
        generation: Number that grows with each allocation and each sleep: contents read under another are gone.
    """

    views: Mapping[str, PageView]
    allocation: int
    generation: int

    @property
    def contents_kept(self) -> bool:
        """Whether what was read through these views may still be there."""
        return self.generation == _watch.generation

    def state(self, name: str) -> CacheState:
        """State of one layer's memory."""
        liveness = self.views[name].liveness
        if liveness is not Liveness.LIVE:
            return CacheState(liveness.value)
        if self.allocation != _watch.allocation:
            return CacheState.REPLACED
        return CacheState.ASLEEP if _watch.asleep else CacheState.LIVE

    def require_live(self, name: str) -> PageView:
        """The view of one layer, if its memory is vLLM's and mapped.

        Raises:
            StaleViewError: It is not.
        """
        state = self.state(name)
        if state is not CacheState.LIVE:
            raise StaleViewError(f"cache of {name}", got=state.value, expected=CacheState.LIVE.value)
        return self.views[name]


def bind(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> LiveCaches:
    """Binds the current allocation; `watch` must have been called before it was made.

    Args:
        kv_caches: Layer name to tensor, as KV connectors receive them or `allocate_kv_cache` returns them.
        kv_cache_config: The KVCacheConfig they were allocated from.

    Raises:
        LayoutError: A tensor differs from the declaration.
    """
    from kvbridge.engines.vllm.layouts import views_of

    return LiveCaches(views_of(kv_caches, kv_cache_config), _watch.allocation, _watch.generation)


def watch() -> Callable[[], None]:
    """Hooks vLLM's allocator and its worker's sleep and wake-up in this process; hooking twice does nothing.

    Returns:
        A function that takes the hooks off again.
    """
    if not _watch.undo:
        from kvbridge.engines.vllm.live import after_allocation
        from vllm.v1.worker.gpu_worker import Worker

        _watch.undo.append(after_allocation(_allocated))
        _watch.undo.append(_after(Worker, "sleep", _put_to_sleep))
        _watch.undo.append(_after(Worker, "wake_up", _woken))
    return unwatch


def unwatch() -> None:
    """Takes the hooks off."""
    while _watch.undo:
        _watch.undo.pop()()


def _allocated(allocation: Allocation) -> None:
    del allocation
    _watch.allocation += 1
    _watch.generation += 1
    _watch.asleep = False


def _put_to_sleep(arguments: tuple[Any, ...]) -> None:
    del arguments  # both levels discard the cache
    _watch.asleep = True
    _watch.generation += 1


def _woken(arguments: tuple[Any, ...]) -> None:
    tags = arguments[0] if arguments else None
    if _watch.asleep and (tags is None or "kv_cache" in tags):
        _watch.asleep = False


def _after(cls: type, name: str, callback: Callable[[tuple[Any, ...]], None]) -> Callable[[], None]:
    original = getattr(cls, name)

    @wraps(original)
    def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, *arguments, **keywords)
        callback((*arguments, *keywords.values()))
        return result

    setattr(cls, name, wrapper)
    return lambda: setattr(cls, name, original)
