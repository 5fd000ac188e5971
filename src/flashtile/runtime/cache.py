"""Caches compiled kernels: in memory, on disk, and embedded in the package if it was built with kernels.

Directory: FLASHTILE_CACHE_DIR, else flashtile/ below XDG_CACHE_HOME or ~/.cache; FLASHTILE_CACHE=0 disables the disk
cache. The directory must belong to the user and have mode 0700, except on Windows, where the folders of a user are
closed to others and have neither. A file holds a header (magic, format, SHA-256 of the
rest), a length-prefixed JSON object that contains the key, and the cubin. It is renamed into place when complete, so
any number of processes may share the directory. A disk error costs one warning and a compilation, never an exception; a
file that fails a check is never loaded as a kernel.

A package built with FLASHTILE_ARCHS holds kernels for those architectures in EMBEDDED, in the same file format. Their
key does not include the compiler: if headers, unit and options match, they are used and no compiler is looked for.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.errors import is_switched_on, value_error
from flashtile.runtime import nvrtc, toolchain
from flashtile.runtime.nvrtc import Compiled
from flashtile.runtime.toolchain import Toolchain
from flashtile.version import __version__

_HEADER = struct.Struct("<8sI32s")
_LENGTH = struct.Struct("<Q")
_MAGIC = b"FLASHTIL"
_FORMAT = 1
_KERNEL_FIELDS = {"arch": str, "symbols": dict, "log": str}
_LARGEST_FILE = 1 << 28  # bytes; kernels have less than 1 % of it
_STALE_S = 3600.0  # a temporary file this old belongs to a process that was killed
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[ \t]*(?:["<]([^">\n]+)[">])?', re.MULTILINE)
# Of kernels, of digests, and of what a process has not finished
_OWN_FILE = re.compile(r"\.?[0-9a-f]{64}\.(?P<kind>kernel|toolchain)(?P<temporary>\.[^.]+)?")
_ANY = ""
EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"


class CacheWarning(UserWarning):
    """The disk cache, or a file in it, cannot be used. Kernels are compiled instead."""


class Stored(NamedTuple):
    """A kernel on disk. The versions are those that compiled it; empty where the file does not say."""

    flashtile: str
    nvrtc: str
    arch: str
    num_bytes: int


class KernelCache:
    """A directory of compiled kernels; without a directory nothing is stored."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    @classmethod
    def default(cls) -> KernelCache:
        """The cache that the environment variables select."""
        if not is_switched_on("FLASHTILE_CACHE", default=True):
            return cls(None)
        asked = os.environ.get("FLASHTILE_CACHE_DIR")
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = os.path.expanduser(asked or os.path.join(home, "flashtile"))
        if folder.startswith("~") or not (asked or os.path.isabs(folder)):
            _warn_once(
                "home", "kernel cache: the user has no home directory; kernels stay in memory. Set FLASHTILE_CACHE_DIR"
            )
            return cls(None)
        return cls(Path(folder))

    @staticmethod
    def key(parts: Sequence[str | bytes]) -> str:
        """SHA-256 of the parts. Each is prefixed by its length, so that moving text between parts changes the key."""
        digest = hashlib.sha256()
        for part in parts:
            content = part.encode() if isinstance(part, str) else part
            digest.update(_LENGTH.pack(len(content)) + content)
        return digest.hexdigest()

    def load(self, key: str) -> Compiled | None:
        """The kernel stored under the key, or None if there is none or its file fails a check."""
        found = self._read(f"{key}.kernel", key, _KERNEL_FIELDS)
        if found is None:
            return None
        return _compiled(*found)

    def store(self, key: str, compiled: Compiled, nvrtc_version: str = "") -> None:
        """Stores a kernel for other processes, if the disk cache is usable. The versions are for people."""
        meta = {"key": key, "arch": compiled.arch, "symbols": compiled.symbols, "log": compiled.log}
        self._write(f"{key}.kernel", {**meta, "flashtile": __version__, "nvrtc": nvrtc_version}, compiled.cubin)

    def stored(self) -> list[Stored]:
        """Returns the kernels on disk. Files that cannot be read as kernels have no versions."""
        directory = self.usable()
        found = []
        for path in [] if directory is None else sorted(directory.glob("*.kernel")):
            try:
                num_bytes = path.lstat().st_size
                meta, _ = _unpack(_content(path), path.stem, _KERNEL_FIELDS)
            except FileNotFoundError:  # another process may have removed it
                continue
            except (OSError, ValueError):
                meta = {}
            version, compiler, arch = (str(meta.get(name, "")) for name in ("flashtile", "nvrtc", "arch"))
            found.append(Stored(version, compiler, arch, num_bytes))
        return found

    def clear(self) -> int:
        """Removes what the cache has written, and nothing else. Returns the number of kernels."""
        directory = self.usable()
        removed = 0
        for path in [] if directory is None else list(directory.iterdir()):
            if (name := _OWN_FILE.fullmatch(path.name)) is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                path.unlink()
                removed += name["temporary"] is None and name["kind"] == "kernel"
        return removed

    def toolchain_digest(self, found: Toolchain) -> str:
        """The digest of the toolchain, cached until the path, size or time of one of its files changes."""
        try:
            states = [(path, path.stat()) for path in found.files]
        except OSError:
            return found.digest
        key = self.key([f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states])
        remembered = self._read(f"{key}.toolchain", key, {"digest": str})
        if remembered is not None:
            return str(remembered[0]["digest"])
        self._write(f"{key}.toolchain", {"key": key, "digest": found.digest}, b"")
        return found.digest

    def _read(self, name: str, key: str, fields: Mapping[str, type]) -> tuple[dict[str, Any], bytes] | None:
        """JSON object and content of a file; None unless it is complete, the user's own and stored under the key."""
        directory = self.usable()
        if directory is None:
            return None
        path = directory / name
        try:
            return _unpack(_content(path), key, fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _warn_once(str(path), f"kernel cache: {path} is not usable ({error}); it will be replaced")
            return None

    def _write(self, name: str, meta: dict[str, Any], content: bytes) -> None:
        directory = self.usable()
        if directory is None:
            return
        temporary = None
        try:
            _remove_stale(directory)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_pack(meta, content))
            os.replace(temporary, directory / name)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            _warn_once(
                f"write {directory}", f"kernel cache: cannot write to {directory} ({error}); kernels stay in memory"
            )

    def usable(self) -> Path | None:
        """The directory, created if missing; None unless it belongs to the user and is closed to others."""
        if self.directory is None:
            return None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self.directory.stat()
        except OSError as error:
            reason = str(error)
        else:
            if not _belongs_to_user(state):
                reason = f"it belongs to user {state.st_uid}"
            elif sys.platform != "win32" and stat.S_IMODE(state.st_mode) & 0o077:
                reason = (
                    f"its mode {stat.S_IMODE(state.st_mode):04o} lets others in; run chmod 700, or set "
                    "FLASHTILE_CACHE_DIR"
                )
            else:
                return self.directory
        _warn_once(
            f"use {self.directory}", f"kernel cache: {self.directory} is not used ({reason}); kernels stay in memory"
        )
        return None


