"""NVRTC through cuda.bindings: CUDA C++ text in memory to a cubin, without headers, toolkit or GPU.

root text + {name: header text} + options  --nvrtcCompileProgram-->  cubin, mangled names, log
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvbridge.kernels.errors import KernelError


class CudaBuildError(KernelError):
    """NVRTC is missing, or refused the sources: what failed, for which architecture, and the compiler's log."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a compilation gave.

    Attributes:
        content: ELF image.
        symbols: Mangled names, in the order asked for.
        log: What the compiler printed; empty when all is well.
        seconds: Time it took.
    """

    content: bytes
    symbols: tuple[str, ...]
    log: str
    seconds: float


def load_nvrtc() -> Any:
    """Imports NVRTC's binding.

    Raises:
        CudaBuildError: `cuda-bindings` or the library is missing; both come with torch's CUDA builds.
    """
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CudaBuildError(
            f"NVRTC: got {error}, expected cuda-bindings 13 and nvidia-cuda-nvrtc 13 (torch's CUDA builds bring both)"
        ) from error
    return nvrtc


def compiler_version() -> str:
    """NVRTC's version, `13.0`."""
    nvrtc = load_nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def compile_program(
    root: str, *, headers: Mapping[str, str], names: tuple[str, ...], options: tuple[str, ...], what: str
) -> Program:
    """Compiles one program.

    Args:
        root: Text of the main file.
        headers: Text of every file it may include, by name.
        names: C++ names of the kernels wanted, template arguments included.
        options: Of NVRTC; the architecture is one of them.
        what: What is compiled, and for what; starts the message of an error.

    Raises:
        CudaBuildError: The compiler's log is in the message.
    """
    nvrtc = load_nvrtc()
    started = time.perf_counter()
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            root.encode(),
            b"kvbridge.cu",
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        ),
        f"nvrtcCreateProgram for {what}",
    )
    try:
        for name in names:
            _checked(nvrtc, nvrtc.nvrtcAddNameExpression(program, name.encode()), f"nvrtcAddNameExpression {name}")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(nvrtc, program, "ProgramLog").decode(errors="replace")
        if int(status):
            raise CudaBuildError(f"compiling {what}: {status.name}\n{log}")
        content = _read(nvrtc, program, "CUBIN")
        symbols = tuple(
            _checked(nvrtc, nvrtc.nvrtcGetLoweredName(program, name.encode()), f"nvrtcGetLoweredName {name}").decode()
            for name in names
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Program(content, symbols, log.strip("\0 \n"), time.perf_counter() - started)


def _read(nvrtc: Any, program: Any, kind: str) -> bytes:
    size: int = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program), f"nvrtcGet{kind}Size")
    # One byte more than is written: Python shares one object for each bytes of length 1, and an empty log is that long.
    buffer = b" " * (size + 1)
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer), f"nvrtcGet{kind}")
    return buffer[:size]


def _checked(nvrtc: Any, returned: tuple[Any, ...], action: str) -> Any:
    status, *values = returned
    if int(status):
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise CudaBuildError(f"{action}: {status.name} ({text.decode() if isinstance(text, bytes) else text})")
    return values[0] if values else None
