"""The kernel cache: what it stores, which files it rejects, and that disk errors never prevent a compilation."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashtile.runtime import cache, nvrtc, toolchain
from flashtile.runtime.cache import CacheWarning, KernelCache, compile_cached
from flashtile.runtime.nvrtc import Compiled, CompileError

SOURCE = '#include "factor.cuh"\ntemplate <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N * FACTOR; }\n'
UNIT = (SOURCE, "sm_90", ["scale<4>"], ["NAME=1"])
KEY = KernelCache.key(["a kernel"])
KERNEL = Compiled("sm_90a", bytes(range(256)) * 10, {"f<1>": "_Z1fILi1EEvv"}, "the log: ü\n")
HEADERS = nvrtc.INCLUDE  # before a test replaces it


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache directory, a header tree for tests, and a process without cached state."""
    forget()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "factor.cuh").write_text("#define FACTOR 2\n")
    monkeypatch.setattr(nvrtc, "INCLUDE", tmp_path / "include")
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHTILE_CACHE", raising=False)
    yield
    forget()


def forget():
    """Clears all in-process state, as in a new process."""
    cache._memory.clear()
    cache._warned.clear()
    cache._toolchain_digest.cache_clear()
    cache._remove_stale.cache_clear()
    cache._known_headers.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """Records the architecture of every compilation."""
    done, real = [], nvrtc.compile_source

    def counted(toolchain, source, arch, names, defines=()):
        done.append(arch)
        return real(toolchain, source, arch, names, defines)

    monkeypatch.setattr(nvrtc, "compile_source", counted)
    return done


def kernel_file(tmp_path, key=KEY) -> Path:
    return tmp_path / "cache" / f"{key}.kernel"


