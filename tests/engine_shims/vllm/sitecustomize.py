"""Patches of vLLM 0.32.0 on a CPU in every process of the environment, before vLLM is imported.

Why a sitecustomize: vLLM inspects models in a sub-process and may run its workers in others, so a patch made by a
test would not reach them. The patches themselves stand in kvbridge.engines.vllm.workarounds; workarounds.toml beside
this file says what each trap is.
"""

from kvbridge.engines.vllm.workarounds import patch_after_import

patch_after_import()
