"""Every record format: the only file with format constants.

A record is the bytes of one cached state. Its fields come in blocks; in a page a record is either split or interleaved:

    split        [row 0 data][row 1 data]...[row 0 scales][row 1 scales]...      data block first, then the scale block
    interleaved  [row 0 data+scales][row 1 data+scales]...                       a row is one run of bytes

    V4, 584 bytes, split:   data 576 = [448 e4m3 | 64 bf16 (RoPE)]   scales 8 = [7 UE8M0 | 1 unused]

Sources are written beside each record as project, version, file. Sizes without a known encoding are marked
`decodable=False`: they are measured and moved, never decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from kvbridge.errors import PageRowsError, PlaneError, RecordMissingError, RecordUnknownError

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_SCALE_MIN = 2.0**-9
UE8M0_BIAS = 127
UE8M0_NAN = 255
UE8M0_EXACT = range(10, 247)
"""Scale bytes under which every e4m3 code times its scale is exact in bf16, subnormal codes included."""


class Encoding(StrEnum):
    """How the bytes of a field encode values."""

    E4M3 = "float8_e4m3fn"
    E2M1 = "float4_e2m1"  # two values a byte, even value in the low nibble
    UE8M0 = "float8_e8m0fnu"
    BF16 = "bfloat16"
    FP32 = "float32"
    UNUSED = "unused"
    UNKNOWN = "unknown"

    @property
    def element_bytes(self) -> int:
        """Bytes one element needs to be aligned to (1 for packed and opaque encodings)."""
        return {"bfloat16": 2, "float32": 4}.get(self.value, 1)

    @property
    def value_bits(self) -> int:
        """Bits of one value: 4 for E2M1, 16 for bf16, 32 for fp32, 8 otherwise."""
        return 4 if self is Encoding.E2M1 else 8 * self.element_bytes


class Arrangement(StrEnum):
    """Where a row's scales lie in the page."""

    SPLIT = "split"
    INTERLEAVED = "interleaved"


class ScaleRule(StrEnum):
    """What multiplies the stored codes."""

    UE8M0 = "ue8m0"  # power of two, one byte: 2**(byte - 127), 255 is NaN
    E4M3 = "e4m3"
    FP32 = "fp32"
    EXTERNAL = "external"  # one scale for the layer, kept outside the page
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Field:
    """A run of bytes in one row.

    Attributes:
        name: Unique in the record: `nope`, `rope`, `values`, `scales`, `unused` ...
        row_bytes: Bytes of the field in one row.
        encoding: How those bytes encode values.
        block: `data` or `scales`; in a split page each block's rows lie together.
        plane: Tensor that holds the field, for records spread over several tensors.
    """

    name: str
    row_bytes: int
    encoding: Encoding
    block: str = "data"
    plane: str = ""

    @property
    def values(self) -> int:
        """Values of the field in one row."""
        return 8 * self.row_bytes // self.encoding.value_bits