def compile_cached(source: str, arch: str, names: Sequence[str], defines: Sequence[str] = ()) -> Compiled:
    """Compiles one unit, or takes it from the package, memory or disk.

    Threads that need the same unit wait for one compilation.
    """
    headers = _known_headers(nvrtc.INCLUDE, _include_names(source))
    options = _options_text(names, arch, defines)
    if is_embedded(arch) and (ready := _load_embedded(arch, KernelCache.key([headers, source, options]))) is not None:
        return ready
    cache = KernelCache.default()
    compiler = toolchain.find()
    key = cache.key([headers, source, options, _toolchain_digest(cache.directory, compiler)])
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _memory:
            found = cache.load(key)
            if found is None:
                found = nvrtc.compile_source(compiler, source, arch, names, defines)
                # If a header changed after hashing, this kernel is current but does not belong under this key
                if headers_digest(nvrtc.INCLUDE, _include_names(source)) == headers:
                    cache.store(key, found, "{}.{}".format(*compiler.version))
            _memory[key] = found
        return _memory[key]


def _options_text(names: Sequence[str], arch: str, defines: Sequence[str] = ()) -> str:
    """Everything besides the source that reaches the compiler."""
    return json.dumps([list(names), [*nvrtc.options(arch, defines), *nvrtc.variables()]])


def check_embedding() -> None:
    """Refuses to embed kernels that would be used only where the same variables of the compiler are set."""
    if nvrtc.variables():
        raise value_error("environment", ", ".join(nvrtc.variables()), "none of these to embed kernels", "Unset them")


def embed(folder: Path, source: str, arch: str, names: Sequence[str]) -> None:
    """Compiles a unit, or takes it from the cache, and writes it to a folder that will become EMBEDDED."""
    check_embedding()
    compiled = compile_cached(source, arch, names)
    headers = headers_digest(nvrtc.INCLUDE, _include_names(source))
    key = KernelCache.key([headers, source, _options_text(names, arch)])
    meta = {"key": key, "arch": arch, "symbols": compiled.symbols, "log": compiled.log}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{arch}-{key}.kernel").write_bytes(_pack(meta, compiled.cubin))


