"""What is checked, and how to mend it, for every rule that is an exception.

    code  ->  (what is compared with what, what to change)

Title and consequence of such a rule come from its class in `errors.py`.
"""

from __future__ import annotations

ADVICE = {
    "layout": (
        "The root of all rules on layouts.",
        "Change the declaration, or the allocation, to the value expected.",
    ),
    "record-missing": (
        "Every layout and every declared tensor names its record; widths and dtype names fit several.",
        "Name the record; the dtype name and the row width do not decide it.",
    ),
    "record-unknown": (
        "A record is looked up by its name, and only records with a source are known.",
        "Use a record name that `show` prints, or define the record in records.py with its source.",
    ),
    "record-width": (
        "The bytes of a tensor's row, or page, against those of the record.",
        "Declare the record that the rows really hold, or allocate rows of that record's bytes.",
    ),
    "record-mismatch": (
        "A copy moves bytes and decodes nothing, so fields, encodings and scales must be the same on both sides.",
        "Decode and encode again, or copy between layouts of one record (its split and interleaved forms included).",
    ),
    "codec": (
        "Only records whose encoding was read in a source are decoded, and values must fit the record.",
        "Use a decodable record, and values of its d_qk.",
    ),
    "plane": (
        "Records spread over several tensors have one layout for each, named by its plane.",
        "Name the plane of a record spread over several tensors; leave it out for all others.",
    ),
    "page-rows": (
        "Rows of a page are counted by the pool, not by the server's page of tokens.",
        "Declare the rows that one page of the tensor holds (not the tokens of a server-level page).",
    ),
    "page-split": (
        "In a split page all scales follow all data, so a page of 256 rows is not four pages of 64.",
        "Declare the page as it was written, or copy it row by row into pages of the other size.",
    ),
    "tokens-per-row": (
        "Compressed rows stand for 1, 2, 4 or 128 tokens.",
        "Declare how many tokens one row stands for: 1, 2, 4 or 128.",
    ),
    "payload": (
        "payload_bytes = page_rows * record bytes, without padding.",
        "Declare page_rows times the record's bytes.",
    ),
    "stride-overlap": (
        "Page starts must be at least a payload apart, for tensors of every rank.",
        "Allocate pages at least payload_bytes apart.",
    ),
    "page-stride": (
        "The distance between page starts against the declared one; copy size and stride are two fields.",
        "Declare the tensor's own stride(0), in bytes; never the copy size.",
    ),
    "padding-policy": (
        "exact: stride = payload. aligned: stride = page = payload rounded up. packed: the page lies in a slab.",
        "Declare what the engine declares: exact, aligned with its alignment, or packed.",
    ),
    "page-not-dense": (
        "Inside a page every byte follows the one before; only the page axis may be strided.",
        "Pass the allocator's view; only the page axis may be strided.",
    ),
    "storage-overrun": (
        "offset + (pages - 1) * stride + payload <= storage.",
        "Expose payload_bytes of each page, not the whole stride; or allocate the missing bytes.",
    ),
    "base-alignment": (
        "Bases and strides are multiples of the widest element of a row.",
        "Start the pages at a multiple of the widest element.",
    ),
    "dtype": (
        "Pages are bytes: one-byte dtypes, or the dtype that all fields of a row share.",
        "Pass the bytes as uint8 or another one-byte dtype.",
    ),
    "rank": (
        "Shapes of two to four dimensions have a known reading.",
        "Pass [pages, bytes], [pages, rows, row] or one of those with a head axis of size 1.",
    ),
    "axes-ambiguous": (
        "An axis of size 2 between pages and rows fits two readings; no rank or size decides.",
        "Name the axes: pages, heads, rows, row (or B, H, N, C).",
    ),
    "page-count": (
        "Pages declared against the tensor's; reserved pages against both.",
        "Declare the pages that the tensor has.",
    ),
    "kind": (
        "An index-only pool hands out slots and owns no bytes; all others own some.",
        "Declare index_only with 0 bytes, or the pool's real bytes.",
    ),
    "derived-mismatch": (
        "tail_pad_bytes, foreign_bytes and waste_bytes follow from the other fields.",
        "Leave derived figures out, or write what follows from the other fields.",
    ),
    "view-stale": (
        "A view remembers the storage it was made for: its address and its size.",
        "Bind the tensor again after the memory was moved.",
    ),
    "bound-view": (
        "vLLM cuts a layer's pages into kernel blocks where those are smaller; such a view spans other layers' pages.",
        "Use the view the allocator, or a connector, was given.",
    ),
    "slot-bounds": (
        "A slot is page * page_rows + row, compared before any narrowing; 2**32 + 5 is out of bounds, not 5.",
        "Send slots below num_pages times page_rows, and -1 for none.",
    ),
    "span": (
        "What an operation touches against what its layer, or its group, owns.",
        "Touch payload_bytes of each page; clear a whole block only for blocks that the group owns.",
    ),
}
"""(explanation, fix) by code."""
