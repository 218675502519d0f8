"""Compiling the CUDA kernel without a GPU: key, privacy, digest, concurrent builders, ahead-of-time command."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings and nvidia-cuda-nvrtc are not installed")

from kvbridge.kernels import cuda_build, cuda_tiles, nvrtc
from kvbridge.kernels.cuda_tiles import ARCHITECTURES, Variant
from kvbridge.kernels.nvrtc import CudaBuildError
from kvbridge.kernels.private_cache import CacheFolderError

ROOT = Path(__file__).resolve().parents[2]
SMALL = Variant(cuda_tiles.formats_of(("v4",)), 8)
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBRIDGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(cuda_build.CUBIN_FOLDER_VARIABLE, raising=False)
    return tmp_path / "cache" / "cuda" / ARCH


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the ahead-of-time command filled: one small variant for every architecture."""
    out = tmp_path_factory.mktemp("cubins")
    command = [
        sys.executable,
        "-m",
        "kvbridge.kernels.cuda_build",
        "--out",
        str(out),
        "--heads",
        "8",
        "--records",
        "v4",
    ]
    # No driver and no toolkit: an empty PATH, and a libcuda that does not exist cannot be asked for anything.
    env = {**os.environ, "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith(f"{len(ARCHITECTURES)} cubins under")
    return out


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise CudaBuildError("NVRTC: got nothing")

    monkeypatch.setattr(nvrtc, "load_nvrtc", absent)


def test_second_build_comes_from_the_cache_and_nothing_is_left_behind(cache: Path) -> None:
    first, second = cuda_build.get_cubin(SMALL, ARCH), cuda_build.get_cubin(SMALL, ARCH)
    assert first.seconds > 0 and second.seconds == 0
    assert first.content == second.content and first.decode_symbol == second.decode_symbol
    assert first.content.startswith(b"\x7fELF") and not first.log
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert [file.suffix for file in sorted(cache.iterdir())] == [".cubin", ".json", ".lock"]


@pytest.mark.parametrize("damage", ["byte", "truncated", "empty", "note", "no note"])
def test_corrupted_cubin_is_rebuilt_not_loaded(cache: Path, damage: str) -> None:
    genuine = cuda_build.get_cubin(SMALL, ARCH)
    (cubin,), (note,) = cache.glob("*.cubin"), cache.glob("*.json")
    middle = len(genuine.content) // 2
    if damage == "byte":
        flipped = bytes([genuine.content[middle] ^ 1])
        cubin.write_bytes(genuine.content[:middle] + flipped + genuine.content[middle + 1 :])
    elif damage == "truncated":
        cubin.write_bytes(genuine.content[:middle])
    elif damage == "empty":
        cubin.write_bytes(b"")
    elif damage == "note":
        note.write_text("{")
    else:
        note.unlink()
    again = cuda_build.get_cubin(SMALL, ARCH)
    assert again.seconds > 0, "it was built again"
    assert again.content == cubin.read_bytes() == genuine.content
    assert cuda_build.get_cubin(SMALL, ARCH).seconds == 0


def test_two_processes_build_once_and_both_get_it(tmp_path: Path) -> None:
    script = f"""
import pathlib, sys, time
from kvbridge.kernels import cuda_build, nvrtc
from kvbridge.kernels.cuda_tiles import Variant
nvrtc.load_nvrtc()
mine, other = (pathlib.Path(sys.argv[1]) / name for name in sys.argv[2:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
cubin = cuda_build.get_cubin(Variant({SMALL.formats}, {SMALL.heads}), "{ARCH}")
print(cubin.seconds, len(cubin.content))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    pairs = (("one", "two"), ("two", "one"))
    running = [subprocess.Popen([*command, *pair], cwd=ROOT, stdout=subprocess.PIPE, text=True) for pair in pairs]
    results = [process.communicate(timeout=300)[0].split() for process in running]
    seconds, sizes = zip(*results, strict=True)
    assert sorted(float(each) > 0 for each in seconds) == [False, True], "one built, the other waited for it"
    assert sizes[0] == sizes[1]


def test_key_covers_sources_options_compiler_architecture_and_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cuda_build.cubin_key(SMALL, ARCH, "13.0")}
    keys.add(cuda_build.cubin_key(SMALL, "sm_80", "13.0"))
    keys.add(cuda_build.cubin_key(SMALL, ARCH, "13.1"))
    keys.add(cuda_build.cubin_key(Variant(SMALL.formats, 16), ARCH, "13.0"))
    keys.add(cuda_build.cubin_key(Variant(SMALL.formats, 8, stages=1), ARCH, "13.0"))
    sources = cuda_build.sources()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_build, "OPTIONS", (*cuda_build.OPTIONS, "-lineinfo"))
        keys.add(cuda_build.cubin_key(SMALL, ARCH, "13.0"))
    for name in sources:
        with monkeypatch.context() as patch:
            patch.setattr(cuda_build, "sources", lambda name=name: {**sources, name: sources[name] + "\n"})
            keys.add(cuda_build.cubin_key(SMALL, ARCH, "13.0"))
    assert len(keys) == 6 + len(sources)


def test_sources_are_the_files_that_the_root_includes_and_need_no_header() -> None:
    sources = cuda_build.sources()
    reached, waiting = set(), ["decode.cuh"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r'#include "([^"]+)"', sources[name].replace('#include "simt.h"', ""))
    assert reached == set(sources)
    device_half = sources["prim.cuh"].split("#else\n#include <cstdint>")[0]
    assert not re.findall(r"#include <", device_half + "".join(t for n, t in sources.items() if n != "prim.cuh"))


def test_foreign_folder_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: cache.parent.stat().st_uid + 1)
    with pytest.raises(CacheFolderError, match=r"cache folder .*: got owner \d+ .* set KVBRIDGE_CACHE_DIR"):
        cuda_build.get_cubin(SMALL, ARCH)


def test_folder_open_to_others_is_closed(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.parent.chmod(0o777)
    cuda_build.get_cubin(SMALL, ARCH)
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_ahead_of_time_folder_serves_machines_without_a_compiler(
    ahead: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cuda_build.CUBIN_FOLDER_VARIABLE, str(ahead))
    no_compiler(monkeypatch)
    for arch in ARCHITECTURES:
        cubin = cuda_build.get_cubin(SMALL, arch)
        assert cubin.content.startswith(b"\x7fELF") and cubin.seconds == 0
        assert "decode_kernel" in cubin.decode_symbol and "merge_kernel" in cubin.merge_symbol
    assert not cache.parent.exists(), "the private cache was not needed"


@pytest.mark.parametrize("why", ["other variant", "other sources", "corrupted"])
def test_what_the_folder_lacks_is_named_with_the_missing_compiler(
    ahead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(ahead, folder)
    monkeypatch.setenv(cuda_build.CUBIN_FOLDER_VARIABLE, str(folder))
    no_compiler(monkeypatch)
    sources, variant = cuda_build.sources(), SMALL
    if why == "other variant":
        variant = Variant(SMALL.formats, 16)
    elif why == "other sources":
        monkeypatch.setattr(cuda_build, "sources", lambda: {**sources, "decode.cuh": ""})
    else:
        for file in folder.glob("*/*.cubin"):
            file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CudaBuildError) as raised:
        cuda_build.get_cubin(variant, ARCH)
    expected = f"got no intact cubin of {variant.decode_name} for {ARCH} from the installed sources, and NVRTC"
    assert expected in str(raised.value)


def test_a_corrupted_ahead_of_time_cubin_is_built_again_where_there_is_a_compiler(
    ahead: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(ahead, folder)
    monkeypatch.setenv(cuda_build.CUBIN_FOLDER_VARIABLE, str(folder))
    (file,) = (folder / ARCH).glob("*.cubin")
    file.write_bytes(b"\x7fELF" + file.read_bytes()[4:-1] + b"!")
    cubin = cuda_build.get_cubin(SMALL, ARCH)
    assert cubin.seconds > 0 and cubin.content == next(cache.glob("*.cubin")).read_bytes() != file.read_bytes()


def test_ahead_of_time_notes_say_what_they_hold(ahead: Path) -> None:
    for arch in ARCHITECTURES:
        (note,) = [json.loads(file.read_text()) for file in (ahead / arch).glob("*.json")]
        assert (note["arch"], note["variant"], note["compiler"]) == (arch, repr(SMALL), nvrtc.compiler_version())


def test_default_set_covers_both_engines_records_on_every_architecture() -> None:
    for arch in ARCHITECTURES:
        variants = cuda_build.common_variants(arch)
        assert len(set(variants)) == len(variants)
        limit = cuda_tiles.shared_limit(cuda_build.capability_of(arch))
        assert all(variant.shared_bytes <= limit for variant in variants)
        read = 0
        for variant in variants:
            read |= variant.formats
        assert read == cuda_tiles.formats_of(tuple(cuda_tiles.FORMATS))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--arch", "gfx942"], "arch: got 'gfx942', expected a name such as sm_80 or sm_90a"),
        (["--records", "v4+mla_fp8"], "record: got 'mla_fp8', expected one of ['dsa'"),
        (
            ["--arch", "sm_75", "--heads", "8", "--records", "v4"],
            "compiling decode_kernel<1, 8, 32, 2> for sm_75: NVRTC_",
        ),
    ],
)
def test_command_names_what_it_cannot_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        cuda_build.main(["--out", str(tmp_path / "out"), *options])
    assert raised.value.code == 1
    assert text in capsys.readouterr().err


def test_an_empty_log_is_not_written_over_a_shared_object() -> None:
    cubin = cuda_build.compile_variant(SMALL, "sm_80")
    assert cubin.log == ""
    assert list(bytes([32])) == [32]


def test_compiler_errors_carry_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = cuda_build.sources()
    broken = {**sources, "finish.cuh": sources["finish.cuh"].replace("HeadState merged", "HeadStat merged")}
    monkeypatch.setattr(cuda_build, "sources", lambda: broken)
    with pytest.raises(CudaBuildError) as raised:
        cuda_build.compile_variant(SMALL, "sm_80")
    text = str(raised.value)
    assert text.startswith(f"compiling {SMALL.decode_name} for sm_80: NVRTC_ERROR_COMPILATION\n")
    assert 'identifier "HeadStat" is undefined' in text and "finish.cuh(" in text
