"""What a build says when it cannot make the extension, and what the built one asks of torch. tools/try_install.py
installs for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.runtime import extension

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parents[2]
# What the extension asks of torch. The oldest torch that flashtile serves has them all: `make test-versions` shows it
OF_TORCH = """
    aoti_torch_abi_version aoti_torch_copy_ aoti_torch_create_device_guard aoti_torch_create_tensor_from_blob
    aoti_torch_delete_device_guard aoti_torch_delete_library_object aoti_torch_delete_tensor_object
    aoti_torch_device_type_cpu aoti_torch_device_type_cuda aoti_torch_dtype_bfloat16 aoti_torch_dtype_bool
    aoti_torch_dtype_float16 aoti_torch_dtype_float32 aoti_torch_dtype_float64 aoti_torch_dtype_int32
    aoti_torch_dtype_int64 aoti_torch_dtype_uint64 aoti_torch_dtype_uint8 aoti_torch_empty_strided
    aoti_torch_get_current_device_index aoti_torch_get_data_ptr aoti_torch_get_device_index aoti_torch_get_device_type
    aoti_torch_get_dim aoti_torch_get_dtype aoti_torch_get_sizes aoti_torch_get_strides aoti_torch_library_init_impl
    aoti_torch_new_uninitialized_tensor aoti_torch_zero_ torch_call_dispatcher torch_delete_list torch_delete_string
    torch_get_num_threads torch_library_impl torch_list_get_item torch_list_size torch_parallel_for torch_string_c_str
"""


needs_symbols = pytest.mark.skipif(
    extension.missing() is not None or shutil.which("nm") is None, reason="needs the C++ extension, and nm"
)


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    places = ("--build-lib", str(folder / "lib"))
    environment = {name: value for name, value in os.environ.items() if name not in ("FLASHTILE_EXTENSION", "CXX")}
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", *places],
        cwd=ROOT, env=environment | variables, capture_output=True, text=True,
    )  # fmt: skip


def test_no_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path))
    assert done.returncode != 0
    assert "flashtile: the C++ extension cannot be built: there is no C++ compiler" in done.stderr
    assert "To install without the extension, which is slower, set FLASHTILE_EXTENSION=0." in done.stderr
    assert not (tmp_path / "lib").exists()


def test_the_extension_can_be_left_out(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path), FLASHTILE_EXTENSION="0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib" / "flashtile" / "api.py").is_file()
    assert (tmp_path / "lib" / "flashtile_command.py").is_file()
    assert not (tmp_path / "lib" / "flashtile" / "csrc").exists()


def test_other_values_are_refused(tmp_path: Path) -> None:
    done = build(tmp_path, FLASHTILE_EXTENSION="no")
    assert done.returncode != 0
    assert "FLASHTILE_EXTENSION: got 'no'; accepted: 0 or 1." in done.stderr


def undefined_symbols() -> str:
    command = ["nm", "--dynamic", "--undefined-only", extension.path()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_symbols
def test_the_extension_asks_nothing_new_of_torch() -> None:
    """Headers of a newer torch declare functions that the oldest one lacks, and not all of them are guarded."""
    names = undefined_symbols()
    assert sorted(re.findall(r"^\s*U ((?:aoti_)?torch_\w+)$", names, re.MULTILINE)) == OF_TORCH.split()
    assert not re.findall(r" U (_ZNK?(?:2at|3c10|5torch)\w+)$", names, re.MULTILINE), "torch's C++ changes"


@needs_symbols
def test_the_extension_puts_nothing_off_to_its_first_call() -> None:
    """A static of a function is locked while it is made, and a fork at that moment copies the lock."""
    assert "__cxa_guard_acquire" not in undefined_symbols()
