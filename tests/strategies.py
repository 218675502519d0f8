"""Random layouts and tensors, right and wrong: one generator for a seeded loop and for hypothesis.

    Random(seed) -> case: record, declared layout, tensor in numbers     about half of them valid
    cases()      -> the same generator, driven by hypothesis, so that a failure shrinks

Records are tiny (a few bytes a row), so that an oracle can mark every byte of a pool; they cover both arrangements, one
to four fields, two planes and every element size. `tiny_records` makes them known while a test runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from kvbridge import records
from kvbridge.geometry import TensorShape
from kvbridge.layout import DTYPE_BYTES, DeclaredLayout, Padding, PaddingPolicy, PoolKind
from kvbridge.records import Arrangement, Encoding, Field, Record, ScaleRule

_BY_BYTES = {1: (Encoding.E4M3, Encoding.UE8M0, Encoding.E2M1), 2: (Encoding.BF16,), 4: (Encoding.FP32,)}


@dataclass(frozen=True)
class Case:
    """A declared layout and a tensor somebody claims to hold it.

    Attributes:
        layout: Fields as declared, right or wrong.
        tensor: Shape, strides, offset, storage and dtype, right or wrong.
    """

    layout: DeclaredLayout
    tensor: TensorShape


def _tiny_record(number: int) -> Record:
    rng = Random(number)
    widest = rng.choice((1, 1, 2, 4))
    planes = ("",) if rng.random() < 0.8 else ("values", "scales")
    fields: list[Field] = []
    uniform = rng.random() < 0.3
    for plane in planes:
        for place in range(rng.randint(1, 3)):
            encoding = rng.choice(_BY_BYTES[widest if uniform else rng.choice([1, widest])])
            block = "scales" if place and rng.random() < 0.5 else "data"
            # Multiples of the widest element keep every element aligned, as in the real records.
            fields.append(Field(f"{plane}{block}{place}", widest * rng.randint(1, 3), encoding, block, plane))
    arrangement = rng.choice((Arrangement.SPLIT, Arrangement.INTERLEAVED))
    if arrangement is Arrangement.SPLIT:
        fields.sort(key=lambda field: (planes.index(field.plane), field.block != "data"))
    return Record(f"tiny{number}", "test record", tuple(fields), arrangement, ScaleRule.NONE, "tests")


TINY = tuple(_tiny_record(number) for number in range(120))
"""Records of a few bytes."""


@contextmanager
def tiny_records() -> Iterator[None]:
    """Makes the tiny records known beside the real ones."""
    known = records.RECORDS
    records.RECORDS = MappingProxyType({**known, **{record.name: record for record in TINY}})
    try:
        yield
    finally:
        records.RECORDS = known


def random_layout(rng: Random, *, record: Record | None = None, valid: bool = False) -> DeclaredLayout:
    """A layout of a tiny record; one in three is wrong in one field, unless `valid`."""
    record = record or rng.choice(TINY)
    plane = rng.choice(record.planes) or None
    page_rows = rng.randint(1, 4)
    widest = record.element_bytes(plane)
    payload = page_rows * record.plane_bytes(plane)
    policy = rng.choice(tuple(PaddingPolicy))
    alignment = rng.choice((None, widest, 4 * widest, 12 * widest))
    if policy is PaddingPolicy.EXACT:
        alignment = rng.choice((None, payload, record.plane_bytes(plane)))
    elif policy is PaddingPolicy.ALIGNED:
        alignment = alignment or 8 * widest
    page = payload if policy is PaddingPolicy.EXACT or not alignment else -(-payload // alignment) * alignment
    foreign = widest * rng.randint(0, 12) if policy is PaddingPolicy.PACKED else 0
    num_pages = rng.choice((None, None, 0, 1, 2, 3, 4))
    fields: dict[str, Any] = {
        "record": record.name,
        "page_rows": page_rows,
        "tokens_per_row": rng.choice((1, 4, 128)),
        "payload_bytes": payload,
        "page_stride_bytes": page + foreign,
        "padding": Padding(policy=policy, alignment=alignment),
        "page_bytes": rng.choice((None, page)),
        "num_pages": num_pages,
        "reserved_pages": rng.choice((0, 0, min(1, num_pages if num_pages is not None else 1))),
        "kind": PoolKind.TOKEN_GRANULAR if page + foreign == payload and rng.random() < 0.3 else PoolKind.PAGED,
        "plane": plane,
    }
    if not valid and rng.random() < 1 / 3:
        field, value = rng.choice(_LAYOUT_MUTATIONS)(rng, fields)
        fields[field] = value
    return DeclaredLayout(**fields)


def _near(field: str) -> Callable[[Random, dict[str, Any]], tuple[str, Any]]:
    return lambda rng, fields: (field, (fields[field] or 0) + rng.choice((-9, -4, -1, 1, 2, 4, 13)))


_LAYOUT_MUTATIONS: tuple[Callable[[Random, dict[str, Any]], tuple[str, Any]], ...] = (
    _near("payload_bytes"),
    _near("page_stride_bytes"),
    _near("page_stride_bytes"),
    _near("page_bytes"),
    _near("page_rows"),
    lambda rng, fields: ("page_rows", rng.choice((0, -1))),
    lambda rng, fields: ("tokens_per_row", rng.choice((0, -1))),
    lambda rng, fields: ("num_pages", -1),
    lambda rng, fields: ("reserved_pages", rng.choice((-1, (fields["num_pages"] or 0) + 1))),
    lambda rng, fields: (
        "padding",
        Padding(policy=rng.choice(tuple(PaddingPolicy)), alignment=rng.choice((None, 1, 8, 16, 0, -4))),
    ),
    lambda rng, fields: ("dtype", rng.choice((*DTYPE_BYTES, "float16", "int64"))),
    lambda rng, fields: ("plane", rng.choice((None, "values", "scales", "other"))),
    lambda rng, fields: ("record", rng.choice((None, "", "fp8", "tiny0", "v4"))),
    lambda rng, fields: ("kind", rng.choice(tuple(PoolKind))),
)


def random_tensor(rng: Random, layout: DeclaredLayout, *, valid: bool = False) -> TensorShape:
    """A tensor for a layout; half of them are then changed in one place, unless `valid`."""
    record = records.RECORDS[layout.record or ""]
    row_bytes = record.plane_bytes(layout.plane)
    dtypes = [name for name, size in DTYPE_BYTES.items() if size == 1]
    encoding = record.uniform_encoding(layout.plane)
    if encoding is not None and encoding.value in DTYPE_BYTES and rng.random() < 0.5:
        dtypes = [encoding.value]
    dtype = rng.choice(dtypes)
    size = DTYPE_BYTES[dtype]
    num_pages = layout.num_pages if layout.num_pages is not None else rng.randint(layout.reserved_pages, 4)
    page_bytes = layout.page_bytes if layout.page_bytes is not None else layout.payload_bytes
    stride, rows = layout.page_stride_bytes, layout.page_rows
    width = row_bytes // size
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if layout.kind is PoolKind.TOKEN_GRANULAR:
        shapes = [((num_pages * rows, width), (row_bytes, size))]
        shapes.append(((num_pages * rows, 1, width), (row_bytes, rng.choice((row_bytes, size, 7)), size)))
    else:
        head = rng.choice((size, row_bytes, stride, 5))
        shapes = [
            ((num_pages, layout.payload_bytes // size), (stride, size)),
            ((num_pages, page_bytes // size), (stride, size)),
            ((num_pages, rows, width), (stride, row_bytes, size)),
            ((num_pages, 1, rows, width), (stride, head, row_bytes, size)),
            ((num_pages, rows, 1, width), (stride, row_bytes, head, size)),
        ]
    shape, strides = rng.choice(shapes)
    offset = record.element_bytes(layout.plane) * rng.randint(0, 9)
    extent = sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + size if min(shape) else 0
    tensor = TensorShape(shape, strides, offset, offset + extent + rng.choice((0, 0, 1, 5, 40)), dtype)
    if valid or rng.random() < 0.5:
        return tensor
    return rng.choice(_TENSOR_MUTATIONS)(rng, tensor, size)


def _change(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _stride(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    place = rng.randrange(len(tensor.shape))
    value = rng.choice((0, -tensor.stride_bytes[place], tensor.stride_bytes[place] + size * rng.choice((-2, -1, 1, 3))))
    return replace(tensor, stride_bytes=_change(tensor.stride_bytes, place, value))


def _size(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    place = rng.randrange(len(tensor.shape))
    value = tensor.shape[place] + rng.choice((-1, 1, 2))
    return replace(tensor, shape=_change(tensor.shape, place, value))


def _permute(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    order = list(range(len(tensor.shape)))
    rng.shuffle(order)
    strides = tuple(tensor.stride_bytes[place] for place in order)
    shape = tuple(tensor.shape[place] for place in order) if rng.random() < 0.5 else tensor.shape
    return replace(tensor, shape=shape, stride_bytes=strides)


def _storage(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    return replace(tensor, storage_bytes=max((tensor.storage_bytes or 0) - rng.randint(1, 40), 0))


def _offset(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    return replace(tensor, offset_bytes=tensor.offset_bytes + rng.choice((-10, -1, 1, 2, 3, 8)))


def _dtype(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    return replace(tensor, dtype=rng.choice((*DTYPE_BYTES, "float16", "bool")))


def _rank(rng: Random, tensor: TensorShape, size: int) -> TensorShape:
    if rng.random() < 0.5:
        return replace(tensor, shape=tensor.shape[1:], stride_bytes=tensor.stride_bytes[1:])
    place = rng.randrange(len(tensor.shape))
    return replace(
        tensor,
        shape=(*tensor.shape[:place], rng.choice((1, 2)), *tensor.shape[place:]),
        stride_bytes=(*tensor.stride_bytes[:place], 8, *tensor.stride_bytes[place:]),
    )


_TENSOR_MUTATIONS = (_stride, _stride, _size, _size, _permute, _storage, _storage, _offset, _dtype, _rank)


def random_case(rng: Random, *, valid: bool = False) -> Case:
    """A layout with a tensor of it; layouts that are wrong come with a tensor of the layout as it should have been."""
    state = rng.getstate()
    layout = random_layout(rng, valid=valid)
    if valid or rng.random() < 0.6:
        rng.setstate(state)
        layout = random_layout(rng, valid=True)
        return Case(layout, random_tensor(rng, layout, valid=valid))
    record = records.RECORDS.get(layout.record or "", TINY[0])
    right = random_layout(rng, record=record, valid=True)
    return Case(layout, random_tensor(rng, right))


def cases() -> st.SearchStrategy[Case]:
    """`random_case` driven by hypothesis."""
    return st.randoms(use_true_random=False).map(random_case)


def random_pages(rng: Random, num_pages: int) -> range | list[int]:
    """Page ids: a range, a shuffled set, or a list with repeats."""
    if not num_pages:
        return []
    kind = rng.randrange(3)
    if kind == 0:
        first = rng.randrange(num_pages)
        return range(first, num_pages, rng.randint(1, 3))
    if kind == 1:
        return rng.sample(range(num_pages), rng.randint(0, num_pages))
    return [rng.randrange(num_pages) for _ in range(rng.randint(0, 6))]
