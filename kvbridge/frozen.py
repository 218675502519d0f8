"""Frozen pydantic models that cost little to import and to fill with values that are already typed.

    Model(**fields), Model.model_validate(document)   pydantic checks every type; its validator is compiled at first use
    Model.built(**fields)                             names and invariants are checked, types are taken as they are

Compiling the validators of the contract's models takes longer than planning a whole manifest, and `inspect show` has
to answer at once. So planners, whose values this package computed, use `built`; documents and callers use pydantic.
"""

from __future__ import annotations

from enum import Enum, EnumType
from functools import cache
from typing import Any, NamedTuple, Self, cast

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of the contract's models."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def built(cls, **fields: Any) -> Self:
        """Builds from values whose types are right, without compiling a validator.

        Args:
            **fields: As in the constructor.

        Raises:
            TypeError: A field is unknown or missing, a number is no integer, or a choice is a bare text.
        """
        shape = _shape_of(cls)
        for name, value in fields.items():
            if name not in shape.kinds:
                raise TypeError(f"{cls.__name__}.{name}: got an unknown field, expected one of {sorted(shape.kinds)}")
            if isinstance(value, float | bool):
                raise TypeError(f"{cls.__name__}.{name}: got {value!r}, expected an integer")
            kind = shape.kinds[name]
            if kind is not None and not isinstance(value, kind):
                raise TypeError(f"{cls.__name__}.{name}: got {value!r}, expected a {kind.__name__}")
        for name in shape.required:
            if name not in fields:
                raise TypeError(f"{cls.__name__}.{name}: got nothing, expected a value")
        made = cast("Self", cls.model_construct(**fields))
        made._require_invariants()
        return made

    def _require_invariants(self) -> None:
        """Raises what the model's own validators would."""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values, as `model_dump(mode="json")` gives them, without compiling a serialiser."""
        return {name: _as_json(getattr(self, name)) for name in type(self).model_fields}


class _Shape(NamedTuple):
    """What `built` checks of a class: each field's enum, or None, and the fields without a default."""

    kinds: dict[str, type[Any] | None]
    required: tuple[str, ...]


@cache
def _shape_of(cls: type[Frozen]) -> _Shape:
    fields = cls.model_fields
    kinds = {
        name: field.annotation if isinstance(field.annotation, EnumType) else None for name, field in fields.items()
    }
    return _Shape(kinds, tuple(name for name, field in fields.items() if field.is_required()))


def _as_json(value: Any) -> Any:
    if isinstance(value, Frozen):
        return value.as_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value
