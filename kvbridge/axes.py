"""Names of a tensor's axes, and the one shape that cannot do without them.

    [10, 64, 576]      pages, rows, row           64 rows are no K/V split: read as it stands
    [10,  2, 576]      pages, rows, row?          or pages, K/V, row: refused without names
    [10, 64, 1, 576]   B, N, H, C                 vLLM's letters: brought into the order B, H, N, C

An MLA cache has no K/V split and one head, so neither rank nor sizes say which reading a program had in mind.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge.errors import AxesError

_ROLES = {"pages": "pages", "B": "pages", "heads": "heads", "H": "heads", "rows": "rows", "N": "rows"}
_ROLES |= {"row": "row", "C": "row", "slots": "slots"}
AXIS_NAMES = tuple(_ROLES)
"""Names of axes: words, or vLLM's letters."""


def axis_order(names: Sequence[str] | None, *, shape: Sequence[int], token_granular: bool = False) -> list[int]:
    """The axes of a tensor in the order pages, heads, rows, row (or slots, heads, row).

    Args:
        names: A name for each axis; None where nobody named them.
        shape: Sizes.
        token_granular: Whether rows are slots rather than pages.

    Returns:
        Indices of axes; the given order where there are no names.

    Raises:
        AxesError: No names, and an axis of size 2 between pages and rows; or names that are unknown, missing, doubled
            or none of this kind of pool.
    """
    if names is None:
        if 2 in shape[1:-1]:
            raise AxesError(
                "axes",
                got=None,
                expected="names of the axes, such as ['pages', 'rows', 'row']",
                detail=f"shape {list(shape)}: the axis of size 2 may be a K/V split or a page of 2 rows",
            )
        return list(range(len(shape)))
    if len(names) != len(shape):
        raise AxesError("axes", got=list(names), expected=f"{len(shape)} names, one for each size")
    unknown = [name for name in names if name not in _ROLES]
    if unknown:
        raise AxesError(
            "axes", got=unknown[0], expected=f"one of {list(AXIS_NAMES)}", detail="an MLA cache has no K/V split"
        )
    roles = [_ROLES[name] for name in names]
    wanted = ("slots", "heads", "row") if token_granular else ("pages", "heads", "rows", "row")
    order = [roles.index(role) for role in wanted if role in roles]
    if len(order) != len(roles) or wanted[0] not in roles or "row" not in roles:
        raise AxesError("axes", got=list(names), expected=f"each at most once, among {list(wanted)}")
    return order