@dataclass(frozen=True, slots=True)
class Region:
    """A named run inside a page: row r of it is the bytes [offset + r * row_stride, ... + row_bytes).

    Attributes:
        name: The field's name.
        offset: First byte in the page.
        row_bytes: Bytes of one row.
        row_stride: Bytes between two rows.
        rows: Rows in the page.
        dtype: Encoding of the bytes.
        block: `data` or `scales`.
    """

    name: str
    offset: int
    row_bytes: int
    row_stride: int
    rows: int
    dtype: Encoding
    block: str


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of one cached state.

    Attributes:
        name: Key in `RECORDS`, and the value of `PageLayout.record`.
        fields: Fields in byte order; in a split page all data fields come before all scale fields.
        arrangement: Split or interleaved.
        scale_rule: What multiplies the codes.
        scale_group: Values that share one scale; 0 where there is none in the page.
        d_qk: Values of K that a query is multiplied with; 0 for records that are no MLA state.
        d_v: Leading values of K that are V.
        decodable: False where only the size is known.
        source: Project, version and file in which the format was read.
        title: One line for people.
    """

    name: str
    title: str
    fields: tuple[Field, ...]
    arrangement: Arrangement
    scale_rule: ScaleRule
    source: str
    scale_group: int = 0
    d_qk: int = 0
    d_v: int = 0
    decodable: bool = True

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the tensors a row is spread over; `("",)` for the usual single one."""
        return tuple(dict.fromkeys(field.plane for field in self.fields))

    @property
    def row_bytes(self) -> int:
        """Bytes of one record over all planes."""
        return sum(field.row_bytes for field in self.fields)

    def plane_fields(self, plane: str | None = None) -> tuple[Field, ...]:
        """Fields of one plane.

        Args:
            plane: Plane name; None only for records with a single plane.

        Raises:
            PlaneError: The plane is missing, or the record has no such plane.
        """
        name = plane or ""
        if name not in self.planes:
            expected = f"one of {list(self.planes)}" if self.planes != ("",) else "no plane"
            raise PlaneError("plane", got=plane, expected=expected, detail=f"record {self.name}")
        return tuple(field for field in self.fields if field.plane == name)

    def plane_bytes(self, plane: str | None = None) -> int:
        """Bytes of one row in one plane."""
        return sum(field.row_bytes for field in self.plane_fields(plane))

    def block_bytes(self, block: str, plane: str | None = None) -> int:
        """Bytes of one row's `data` or `scales` block in one plane."""
        return sum(field.row_bytes for field in self.plane_fields(plane) if field.block == block)

    def element_bytes(self, plane: str | None = None) -> int:
        """Alignment that the widest element of the plane needs."""
        return max(field.encoding.element_bytes for field in self.plane_fields(plane))

    def uniform_encoding(self, plane: str | None = None) -> Encoding | None:
        """The encoding, if all fields of the plane share one: such rows may come as a tensor of that dtype."""
        encodings = {field.encoding for field in self.plane_fields(plane)}
        return encodings.pop() if len(encodings) == 1 else None

    def regions(self, page_rows: int, plane: str | None = None) -> tuple[Region, ...]:
        """Regions of a page, in byte order of their first row. They tile the payload without overlap or hole.

        Args:
            page_rows: Rows in the page, at least 1.
            plane: Plane name, for records with several.

        Raises:
            PageRowsError: `page_rows` is not positive.
            PlaneError: No such plane.
        """
        if page_rows <= 0:
            raise PageRowsError("page_rows", got=page_rows, expected="at least 1")
        fields = self.plane_fields(plane)
        regions: list[Region] = []
        start = 0
        if self.arrangement is Arrangement.SPLIT:
            blocks = [block for block in ("data", "scales") if any(field.block == block for field in fields)]
            groups = [tuple(field for field in fields if field.block == block) for block in blocks]
        else:
            groups = [fields]
        for group in groups:
            stride = sum(field.row_bytes for field in group)
            offset = start
            for field in group:
                regions.append(
                    Region(field.name, offset, field.row_bytes, stride, page_rows, field.encoding, field.block)
                )
                offset += field.row_bytes
            start += stride * page_rows
        return tuple(regions)


def _data(name: str, row_bytes: int, encoding: Encoding, plane: str = "") -> Field:
    return Field(name, row_bytes, encoding, "data", plane)


def _scales(name: str, row_bytes: int, encoding: Encoding, plane: str = "") -> Field:
    return Field(name, row_bytes, encoding, "scales", plane)


_SPLIT, _INTERLEAVED = Arrangement.SPLIT, Arrangement.INTERLEAVED
_V41 = (_data("values", 512, Encoding.E4M3), _scales("scales", 16, Encoding.UE8M0))
_V41_FP4 = (_data("values", 256, Encoding.E2M1), _scales("scales", 32, Encoding.E4M3))
_V41_SOURCE = "SGLang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py; vLLM 0.33.0 models/deepseek_v41/attention.py"
_KV_LAYOUT = "SGLang 0.5.23 kernels/ops/attention/dsv4/kv_layout.py"
_NVFP4 = "sized from public code and issues; encoding not read"


def _opaque(name: str, title: str, row_bytes: int, source: str, *, d_qk: int, rope_bytes: int) -> Record:
    fields = (_data("packed", row_bytes - rope_bytes, Encoding.UNKNOWN), _data("rope", rope_bytes, Encoding.UNKNOWN))
    return Record(name, title, fields, _INTERLEAVED, ScaleRule.UNKNOWN, source, 16, d_qk, 512, decodable=False)


def _state(values: int, use: str, encoding: Encoding = Encoding.FP32) -> Record:
    short = {Encoding.FP32: "fp32", Encoding.BF16: "bf16"}[encoding]
    return Record(
        f"state_{short}_{values}",
        f"{values} {short} partial sums of a compressor ({use})",
        (_data("state", encoding.element_bytes * values, encoding),),
        _INTERLEAVED,
        ScaleRule.NONE,
        "vLLM 0.33.0 models/deepseek_v4/compressor.py; SGLang 0.5.23 mem_cache/deepseek_v4_compress_state.py",
    )