@functools.cache
def embedded_archs() -> dict[str, int]:
    """Number of embedded kernels by architecture."""
    files = sorted(EMBEDDED.glob("*.kernel")) if EMBEDDED.is_dir() else []
    return dict(collections.Counter(path.name.split("-")[0] for path in files))


def is_embedded(arch: str) -> bool:
    return arch in embedded_archs()


@functools.cache
def _load_embedded(arch: str, key: str) -> Compiled | None:
    path = EMBEDDED / f"{arch}-{key}.kernel"
    try:
        return _compiled(*_unpack(path.read_bytes(), key, _KERNEL_FIELDS))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn_once(str(path), f"embedded kernels: {path} is not usable ({error}); the kernel is compiled instead")
        return None


def headers_digest(folder: Path, names: frozenset[str]) -> str:
    """SHA-256 over name and content of these headers below the folder and of all that they include. A change of one
    kernel leaves the others cached. A header that is not below the folder comes with the compiler."""
    found: dict[str, bytes] = {}
    seen, waiting = set(names), list(names)
    while waiting:
        name = waiting.pop()
        path, more = folder / name, frozenset[str]()
        if name == _ANY:
            more = frozenset(file.relative_to(folder).as_posix() for file in folder.rglob("*.cuh"))
        elif path.is_file():
            found[name] = path.read_bytes()
            more = _include_names(found[name].decode())
        waiting += more - seen
        seen |= more
    return KernelCache.key([part for name in sorted(found) for part in (name, found[name])])


def _include_names(source: str) -> frozenset[str]:
    """Returns what a source names in #include, whatever condition it stands under; _ANY, all headers of flashtile, for
    what a macro names."""
    return frozenset(_INCLUDE.findall(source))


_memory: dict[str, Compiled] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_warned: set[str] = set()

_known_headers = functools.cache(headers_digest)


@functools.cache
def _toolchain_digest(directory: Path | None, compiler: Toolchain) -> str:
    return KernelCache(directory).toolchain_digest(compiler)


@functools.cache
def _remove_stale(directory: Path) -> None:
    """Removes what killed processes left half written, once in each process."""
    for path in directory.glob(".*.*.*"):
        if path.name.split(".")[-2] in ("kernel", "toolchain"):
            with contextlib.suppress(OSError):  # another process may have removed it
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()


def _content(path: Path) -> bytes:
    """The bytes of a file of the user. Raises ValueError for what is no such file, or too large: a pipe would block, a
    device may have no end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        if not _belongs_to_user(state):
            raise ValueError("it belongs to another user")
        content = file.read(_LARGEST_FILE + 1) if state.st_size <= _LARGEST_FILE else None
    if content is None or len(content) > _LARGEST_FILE:
        raise ValueError(f"it has more than {_LARGEST_FILE} bytes")
    return content


def _belongs_to_user(state: os.stat_result) -> bool:
    return sys.platform == "win32" or state.st_uid == os.geteuid()


def _pack(meta: dict[str, Any], content: bytes) -> bytes:
    head = json.dumps(meta).encode()
    payload = _LENGTH.pack(len(head)) + head + content
    return _HEADER.pack(_MAGIC, _FORMAT, hashlib.sha256(payload).digest()) + payload


def _compiled(meta: dict[str, Any], cubin: bytes) -> Compiled:
    return Compiled(meta["arch"], cubin, meta["symbols"], meta["log"])


def _unpack(data: bytes, key: str, fields: Mapping[str, type]) -> tuple[dict[str, Any], bytes]:
    """The reverse of _pack. Raises ValueError unless the data is whole, was stored under the key and has the fields."""
    if len(data) < _HEADER.size + _LENGTH.size:
        raise ValueError("truncated")
    magic, version, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _FORMAT:
        raise ValueError("not a file of this cache")
    payload = data[_HEADER.size :]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("corrupted or truncated")
    start = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    try:
        meta = json.loads(payload[_LENGTH.size : start])
    except RecursionError:
        raise ValueError("malformed") from None
    if not isinstance(meta, dict) or not all(isinstance(meta.get(name), kind) for name, kind in fields.items()):
        raise ValueError("malformed")
    if meta.get("key") != key:
        raise ValueError("stored under another key")
    return meta, payload[start:]


def _warn_once(reason: str, text: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(text, CacheWarning, stacklevel=4)