def quietly(function, *arguments):
    """Returns the result of a call that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments)


# The directory


def test_directory_from_the_environment(monkeypatch, tmp_path):
    assert KernelCache.default().directory == tmp_path / "cache"
    monkeypatch.delenv("FLASHTILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert KernelCache.default().directory == tmp_path / "xdg" / "flashtile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert KernelCache.default().directory == tmp_path / "home" / ".cache" / "flashtile"


def test_the_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", "~/kernels")
    assert KernelCache.default().directory == tmp_path / "home" / "kernels"
    monkeypatch.delenv("FLASHTILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert KernelCache.default().directory == tmp_path / "home" / "xdg" / "flashtile"
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", "~a-user-that-is-not-there/kernels")
    with pytest.warns(CacheWarning, match="no home directory"):
        assert KernelCache.default().directory is None


def test_no_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHTILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="no home directory.*Set FLASHTILE_CACHE_DIR"):
        assert KernelCache.default().directory is None
    quietly(KernelCache.default().store, KEY, KERNEL)
    assert os.listdir(tmp_path) == ["include"]


def test_disk_cache_turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHTILE_CACHE", "0")
    quietly(KernelCache.default().store, KEY, KERNEL)
    assert quietly(KernelCache.default().load, KEY) is None
    assert not (tmp_path / "cache").exists()


def test_a_switch_of_the_cache_is_0_or_1(monkeypatch):
    monkeypatch.setenv("FLASHTILE_CACHE", "false")
    with pytest.raises(ValueError, match="FLASHTILE_CACHE: got 'false'; accepted: 0 or 1"):
        KernelCache.default()


def test_round_trip_in_a_closed_directory(tmp_path):
    assert quietly(KernelCache.default().load, KEY) is None
    quietly(KernelCache.default().store, KEY, KERNEL)
    assert quietly(KernelCache.default().load, KEY) == KERNEL
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert kernel_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "cache") == [f"{KEY}.kernel"]


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_open_to_others_is_not_used(tmp_path, mode):
    KernelCache.default().store(KEY, KERNEL)
    (tmp_path / "cache").chmod(mode)
    with pytest.warns(CacheWarning, match=rf"is not used \(its mode 0{mode:o} lets others in; run chmod 700") as caught:
        assert KernelCache.default().load(KEY) is None
    assert len(caught) == 1
    quietly(KernelCache.default().store, "0" * 64, KERNEL)
    assert os.listdir(tmp_path / "cache") == [f"{KEY}.kernel"]


def test_a_directory_of_another_user_is_not_used(monkeypatch):
    KernelCache.default().store(KEY, KERNEL)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(CacheWarning, match=f"is not used .it belongs to user {owner}") as caught:
        assert KernelCache.default().load(KEY) is None
    assert len(caught) == 1
    quietly(KernelCache.default().store, KEY, KERNEL)


def test_a_file_of_another_user_is_not_used(monkeypatch):
    KernelCache.default().store(KEY, KERNEL)
    real = os.fstat
    monkeypatch.setattr(
        os,
        "fstat",
        lambda descriptor: os.stat_result((*real(descriptor)[:4], os.geteuid() + 1, *real(descriptor)[5:10])),
    )
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert KernelCache.default().load(KEY) is None


def test_a_directory_that_cannot_be_made(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(CacheWarning, match=r"is not used .*Not a directory.*kernels stay in memory") as caught:
        assert compile_cached(*UNIT) is compile_cached(*UNIT)
    assert len(caught) == 1
    assert compilations == ["sm_90"]


# Bad files and bad disks


def damaged(data: bytes, damage: str) -> bytes:
    if damage == "empty":
        return b""
    if damage == "short header":
        return data[:20]
    if damage == "truncated":
        return data[:-1]
    if damage == "one bit":
        return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    if damage == "another format":
        return data[:8] + b"\xff" + data[9:]
    assert damage == "foreign"
    return b"\x7fELF" + data


@pytest.mark.parametrize("damage", ["empty", "short header", "truncated", "one bit", "another format", "foreign"])
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, damage):
    store = KernelCache.default()
    store.store(KEY, KERNEL)
    kernel_file(tmp_path).write_bytes(damaged(kernel_file(tmp_path).read_bytes(), damage))
    with pytest.warns(CacheWarning, match=f"{KEY}.kernel is not usable") as caught:
        assert store.load(KEY) is None
    assert len(caught) == 1
    assert quietly(store.load, KEY) is None
    quietly(store.store, KEY, KERNEL)
    assert quietly(store.load, KEY) == KERNEL


def test_no_single_wrong_byte_passes(tmp_path):
    small = Compiled("sm_90", b"cubin", {"f": "g"}, "")
    store = KernelCache.default()
    store.store(KEY, small)
    whole = kernel_file(tmp_path).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position in range(len(whole)):
            kernel_file(tmp_path).write_bytes(
                whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :]
            )
            assert store.load(KEY) is None
            kernel_file(tmp_path).write_bytes(whole[:position])
            assert store.load(KEY) is None


def test_a_file_under_the_wrong_key_is_a_miss(tmp_path):
    KernelCache.default().store(KEY, KERNEL)
    other = KernelCache.key(["another kernel"])
    kernel_file(tmp_path).rename(kernel_file(tmp_path, other))
    with pytest.warns(CacheWarning, match="stored under another key"):
        assert KernelCache.default().load(other) is None


@pytest.mark.parametrize(
    "head",
    [
        b"not JSON",
        b"\xff\xfe",
        b"[1, 2]",
        b"{}",
        b'{"key": "KEY"}',
        b'{"key": "KEY", "arch": "sm_90", "symbols": [], "log": ""}',
        b'{"key": 3, "arch": "sm_90", "symbols": {}, "log": ""}',
        b'{"key": "KEY", "arch": "sm_90", "symbols": {}, "log": null, "digest": null}',
        b"[" * 100_000,
    ],
    ids=lambda head: head[:20].decode(errors="replace"),
)
def test_a_valid_checksum_over_malformed_content_is_a_miss(tmp_path, head):
    """Files of another program, or of another version, with a right header."""
    (tmp_path / "cache").mkdir(mode=0o700)
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"one")
    state = library.stat()
    names = {
        "kernel": KEY,
        "toolchain": KernelCache.key([f"{library} {state.st_size} {state.st_mtime_ns}"]),
    }
    for ending, key in names.items():
        payload = cache._LENGTH.pack(len(head)) + head.replace(b"KEY", key.encode()) + b"cubin"
        header = cache._HEADER.pack(cache._MAGIC, cache._FORMAT, hashlib.sha256(payload).digest())
        (tmp_path / "cache" / f"{key}.{ending}").write_bytes(header + payload)
    with pytest.warns(CacheWarning, match="is not usable"):
        assert KernelCache.default().load(KEY) is None
    found = toolchain.Toolchain(str(library))
    with pytest.warns(CacheWarning, match="toolchain is not usable"):
        assert KernelCache.default().toolchain_digest(found) == found.digest


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    old, new, foreign = (folder / name for name in (f".{KEY}.kernel.a1", f".{KEY}.toolchain.b2", ".keep.this.file"))
    for path in (old, new, foreign):
        path.write_bytes(b"half of a ker")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    KernelCache.default().store(KEY, KERNEL)
    assert {path.name for path in folder.iterdir()} == {new.name, foreign.name, f"{KEY}.kernel"}


def test_an_unreadable_file_is_a_miss(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    kernel_file(tmp_path).mkdir()
    with pytest.warns(CacheWarning, match="is not usable"):
        assert KernelCache.default().load(KEY) is None
    with pytest.warns(CacheWarning, match="cannot write"):
        KernelCache.default().store(KEY, KERNEL)


def make_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 1 << 40)  # takes no room on the disk


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize(
    ("make", "reason"),
    [(make_pipe, "not a regular file"), (make_endless, "not a regular file"), (make_huge, "more than 268435456 bytes")],
)
@pytest.mark.parametrize("kind", ["kernel", "toolchain"])
def test_only_files_of_a_bounded_size_are_read(tmp_path, make, reason, kind):
    """In a process of its own, whose memory is limited: one that waits or reads without end is a failure, too."""
    name = f"{KEY}.{kind}"
    cached = KernelCache.default()
    cached.store(KEY, KERNEL)
    (tmp_path / "cache" / name).unlink(missing_ok=True)
    make(tmp_path / "cache" / name)
    load = f"found._read({name!r}, {KEY!r}, {{}})"
    code = f"""if 1:
        import resource, signal
        from flashtile.runtime.cache import KernelCache
        signal.alarm(300)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
        found = KernelCache.default()
        assert {load} is None
        print([(kernel.flashtile, kernel.num_bytes) for kernel in found.stored()])
    """
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert reason in done.stderr
    if kind == "kernel":
        size = (tmp_path / "cache" / name).lstat().st_size
        assert done.stdout.strip() == str([("", size)])
        cached.store(KEY, KERNEL)
        assert quietly(cached.load, KEY) == KERNEL


@pytest.mark.parametrize("failing", ["mkstemp", "write", "replace"])
def test_a_failing_write_costs_one_warning(monkeypatch, tmp_path, compilations, failing):
    def refuse(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "mkstemp":
        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    elif failing == "replace":
        monkeypatch.setattr(os, "replace", refuse)
    else:
        # A file whose writes fail, as on a full disk
        real = os.fdopen
        monkeypatch.setattr(
            os,
            "fdopen",
            lambda descriptor, mode: (os.close(descriptor), real(os.open("/dev/full", os.O_WRONLY), mode))[1],
        )
    with pytest.warns(CacheWarning, match=r"cannot write to .*No space left on device.*stay in memory") as caught:
        first = compile_cached(*UNIT)
    assert len(caught) == 1
    quietly(compile_cached, SOURCE, "sm_80", ["scale<4>"])
    assert quietly(compile_cached, *UNIT) is first
    assert compilations == ["sm_90", "sm_80"]
    # No partial file remains
    assert os.listdir(tmp_path / "cache") == []


# Compiling through the cache


def test_memory_then_disk(tmp_path, compilations):
    first = quietly(compile_cached, *UNIT)
    assert quietly(compile_cached, *UNIT) is first
    forget()
    second = quietly(compile_cached, *UNIT)
    assert second is not first
    assert second == first
    assert compilations == ["sm_90"]


def test_a_warm_process_neither_opens_nor_hashes_the_compiler(monkeypatch, compilations):
    first = compile_cached(*UNIT)
    forget()
    found = toolchain.Toolchain(toolchain.find().path)
    monkeypatch.setattr(toolchain, "find", lambda: found)
    assert compile_cached(*UNIT) == first
    assert {"library", "digest", "version"}.isdisjoint(vars(found))


def test_a_damaged_kernel_is_compiled_again(tmp_path, compilations):
    first = compile_cached(*UNIT)
    (path,) = (tmp_path / "cache").glob("*.kernel")
    path.write_bytes(path.read_bytes()[:-8])
    forget()
    with pytest.warns(CacheWarning, match="corrupted or truncated"):
        assert compile_cached(*UNIT).cubin == first.cubin
    forget()
    assert quietly(compile_cached, *UNIT).cubin == first.cubin
    assert len(compilations) == 2


def test_a_damaged_toolchain_digest_is_replaced(tmp_path, compilations):
    compile_cached(*UNIT)
    (path,) = (tmp_path / "cache").glob("*.toolchain")
    path.write_bytes(path.read_bytes().replace(b'"digest": "', b'"digest": "0')[:-1])
    forget()
    with pytest.warns(CacheWarning, match=r"toolchain is not usable"):
        compile_cached(*UNIT)
    assert len(compilations) == 1


def test_the_toolchain_digest_follows_the_library(tmp_path):
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"one")
    store = KernelCache.default()
    first = store.toolchain_digest(toolchain.Toolchain(str(library)))
    assert store.toolchain_digest(toolchain.Toolchain(str(library))) == first
    library.write_bytes(b"two, longer")
    assert store.toolchain_digest(toolchain.Toolchain(str(library))) not in (first, "")


@pytest.mark.parametrize("name", ["NVRTC_APPEND_FLAGS", "NVRTC_PREPEND_FLAGS", "NVVM_IR_VER_CHK"])
def test_what_the_compiler_reads_from_the_environment_is_in_the_key(monkeypatch, compilations, name):
    monkeypatch.setenv(name, "--use_fast_math")
    compile_cached(*UNIT)
    forget()
    monkeypatch.delenv(name)
    compile_cached(*UNIT)
    assert len(compilations) == 2  # the first kernel was not served
    forget()
    monkeypatch.setenv(name, "--use_fast_math")
    compile_cached(*UNIT)
    assert len(compilations) == 2


def test_the_key_follows_everything_that_reaches_the_compiler(tmp_path, compilations, monkeypatch):
    def keys():
        return {path.name for path in (tmp_path / "cache").glob("*.kernel")}

    compile_cached(*UNIT)
    for count, unit in enumerate(
        [
            (SOURCE + "//", "sm_90", ["scale<4>"], ["NAME=1"]),
            (SOURCE, "sm_90a", ["scale<4>"], ["NAME=1"]),
            (SOURCE, "sm_90", ["scale<5>"], ["NAME=1"]),
            (SOURCE, "sm_90", ["scale<4>"], ["NAME=2"]),
        ],
        start=2,
    ):
        compile_cached(*unit)
        assert len(keys()) == count
    (tmp_path / "include" / "factor.cuh").write_text("#define FACTOR 3\n")
    forget()
    compile_cached(*UNIT)
    assert len(keys()) == 6
    (tmp_path / "include" / "factor.cuh").rename(tmp_path / "include" / "other.cuh")
    (tmp_path / "include" / "factor.cuh").write_text('#include "other.cuh"\n')
    forget()
    compile_cached(*UNIT)
    assert len(keys()) == 7
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_toolchain_digest", lambda directory, compiler: "another compiler")
        compile_cached(*UNIT)
    assert len(keys()) == 8


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ("", True),
        ('#include "device/new.cuh"', False),
        ("#define N <device/new.cuh>\n# include N", False),
    ],
)
def test_a_header_matters_to_those_that_include_it(tmp_path, text, is_same):
    header, names = tmp_path / "include" / "device" / "new.cuh", cache._include_names(f"{SOURCE}\n{text}")
    header.parent.mkdir()
    header.write_text("int one;")
    before = cache.headers_digest(tmp_path / "include", names)
    header.write_text("int two;")
    assert (cache.headers_digest(tmp_path / "include", names) == before) == is_same


def test_headers_that_include_each_other_have_a_digest(tmp_path):
    for name, other in (("a.cuh", "b.cuh"), ("b.cuh", "a.cuh")):
        (tmp_path / name).write_text(f'#pragma once\n#include "{other}"\n')
    assert cache.headers_digest(tmp_path, frozenset(["a.cuh"])) == cache.headers_digest(tmp_path, frozenset(["b.cuh"]))


def test_every_header_that_flashtile_includes_has_a_part_in_the_digest():
    """The compiler would also find one beside the file that includes it; the digest would not."""
    paths = list(HEADERS.rglob("*.cuh"))
    assert paths
    for path in paths:
        names = cache._include_names(path.read_text(encoding="utf-8"))
        assert [name for name in names if not (HEADERS / name).is_file()] == [], path


def test_parts_of_a_key_do_not_run_together():
    assert KernelCache.key(["ab", "c"]) != KernelCache.key(["a", "bc"]) != KernelCache.key(["abc"])
    assert KernelCache.key(["ab"]) == KernelCache.key([b"ab"])
    assert len(KEY) == 64


def test_a_header_edited_while_the_process_runs_stays_out_of_the_cache(tmp_path, compilations):
    cache._known_headers(nvrtc.INCLUDE, cache._include_names(UNIT[0]))
    (tmp_path / "include" / "factor.cuh").write_text("#define FACTOR 3\n")
    compile_cached(*UNIT)
    assert list((tmp_path / "cache").glob("*.kernel")) == []


def test_threads_compile_a_unit_once(compilations):
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return compile_cached(*UNIT)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert all(result is results[0] for result in results)
    assert compilations == ["sm_90"]


def test_a_compile_error_is_not_cached(tmp_path):
    for _ in range(2):
        with pytest.raises(CompileError, match="no_such_function"):
            compile_cached("__global__ void f() { no_such_function(); }", "sm_90", ["f"])
    assert list((tmp_path / "cache").glob("*.kernel")) == []


def race(directory, include, barrier, results):
    os.environ["FLASHTILE_CACHE_DIR"] = directory
    nvrtc.INCLUDE = Path(include)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        barrier.wait()
        unit = compile_cached(*UNIT)
    results.put((unit.cubin, unit.symbols))


def test_eight_processes_race_on_an_empty_cache(tmp_path, compilations):
    # A fork server imports torch once; its forks start without threads and kernels
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashtile.runtime.cache", __name__])
    barrier, results = context.Barrier(8), context.Queue()
    arguments = (str(tmp_path / "cache"), str(tmp_path / "include"), barrier, results)
    processes = [context.Process(target=race, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    units = [results.get(timeout=1800) for _ in processes]
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * 8
    assert all(unit == units[0] for unit in units)
    # They leave one kernel, one digest and no temporary file
    kept = quietly(compile_cached, *UNIT)
    assert (kept.cubin, kept.symbols) == units[0]
    assert compilations == []
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".kernel", ".toolchain"]
