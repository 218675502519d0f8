"""What the core knows of an engine: a name behind the entry-point group `kvbridge.engines`, loaded when asked for.

    [project.entry-points."kvbridge.engines"]
    vllm = "kvbridge.engines.vllm:ENGINE"        # any package may register another

The core imports no engine. An `Engine` plans without its engine installed; only `capture` and `parity` need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvbridge.entry_points import find_entry_points
from kvbridge.errors import KVBridgeError

if TYPE_CHECKING:
    from kvbridge.manifest import Manifest
    from kvbridge.models import ModelConfig

GROUP = "kvbridge.engines"
"""Entry-point group under which engines register."""

OptionValue = str | int | bool


class EngineError(KVBridgeError):
    """A request an engine adapter cannot serve: unknown option, unsupported model. The command exits with 2."""


class EngineMissingError(KVBridgeError):
    """The engine itself is not installed in this interpreter. The command exits with 3."""


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One option of an engine that decides a layout.

    Attributes:
        name: As on the engine's own command line, without dashes in front: `block-size`, `kv-cache-dtype`.
        default: Value when not given.
        choices: Allowed values; empty for any of the default's type.
        help: One line.
    """

    name: str
    default: OptionValue
    help: str
    choices: tuple[OptionValue, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan.

    Attributes:
        model: The model's KV caches.
        version: Engine version whose rules apply.
        options: Engine options by name; those missing have their defaults.
        memory_bytes: Bytes given to the KV cache on one rank; None to leave page counts open.
    """

    model: ModelConfig
    version: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    memory_bytes: int | None = None


@runtime_checkable
class Engine(Protocol):
    """An engine adapter."""

    @property
    def name(self) -> str:
        """Name in manifests and on the command line."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that provide the engine, preferred first."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions whose rules were read and tested, oldest first; the last is the default."""

    @property
    def options(self) -> tuple[EngineOption, ...]:
        """Options that decide layouts."""

    def plan(self, request: PlanRequest) -> Manifest:
        """Computes the manifest the engine would allocate. Imports neither the engine nor torch.

        Raises:
            EngineError: The model or an option is not supported.
        """

    def capture(self, *, model: Path, options: Mapping[str, OptionValue]) -> Manifest:
        """Runs the engine's own allocator and reads the tensors.

        Raises:
            EngineMissingError: The engine is not installed in this interpreter.
            EngineError: The model or an option is not supported.
        """

    def parity(self, *, options: Mapping[str, OptionValue]) -> Mapping[str, Any]:
        """Compares the engine's kernel with kvbridge's on the engine's own calls.

        Raises:
            EngineMissingError: The engine is not installed in this interpreter.
        """


def engine_names() -> tuple[str, ...]:
    """Names of the registered engines, sorted; loads none."""
    return tuple(sorted({entry.name for entry in find_entry_points(GROUP)}))


def load_engine(name: str) -> Engine:
    """Loads one registered engine adapter.

    Raises:
        EngineError: Nobody registered that name, or what is registered is no engine.
    """
    for entry in find_entry_points(GROUP):
        if entry.name == name:
            engine = entry.load()
            if not isinstance(engine, Engine):
                raise EngineError(f"engine {name}: got {engine!r}, expected an object with plan, capture and parity")
            return engine
    raise EngineError(f"engine: got {name!r}, expected one of {list(engine_names())}")


def installed_version(engine: Engine) -> str | None:
    """Version of the engine in this interpreter, or None; the engine is not imported."""
    from importlib.metadata import PackageNotFoundError, version

    for package in engine.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def resolve_options(engine: Engine, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """All options of an engine with the given ones put in; text is converted to the default's type.

    Raises:
        EngineError: An unknown option, a value of the wrong type, or one that is not among the choices.
    """
    known = {option.name: option for option in engine.options}
    for name in given:
        if name not in known:
            raise EngineError(f"option {name}: got an unknown option of {engine.name}, expected one of {sorted(known)}")
    resolved: dict[str, OptionValue] = {}
    for name, option in known.items():
        value = _convert(option, given.get(name, option.default))
        if option.choices and value not in option.choices:
            raise EngineError(f"option {name}: got {value!r}, expected one of {list(option.choices)}")
        resolved[name] = value
    return resolved


def _convert(option: EngineOption, value: OptionValue) -> OptionValue:
    if isinstance(value, str) and not isinstance(option.default, str):
        if isinstance(option.default, bool):
            if value.lower() in ("true", "1", "yes", "on"):
                return True
            if value.lower() in ("false", "0", "no", "off"):
                return False
            raise EngineError(f"option {option.name}: got {value!r}, expected true or false")
        try:
            return int(value)
        except ValueError:
            raise EngineError(f"option {option.name}: got {value!r}, expected an integer") from None
    if type(value) is not type(option.default):
        raise EngineError(f"option {option.name}: got {value!r}, expected a {type(option.default).__name__}")
    return value
