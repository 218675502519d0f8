"""A live vLLM in this process whose attention calls can be observed: a CPU, one worker, the model of decode_model.py.

LLM(...) --> allocate_kv_cache --> take_over(allocation, observer)     observe(True): both kernels, vLLM's output kept
                                                                       observe(False): kvbridge's kernel serves
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbridge.engines.vllm.decode import DECODER, take_over
from kvbridge.engines.vllm.decode_compare import Comparison
from kvbridge.engines.vllm.decode_mode import KernelMode
from kvbridge.engines.vllm.decode_model import VOCABULARY, register_loader, write_model
from kvbridge.parity import CallRow

if TYPE_CHECKING:
    from kvbridge.engines.vllm.live import Allocation

STEP_TOKENS = 2048
"""Tokens of a step: fewer than the prompts' together, so that prefill comes in chunks beside decode."""
MODEL_TOKENS = 4096
CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine says to one prompt.

    Attributes:
        tokens: Token ids.
        logprobs: Log-probability of each.
        gaps: Distance of the two best at each position, in nats.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


class Request:
    """One request of an engine that is driven step by step.

    Attributes:
        answer: What came so far; None before the first token.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answer: Answer | None = None

    def step(self) -> None:
        """One step of the engine."""
        for output in self._engine.step():
            self.answer = _answer(output.outputs[0])

    def finish(self) -> Answer:
        """Steps to the end.

        Raises:
            RuntimeError: The engine ended without an answer.
        """
        while self._engine.has_unfinished_requests():
            self.step()
        if self.answer is None:
            raise RuntimeError("request: got no answer, expected one")
        return self.answer


def kernel_clock() -> Callable[[], float]:
    """The clock that kernels are timed by: the thread's own CPU time, which other jobs on the machine do not change.

    With several threads there is no such clock; then it is the time on the wall.
    """
    import torch

    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class LiveEngine:
    """vLLM with the tiny model, its operator observed.

    Attributes:
        comparison: What compares; it sees calls while `observe` is on.
        allocation: What vLLM allocated.
    """

    def __init__(self, folder: Path) -> None:
        from kvbridge.engines.vllm.live import after_allocation

        self.comparison = Comparison(keep=True)
        self.allocation: Allocation
        self._seed = 7

        def observed(allocation: Allocation) -> None:
            self.allocation = allocation
            take_over(allocation, KernelMode.FORCE, self.comparison)

        self._undo = after_allocation(observed)
        from vllm import LLM

        skip_unread_metadata()
        with chunked_prefill():
            self._llm: Any = LLM(
                model=str(write_model(folder)),
                load_format=register_loader(),
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=MODEL_TOKENS,
                max_num_seqs=8,
                max_num_batched_tokens=STEP_TOKENS,
                kv_cache_memory_bytes=CACHE_BYTES,
                dtype="bfloat16",
                enable_prefix_caching=False,
                async_scheduling=False,
                seed=0,
            )

    def observe(self, on: bool) -> None:
        """Compares calls, or lets the kernel serve."""
        DECODER.observer = self.comparison if on else None

    def close(self) -> None:
        """Gives vLLM its operator back."""
        self._undo()
        DECODER.uninstall()
        del self._llm

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Random prompts, the same each time."""
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        """Answers prompts greedily."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [_answer(result.outputs[0]) for result in self._llm.generate(given, sampling, use_tqdm=False)]

    def score(self, prompt: Sequence[int]) -> Answer:
        """The best token at each position of a prompt, given all before it."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=2)
        (result,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        best = [
            sorted(((e.logprob, token) for token, e in at.items()), reverse=True) for at in result.prompt_logprobs[1:]
        ]
        return Answer(
            tokens=tuple(entry[0][1] for entry in best),
            logprobs=tuple(entry[0][0] for entry in best),
            gaps=tuple(entry[0][0] - entry[1][0] for entry in best),
        )

    @property
    def core(self) -> Any:
        """vLLM's EngineCore in this process."""
        return self._llm.llm_engine.engine_core.engine_core

    def start(self, prompt: Sequence[int], tokens: int) -> Request:
        """Adds one request, which is then answered step by step."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)
        self._llm.llm_engine.add_request("handed-over", {"prompt_token_ids": list(prompt)}, sampling)
        return Request(self._llm.llm_engine)

    def compare(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[CallRow], list[Answer]]:
        """Answers prompts by vLLM's kernel and compares every call."""
        self.observe(True)
        before = len(self.comparison.rows)
        answers = self.generate(prompts, tokens)
        return self.comparison.rows[before:], answers


def skip_unread_metadata() -> None:
    """Leaves out the slots of the sliding window that the GPU kernels read and the CPU's attention never does.

    Triton interprets that kernel here: 35 of the 38 s of a prefill of 701 tokens. Source: vLLM 0.32.0
    v1/attention/backends/mla/sparse_swa.py; models/deepseek_v4/cpu/cpu_sparse.py computes its own.
    """
    from vllm.v1.attention.backends.mla import sparse_swa

    class Nothing:
        def __call__(self, *arguments: Any, **keywords: Any) -> None:
            pass

        def register_warmup(self, *arguments: Any, **keywords: Any) -> None:
            pass

    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = Nothing()


@contextmanager
def chunked_prefill() -> Iterator[None]:
    """Lets vLLM configure itself for prefill in chunks, which it only does where the CPU has AMX.

    Its DeepSeek-V4 kernels address caches by position in either case. Source: vLLM 0.32.0 platforms/cpu.py.
    """
    import torch

    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config
    supported = torch.cpu._is_amx_tile_supported

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            configure(vllm_config)
        finally:
            torch.cpu._is_amx_tile_supported = supported

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = configure


def _answer(output: Any) -> Answer:
    best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in output.logprobs]
    chosen = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
    gaps = tuple(first - second for first, second in best)
    return Answer(tuple(output.token_ids), tuple(chosen), gaps)
