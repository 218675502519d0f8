"""Runs in vLLM's interpreter: the tiny DeepSeek-V4 answers two short prompts, its worker in a process of its own.

python -m tests.parity.vllm_programs.serve MODEL        prints TOKENS [[...], [...]] at the end
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        dtype="bfloat16",
    )
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (9, 14)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True))
    print("TOKENS", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
