"""What a build says when it cannot make the extension, what the built one asks of torch and of the system, and how
wheels are made of it. tools/try_install.py installs for real."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.runtime import extension
from flashtile.version import __version__

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).resolve().parents[2]
# What the extension asks of torch. The oldest torch that flashtile serves has them all: `make test-versions` shows it
OF_TORCH = """
    aoti_torch_abi_version aoti_torch_copy_ aoti_torch_create_device_guard aoti_torch_create_tensor_from_blob
    aoti_torch_delete_device_guard aoti_torch_delete_library_object aoti_torch_delete_tensor_object
    aoti_torch_device_type_cpu aoti_torch_device_type_cuda aoti_torch_dtype_bfloat16 aoti_torch_dtype_bool
    aoti_torch_dtype_float16 aoti_torch_dtype_float32 aoti_torch_dtype_float64 aoti_torch_dtype_float8_e4m3fn
    aoti_torch_dtype_float8_e5m2 aoti_torch_dtype_int32 aoti_torch_dtype_int64 aoti_torch_dtype_uint64
    aoti_torch_dtype_uint8 aoti_torch_empty_strided aoti_torch_get_current_device_index aoti_torch_get_data_ptr
    aoti_torch_get_device_index aoti_torch_get_device_type aoti_torch_get_dim aoti_torch_get_dtype
    aoti_torch_get_sizes aoti_torch_get_strides aoti_torch_library_init_impl aoti_torch_new_tensor_handle
    aoti_torch_new_uninitialized_tensor aoti_torch_zero_ torch_call_dispatcher torch_delete_list torch_delete_string
    torch_get_num_threads torch_library_impl torch_list_get_item torch_list_push_back torch_list_size
    torch_new_list_reserve_size torch_new_string_handle torch_parallel_for torch_string_c_str
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


def test_a_build_holds_every_module_header_and_table(tmp_path: Path) -> None:
    assert build(tmp_path, FLASHTILE_EXTENSION="0").returncode == 0
    suffixes = (".py", ".cuh", ".cu", ".csv")
    there, built = (
        {path.relative_to(root).as_posix() for path in root.rglob("*") if path.suffix in suffixes}
        for root in (ROOT / "src" / "flashtile", tmp_path / "lib" / "flashtile")
    )
    assert built == there
    assert {"families/tiles.csv", "families/fwd_sm90/fwd_sm90.cuh", "device/core/types.cuh"} <= built


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


@needs_symbols
def test_the_extension_runs_on_every_system_that_torch_runs_on() -> None:
    """torch's own wheels are for glibc 2.28 (manylinux_2_28). csrc/old_symbols.h says how newer symbols are avoided."""
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    names = undefined_symbols()
    found = re.findall(r"(\w+)@(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", names)
    assert found
    too_new = [name for name, kind, version in found if tuple(map(int, version.split("."))) > newest[kind]]
    assert not too_new


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_without_torch_the_first_question_of_an_installer_fails(
    tools: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """pip asks it before it downloads dependencies."""
    backend = importlib.import_module("build_backend")
    monkeypatch.setattr(backend, "find_torch", lambda: None)
    monkeypatch.setattr(backend.build_meta, f"get_requires_for_build_{kind}", lambda config_settings: ["more"])
    ask = getattr(backend, f"get_requires_for_build_{kind}")
    monkeypatch.setenv("FLASHTILE_EXTENSION", "1")
    with pytest.raises(
        SystemExit, match=r"torch 2\.10 or newer is not there, .* Install torch .* FLASHTILE_EXTENSION=0"
    ):
        ask()
    monkeypatch.setenv("FLASHTILE_EXTENSION", "0")
    assert ask() == ["more"]


def test_the_backend_has_every_hook(tools: None) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'build-backend = "build_backend"' in project
    assert 'backend-path = ["tools"]' in project
    backend = importlib.import_module("build_backend")
    for hook in ("build_{}", "get_requires_for_build_{}", "prepare_metadata_for_build_{}"):
        for kind in ("wheel", "editable"):
            assert callable(getattr(backend, hook.format(kind)))
    assert callable(backend.build_sdist)


def test_windows_has_no_extension(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = importlib.import_module("build_backend")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match=r"not made for Windows.*FLASHTILE_EXTENSION=0"):
        backend.require_torch_and_compiler()


@pytest.mark.parametrize(
    ("tag", "is_accepted"),
    [("manylinux_2_24_x86_64", True), ("manylinux_2_17_x86_64.manylinux2014_x86_64", True),
     ("manylinux_2_34_x86_64", False), ("linux_x86_64", False)],
)  # fmt: skip
def test_a_wheel_for_newer_systems_than_torchs_is_refused(
    tools: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str, is_accepted: bool
) -> None:
    make_wheels = importlib.import_module("make_wheels")

    def call(*command: object, **variables: str) -> str:
        (tmp_path / f"flashtile-1.0-cp310-abi3-{tag}.whl").touch()
        return "shown"

    monkeypatch.setattr(make_wheels, "call", call)
    if is_accepted:
        assert tag in make_wheels.audit(tmp_path / "raw.whl", tmp_path, "0").name
    else:
        with pytest.raises(SystemExit, match=r"needs a newer system than torch does.*\nshown"):
            make_wheels.audit(tmp_path / "raw.whl", tmp_path, "0")


def test_a_machine_whose_compiler_is_missing(tools: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_wheels = importlib.import_module("make_wheels")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"x86_64-linux-gnu-g\+\+: not found.*g\+\+-x86-64-linux-gnu.*leave x86_64 out"
    ):
        make_wheels.variables_for("x86_64", tmp_path)


def test_what_workflows_run_is_there() -> None:
    """Targets of make, files of the repository, and the version that a release compares with its tag."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert workflows.keys() >= {"ci", "wheels", "release"}
    used = {
        target for text in workflows.values() for line in re.findall(r"run: make (.*)", text) for target in line.split()
    }
    assert {"wheels", "lint-workflows"} <= used <= targets
    assert "run: .ci/run\n" in workflows["ci"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for path in re.findall(r"^      - ([\w/.-]+?)(?:/\*\*)?$", workflows["wheels"], re.MULTILINE):
        assert (ROOT / path).exists(), path
    assert "./.github/workflows/wheels.yml" in workflows["release"]
    (code,) = re.findall(r"python3 -c '(.*)'", workflows["release"])
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == __version__


def test_hooks_before_a_commit_run_what_lint_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lint = makefile[makefile.index("\nlint:") : makefile.index("\nformat:")]
    entries = re.findall(r"entry: \.venv/bin/(\S+ \S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(entries) == 4
    for entry in entries:
        assert entry.split()[0] in lint, entry
    assert "python tools/check_layers.py" in entries
    assert "tools/check_layers.py" in lint
