"""A test's hook into every vLLM process: moves the pages of one layer closer together than vLLM declares.

On PYTHONPATH, its dist-info beside it makes vLLM load it like any other general plugin.
"""

import os

LAYER = "model.layers.1.attn"


def register() -> None:
    """Wraps the function that makes a placement's views; only where the test asks for it."""
    closer = int(os.environ.get("KVBRIDGE_TEST_CLOSER_BYTES", "0"))
    if not closer:
        return
    from vllm.v1.worker import utils

    original = utils.create_kv_cache_views

    def create_kv_cache_views(raw, spec, num_blocks, layout, tensor, **rest):  # type: ignore[no-untyped-def]
        views = original(raw, spec, num_blocks, layout, tensor, **rest)
        for index, name in enumerate(tensor.layers):
            if name == LAYER:
                view = views[index]
                views[index] = view.as_strided(view.shape, (view.stride(0) - closer, *view.stride()[1:]))
        return views

    utils.create_kv_cache_views = create_kv_cache_views
