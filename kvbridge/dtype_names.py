"""From an engine's cache dtype name to the record it stands for. The name alone never decides.

    "fp8"            V4 family: 512-byte rows (uniform), or 584 (fp8_ds_mla)     ambiguous without the backend
    "fp8_ds_mla"     V4 584, V4.1 528, V3.2 656                                  ambiguous without the model
    "auto" / "bfloat16"   rows of bf16, except where a sparse backend stores fp8_ds_mla

Sources: vLLM 0.33.0 model_executor/layers/attention/mla_attention.py, models/deepseek_v4/attention.py; SGLang 0.5.23
mem_cache/deepseek_v4_memory_pool.py, mem_cache/memory_pool.py.
"""

from __future__ import annotations

from kvbridge.errors import RecordMissingError, RecordUnknownError
from kvbridge.models import Family

_DS_MLA, _PLAIN = "fp8_ds_mla", "fp8"
_SPELLINGS = {
    "fp8_ds_mla": _DS_MLA,
    "fp8": _PLAIN,
    "fp8_e4m3": _PLAIN,
    "float8_e4m3fn": _PLAIN,
    "bf16": "bf16",
    "bfloat16": "bf16",
    "nvfp4_ds_mla": "nvfp4_ds_mla",
}
# (dtype, family, backend) -> record; a backend of "" is the only reading of that pair.
_RECORDS = {
    (_DS_MLA, Family.V4, ""): "v4",
    (_DS_MLA, Family.V41, "sm100"): "v41_interleaved",
    (_DS_MLA, Family.V41, "sm90"): "v4",
    (_DS_MLA, Family.V41, "sglang"): "v41",
    (_DS_MLA, Family.DSA, ""): "dsa",
    (_PLAIN, Family.V4, "trtllm"): "uniform_fp8",
    (_PLAIN, Family.V4, "flashinfer"): "uniform_fp8",
    (_PLAIN, Family.V4, "flashmla"): "v4",
    (_PLAIN, Family.V41, "flashmla"): "v41_interleaved",
    (_PLAIN, Family.DSA, "sparse"): "dsa",
    (_PLAIN, Family.DSA, "dense"): "mla_fp8",
    (_PLAIN, Family.MLA, ""): "mla_fp8",
    ("bf16", Family.V4, ""): "v4_bf16",
    ("bf16", Family.DSA, ""): "mla_bf16",
    ("bf16", Family.MLA, ""): "mla_bf16",
    ("nvfp4_ds_mla", Family.DSA, ""): "nvfp4_352",
}


def resolve_record(dtype: str, *, family: Family | str | None = None, backend: str | None = None) -> str:
    """Names the record of a cache.

    Args:
        dtype: The engine's cache dtype name: fp8, fp8_ds_mla, bfloat16 ...
        family: Kind of model.
        backend: Attention backend, where the first two leave a choice: flashmla, flashinfer, trtllm, sparse, dense,
            sm90, sm100, sglang.

    Raises:
        RecordUnknownError: No such dtype name, or no record for the combination.
        RecordMissingError: Family or backend are needed to decide; the message lists the readings.
    """
    spelled = _SPELLINGS.get(dtype)
    if spelled is None:
        raise RecordUnknownError("dtype", got=dtype, expected=f"one of {sorted(_SPELLINGS)}")
    readings = {key: record for key, record in _RECORDS.items() if key[0] == spelled}
    if family is not None:
        readings = {key: record for key, record in readings.items() if key[1] == family}
    if backend is not None and any(key[2] for key in readings):
        readings = {key: record for key, record in readings.items() if key[2] in ("", backend)}
    if not readings:
        known = sorted({f"{key[1].value} {key[2]}".strip() for key in _RECORDS if key[0] == spelled})
        raise RecordUnknownError("dtype", got=f"{dtype}, {family}, {backend}", expected=f"{dtype} of one of {known}")
    if family is None or len(set(readings.values())) > 1:
        listed = sorted(
            f"{record} ({key[1].value}{', ' + key[2] if key[2] else ''})" for key, record in readings.items()
        )
        missing = "model family" if family is None else "attention backend"
        raise RecordMissingError(
            "dtype", got=dtype, expected=f"the {missing} too", detail=f"it may be {', '.join(listed)}"
        )
    return next(iter(readings.values()))
