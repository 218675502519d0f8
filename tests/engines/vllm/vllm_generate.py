"""Runs in vLLM's interpreter: the tiny DeepSeek-V4 with random weights answers two prompts.

python vllm_generate.py MODEL [CONNECTOR_FOLDER]        prints TOKENS [[...], [...]] at the end
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    model, *folder = sys.argv[1:]
    connector = {}
    if folder:
        connector["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvbridgeConnector",
            kv_connector_module_path="kvbridge.engines.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"audit": "error", "manifest_dir": folder[0]},
        )
    engine = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=128 << 20,
        dtype="bfloat16",
        **connector,
    )
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (40, 200)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True))
    print("TOKENS", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