_ALL = (
    Record(
        "v4",
        "DeepSeek-V4 fp8: 448 e4m3, 64 bf16 RoPE, 7 UE8M0 scales, 1 unused byte",
        (
            _data("nope", 448, Encoding.E4M3),
            _data("rope", 128, Encoding.BF16),
            _scales("scales", 7, Encoding.UE8M0),
            _scales("unused", 1, Encoding.UNUSED),
        ),
        _SPLIT,
        ScaleRule.UE8M0,
        f"{_KV_LAYOUT}; vLLM 0.33.0 v1/attention/backends/mla/sparse_swa.py",
        scale_group=64,
        d_qk=512,
        d_v=512,
    ),
    Record(
        "v41",
        "DeepSeek-V4.1 fp8, split: 512 e4m3 (RoPE included), 16 UE8M0 scales",
        _V41,
        _SPLIT,
        ScaleRule.UE8M0,
        _KV_LAYOUT,
        scale_group=32,
        d_qk=512,
        d_v=512,
    ),
    Record(
        "v41_interleaved",
        "DeepSeek-V4.1 fp8, interleaved: 512 e4m3 and 16 UE8M0 scales in each row",
        _V41,
        _INTERLEAVED,
        ScaleRule.UE8M0,
        _V41_SOURCE,
        scale_group=32,
        d_qk=512,
        d_v=512,
    ),
    Record(
        "v41_fp4",
        "DeepSeek-V4.1 fp4, split: 512 e2m1 in 256 bytes, 32 e4m3 scales",
        _V41_FP4,
        _SPLIT,
        ScaleRule.E4M3,
        _KV_LAYOUT,
        scale_group=16,
        d_qk=512,
        d_v=512,
    ),
    Record(
        "v41_fp4_interleaved",
        "DeepSeek-V4.1 fp4, interleaved: 256 bytes of e2m1 and 32 e4m3 scales in each row",
        _V41_FP4,
        _INTERLEAVED,
        ScaleRule.E4M3,
        _V41_SOURCE,
        scale_group=16,
        d_qk=512,
        d_v=512,
    ),
    Record(
        "uniform_fp8",
        "DeepSeek-V4 rows of 512 e4m3, one scale outside the page",
        (_data("values", 512, Encoding.E4M3),),
        _INTERLEAVED,
        ScaleRule.EXTERNAL,
        "SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py (DeepSeekV4UniformFP8KVPool)",
        d_qk=512,
        d_v=512,
    ),
    Record(
        "v4_bf16",
        "DeepSeek-V4 rows of 512 bf16",
        (_data("values", 1024, Encoding.BF16),),
        _INTERLEAVED,
        ScaleRule.NONE,
        "vLLM 0.33.0 models/deepseek_v4/attention.py (FlashInfer SM100 rows)",
        d_qk=512,
        d_v=512,
    ),
    Record(
        "dsa",
        "DeepSeek-V3.2 / GLM sparse attention: 512 e4m3, 4 fp32 scales, 64 bf16 RoPE, in each row",
        (
            _data("nope", 512, Encoding.E4M3),
            _scales("scales", 16, Encoding.FP32),
            _data("rope", 128, Encoding.BF16),
        ),
        _INTERLEAVED,
        ScaleRule.FP32,
        "vLLM 0.33.0 model_executor/layers/attention/mla_attention.py; SGLang 0.5.23 mem_cache/memory_pool.py",
        scale_group=128,
        d_qk=576,
        d_v=512,
    ),
    Record(
        "mla_bf16",
        "classic MLA rows of 576 bf16 (512 latent, 64 RoPE)",
        (_data("nope", 1024, Encoding.BF16), _data("rope", 128, Encoding.BF16)),
        _INTERLEAVED,
        ScaleRule.NONE,
        "vLLM 0.33.0 model_executor/layers/attention/mla_attention.py; SGLang 0.5.23 mem_cache/memory_pool.py",
        d_qk=576,
        d_v=512,
    ),
    Record(
        "mla_fp8",
        "classic MLA rows of 576 e4m3, one scale outside the page",
        (_data("nope", 512, Encoding.E4M3), _data("rope", 64, Encoding.E4M3)),
        _INTERLEAVED,
        ScaleRule.EXTERNAL,
        "SGLang 0.5.23 mem_cache/memory_pool.py (MLATokenToKVPool)",
        d_qk=576,
        d_v=512,
    ),
    Record(
        "mla_fp4",
        "classic MLA rows of 576 e2m1 with 36 scale bytes in a second tensor",
        (
            _data("values", 288, Encoding.E2M1, "values"),
            _scales("scales", 36, Encoding.UNKNOWN, "scales"),
        ),
        _SPLIT,
        ScaleRule.UNKNOWN,
        "SGLang 0.5.23 mem_cache/memory_pool.py (MLATokenToKVPoolFP4)",
        scale_group=16,
        d_qk=576,
        d_v=512,
        decodable=False,
    ),
    Record(
        "unified_fp8",
        "DeepSeek-V4 on gfx95: 448 e4m3, 14 scale bytes, 50 unused; 64 bf16 RoPE in a second tensor",
        (
            _data("nope", 448, Encoding.E4M3, "nope"),
            _scales("scales", 14, Encoding.UNKNOWN, "nope"),
            _scales("unused", 50, Encoding.UNUSED, "nope"),
            _data("rope", 128, Encoding.BF16, "rope"),
        ),
        _INTERLEAVED,
        ScaleRule.UNKNOWN,
        "SGLang 0.5.23 unified_kv_kernels/layout.py",
        scale_group=32,
        d_qk=512,
        d_v=512,
        decodable=False,
    ),
    _opaque(
        "nvfp4_352",
        "nvfp4 with fp8 RoPE, SM100",
        352,
        f"vLLM 0.33.0 mla_attention.py; {_NVFP4}",
        d_qk=576,
        rope_bytes=64,
    ),
    _opaque("nvfp4_368", "nvfp4, 368 bytes", 368, f"b12x kv_cache.py; {_NVFP4}", d_qk=576, rope_bytes=128),
    _opaque("nvfp4_384", "nvfp4, 384 bytes", 384, f"FlashInfer, SGLang pull 32741; {_NVFP4}", d_qk=512, rope_bytes=128),
    _opaque(
        "nvfp4_432", "nvfp4, 432 bytes, RoPE at byte 304", 432, f"b12x traits.py; {_NVFP4}", d_qk=576, rope_bytes=128
    ),
    Record(
        "indexer_fp8",
        "indexer key: 128 e4m3, 1 fp32 scale",
        (_data("values", 128, Encoding.E4M3), _scales("scales", 4, Encoding.FP32)),
        _SPLIT,
        ScaleRule.FP32,
        "vLLM 0.33.0 model_executor/layers/sparse_attn_indexer.py; SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py",
        scale_group=128,
    ),
    Record(
        "indexer_fp4",
        "indexer key: 128 e2m1 in 64 bytes, 4 UE8M0 scales",
        (_data("values", 64, Encoding.E2M1), _scales("scales", 4, Encoding.UE8M0)),
        _SPLIT,
        ScaleRule.UE8M0,
        "vLLM 0.33.0 model_executor/layers/sparse_attn_indexer.py; SGLang 0.5.23 mem_cache/deepseek_v4_memory_pool.py",
        scale_group=32,
    ),
    _state(512, "C4 indexer"),
    _state(1024, "C128, C2"),
    _state(1536, "C128 online: maximum, sum, key"),
    _state(2048, "C4"),
    _state(512, "C4 indexer", Encoding.BF16),
    _state(1024, "C128", Encoding.BF16),
    _state(2048, "C4", Encoding.BF16),
)

RECORDS: MappingProxyType[str, Record] = MappingProxyType({record.name: record for record in _ALL})
"""Every known record by name."""


def get_record(name: str | None) -> Record:
    """Looks a record up.

    Args:
        name: A key of `RECORDS`.

    Raises:
        RecordMissingError: `name` is None or empty; a record is never guessed from a width or a dtype.
        RecordUnknownError: No such record.
    """
    if not name:
        raise RecordMissingError("record", got=name or None, expected=f"one of {sorted(RECORDS)}")
    record = RECORDS.get(name)
    if record is None:
        raise RecordUnknownError("record", got=name, expected=f"one of {sorted(RECORDS)}")
    return record


def records_of_width(row_bytes: int) -> tuple[str, ...]:
    """Names of the records whose rows are `row_bytes` wide: a hint for messages, never a decision."""
    return tuple(record.name for record in _ALL for plane in record.planes if record.plane_bytes(plane) == row_bytes)
