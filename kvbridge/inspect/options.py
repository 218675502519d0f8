"""Engine options on the command line: taken from the adapters, not written here.

    show glm-5.2 --engine vllm --block-size 64 -O kv-cache-dtype=fp8_ds_mla
                               ^^^^^^^^^^^^^^^ EngineOption("block-size", ...) of the adapter
                                               ^^ the same, spelt in one way for every option

An option reaches every chosen engine that knows it; one that no chosen engine knows is a usage error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.engine import Engine, EngineOption, OptionValue, engine_names, installed_version, load_engine
from kvbridge.inspect.command import Parser, UsageError
from kvbridge.inspect.terminal import remark

_SWITCH_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "1", "0"))


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and the version to plan for.

    Attributes:
        engine: The adapter.
        version: A version whose rules it knows.
        options: The options given that it knows.
    """

    engine: Engine
    version: str
    options: Mapping[str, OptionValue]


ENGINE_OPTION: dict[str, Any] = {
    "dest": "engine_options",
    "action": "append",
    "default": [],
    "metavar": "NAME=VALUE",
    "help": "engine option; `--NAME VALUE` does the same",
}
"""The argument `-O` of every command that plans or runs an engine."""


def add_engine_arguments(parser: Parser, *, memory: bool = True) -> None:
    """Adds `--engine`, `--engine-version`, `-O` and, for plans, `--memory`."""
    parser.add_argument("--engine", metavar="NAME", help="plan for this engine only, or show only its manifests")
    parser.add_argument(
        "--engine-version", metavar="VERSION", help="whose rules apply (default: the newest known); needs --engine"
    )
    parser.add_argument("-O", **ENGINE_OPTION)
    if memory:
        parser.add_argument(
            "--memory", metavar="SIZE", help="bytes for the KV cache, as 80GiB or 64e9: blocks and tokens that fit"
        )


def split_engine_options(tokens: list[str], parser: Parser) -> tuple[list[str], dict[str, OptionValue]]:
    """Takes `--NAME VALUE` of registered engines out of a command line.

    Args:
        tokens: Command line behind the command.
        parser: Knows its own options; those win.

    Returns:
        The other tokens, and the options by name.
    """
    own = parser.option_names()
    if not {"-h", "--help"}.isdisjoint(tokens):
        parser.explain(_options_help())
    if not any(token.startswith("--") and token != "--" and token.split("=")[0] not in own for token in tokens):
        return tokens, {}
    known = known_options()
    rest: list[str] = []
    found: dict[str, OptionValue] = {}
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        name, equals, value = token[2:].partition("=")
        if token == "--":
            rest += tokens[position - 1 :]
            break
        if not token.startswith("--") or token.split("=")[0] in own or name not in known:
            rest.append(token)
            continue
        following = tokens[position] if position < len(tokens) else ""
        if equals:
            found[name] = value
        elif all(isinstance(option.default, bool) for option in known[name]):
            if following.lower() in _SWITCH_WORDS:
                position += 1
            found[name] = following.lower() if following.lower() in _SWITCH_WORDS else True
        elif position < len(tokens):
            found[name] = following
            position += 1
        else:
            raise UsageError(f"--{name}: got no value, expected one\nsee: {parser.prog} --help")
    return rest, found


def _options_help() -> str:
    import textwrap

    lines = []
    for name in engine_names():
        names = ", ".join(f"--{option.name}" for option in load_engine(name).options)
        lines.append(f"engine options of {name} (`engines {name}` explains them):")
        lines += textwrap.wrap(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def known_options() -> dict[str, list[EngineOption]]:
    """Options of all registered engines by name; two engines may share one."""
    known: dict[str, list[EngineOption]] = {}
    for name in engine_names():
        for option in load_engine(name).options:
            known.setdefault(option.name, []).append(option)
    return known


def parse_assignments(assignments: Iterable[str]) -> dict[str, OptionValue]:
    """Reads `-O NAME=VALUE`."""
    found: dict[str, OptionValue] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise UsageError(f"-O: got {assignment!r}, expected NAME=VALUE")
        found[name.removeprefix("--")] = value
    return found


def choose_engines(name: str | None, *, version: str | None, options: Mapping[str, OptionValue]) -> tuple[Choice, ...]:
    """The engines to plan for.

    Args:
        name: One engine, or None for all registered.
        version: Version for that one engine; an unknown one is replaced by the nearest known, with a remark.
        options: Options given.

    Raises:
        UsageError: A version for several engines, or an option that none of them knows.
        EngineError: No such engine.
    """
    if version is not None and name is None:
        raise UsageError(f"--engine-version: got {version!r} for several engines, expected --engine NAME beside it")
    engines = [load_engine(entry) for entry in ([name] if name else engine_names())]
    known = {engine.name: {option.name for option in engine.options} for engine in engines}
    for option in options:
        takers = [engine for engine, names in known.items() if option in names]
        if not takers:
            expected = {engine: sorted(names) for engine, names in known.items()}
            listed = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in expected.items())
            raise UsageError(f"option {option}: got an option that no chosen engine has, expected one of {listed}")
        if len(takers) < len(engines):
            remark(f"--{option} reaches {', '.join(takers)} only")
    return tuple(
        Choice(
            engine,
            engine.versions[-1] if version is None else nearest_version(engine, version),
            {option: value for option, value in options.items() if option in known[engine.name]},
        )
        for engine in engines
    )


def nearest_version(engine: Engine, version: str) -> str:
    """The known version whose rules are nearest: the newest that is not newer, else the oldest; says so if not equal.

    Raises:
        UsageError: No version number.
    """
    if version in engine.versions:
        return version
    from packaging.version import InvalidVersion, Version

    try:
        wanted = Version(version)
    except InvalidVersion:
        raise UsageError(
            f"--engine-version: got {version!r}, expected a version number such as {engine.versions[-1]}"
        ) from None
    older = [known for known in engine.versions if Version(known) <= wanted]
    nearest = older[-1] if older else engine.versions[0]
    remark(
        f"warning: {engine.name} {version} is not among the versions read ({', '.join(engine.versions)}); "
        f"using the rules of {nearest}"
    )
    return nearest


def describe_installed() -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """Every registered engine: name, version in this interpreter or None, versions whose rules are known."""
    for name in engine_names():
        engine = load_engine(name)
        yield name, installed_version(engine), engine.versions


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_memory(text: str | None) -> int | None:
    """Reads a size in bytes: `80GiB`, `80G` (the same), `80GB` (decimal), `85899345920`.

    Raises:
        UsageError: No size, or one outside 1 byte to 8 EiB.
    """
    if text is None:
        return None
    from decimal import Decimal, InvalidOperation

    number = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(number) :]
    try:
        size = Decimal(number.strip()) * _UNITS[unit]
        if size.is_finite() and 1 <= size < 2**63:
            return int(size)
    except (InvalidOperation, KeyError):
        pass
    raise UsageError(f"--memory: got {text!r}, expected a size such as 80GiB, 80GB or 85899345920")
