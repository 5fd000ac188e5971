"""`import flashtile`: what it leaves alone, what it needs, and the variables of the environment that it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashtile
from flashtile import Unsupported
from flashtile.backends import base, environment
from flashtile.cli import info
from flashtile.plans.arch import ARCHS

ROOT = Path(__file__).resolve().parents[2]
BUILD = (ROOT / "setup.py", ROOT / "tools" / "build_backend.py")
WITHOUT_NUMPY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

finder = Absent()
sys.meta_path.insert(0, finder)
import flashtile
assert sys.meta_path[0] is finder
import torch
q = torch.ones(1, 2, 3, 8, requires_grad=True)
flashtile.attention(q, q, q).sum().backward()
assert "numpy" not in sys.modules
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in environment.MEANINGS}
    return subprocess.run([sys.executable, *arguments], env=own | variables, capture_output=True, text=True)


@pytest.mark.parametrize("filters", [(), ("-W", "error")], ids=["warnings", "errors"])
def test_numpy_is_not_needed(filters: tuple[str, ...]) -> None:
    """torch warns where it is absent, when its own imports ask for it."""
    done = python(*filters, "-c", WITHOUT_NUMPY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_process_is_left_as_it_was() -> None:
    code = """
import sys, torch, warnings
before = [list(sys.meta_path), list(sys.path_hooks), list(warnings.filters), dict(torch.nn.functional.__dict__)]
import flashtile
after = [list(sys.meta_path), list(sys.path_hooks), list(warnings.filters), dict(torch.nn.functional.__dict__)]
assert before == after
assert not {"triton", "torch.utils.flop_counter", "torch._dynamo", "matplotlib"} & set(sys.modules)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


NONSENSE = {
    "FLASHTILE_LAUNCH": ("transformers,all", "accepted: transformers, install, flash_attn, xformers, separated by"),
    "FLASHTILE_STRICT": ("false", "accepted: 0 or 1."),
    "FLASHTILE_CHECK": ("yes", "accepted: 0 or 1."),
    "FLASHTILE_CACHE": ("2", "accepted: 0 or 1."),
    "FLASHTILE_NVRTC": ("/none/libnvrtc.so.13", "which is no file; accepted: the path of NVRTC of CUDA"),
    "FLASHTILE_EXECUTOR": ("rust", "accepted: c++ or python. Unset it."),
    "FLASHTILE_CPU_ISA": ("sse9", "baseline. Unset it."),
    "FLASHTILE_FAMILY": ("fwd_simt,fwd_sm91", "accepted: "),
    "FLASHTILE_ARCH": ("volta", "accepted: sm_61, "),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, words = NONSENSE[name]
    monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, Unsupported), match=rf"^{name}: got .*{re.escape(words)}"):
        environment.check()
    monkeypatch.setenv(name, "")  # as if it were not set
    environment.check()


@pytest.mark.parametrize("name", ["FLASHTILE_STRICT", "FLASHTILE_ARCH"])
def test_nonsense_is_refused_at_import(name: str) -> None:
    value, words = NONSENSE[name]
    done = python("-c", "import flashtile", **{name: value})
    assert done.returncode == 1
    assert f"ValueError: {name}: got '{value}'; {words}" in done.stderr
    done = python("-c", "from flashtile_command import main; main()", "info", **{name: value})
    assert done.returncode == 1
    assert re.fullmatch(rf"flashtile: {name}: got '{value}'; .*\n", done.stderr)


def test_every_variable_is_known() -> None:
    """A variable that the sources read, in whatever language, is in the list. What takes any text has no reader."""
    found = set()
    for path in [*BUILD, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.cpp")]:
        if path.name != "environment.py":
            found |= variables_in(path.read_text(encoding="utf-8"))
    # Children inherit it
    assert found - {"PYTHONPATH"} == set(environment.MEANINGS)
    assert set(environment.READERS) == set(NONSENSE)
    own = {name for name in environment.MEANINGS if name.startswith("FLASHTILE_")}
    build = {variable.name for variable in environment.GROUPS["Building"]}
    assert own - set(environment.READERS) - build == {"FLASHTILE_CACHE_DIR", "FLASHTILE_COMMIT"}


def variables_in(text: str) -> set[str]:
    """Returns the names in quotes that are ours or are looked up in an environment."""
    ours = re.findall(r'"(FLASHTILE_[A-Z_]+|FLASH_(?:DEBUG|SMEM|BLOCK|KERNEL)[A-Z_]*)"', text)
    return {*ours, *re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"(?!\] =)', text)}


def test_reads_of_variables_are_found() -> None:
    text = 'os.environ.get("AN_OTHER", "") or os.environ["ONE"] or _positive(environment, "FLASH_BLOCK_N")'
    assert variables_in(text + '; os.environ["WRITTEN"] = "1"') == {"AN_OTHER", "ONE", "FLASH_BLOCK_N"}


def test_info_lists_what_the_page_lists() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE) == list(info.collect()["switches"])


def test_the_laboratory_is_not_imported() -> None:
    code = "import sys, flashtile; print([name for name in sys.modules if name.startswith('flashtile.lab')])"
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_only_public_names_are_listed() -> None:
    """The operators are there without a call."""
    code = "import flashtile, torch; torch.ops.flashtile.forward.default; print(*dir(flashtile))"
    done = python("-c", code)
    assert done.stdout.split() == sorted(flashtile.__all__), done.stderr


@pytest.mark.parametrize("name", ["bench", "check", "ladder", "profile", "report", "tiles"])
def test_former_names_give_the_same_modules(name: str) -> None:
    first = {"check": "runner"}.get(name, "command")
    code = f"""
import pkgutil, sys, warnings
import flashtile
assert "flashtile.former" not in sys.modules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from flashtile.{name}.{first} import __name__ as name
    import flashtile.{name} as former
    from flashtile import {name}
import flashtile.lab.{name} as package
assert name == "flashtile.lab.{name}.{first}"
assert former is {name} is package
modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
assert len(modules) > 2
for module in modules:
    assert sys.modules["flashtile.{name}." + module] is sys.modules["flashtile.lab.{name}." + module]
(warning,) = [one for one in caught if "flashtile" in str(one.message)]
assert (warning.category, warning.filename, warning.lineno) == (DeprecationWarning, "<string>", 7)
assert str(warning.message).startswith("flashtile.{name} is now flashtile.lab.{name}. ")
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_one_place_says_what_a_gpu_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = [path for path in (ROOT / "src").rglob("*.py") if "get_device_capability" in path.read_text("utf-8")]
    assert [path.name for path in asking] == ["base.py"]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setenv("FLASHTILE_ARCH", "sm_86")
    base.device_arch.cache_clear()
    try:
        arch = base.device_arch()
        assert arch is not None
        assert (arch.number, arch.shared_bytes, arch.name) == (86, ARCHS[86].shared_bytes, "sm_90a")
        assert (arch.label, ARCHS[90].label) == ("sm_90a as sm_86", "sm_90a")
        assert base.capability(0) == (8, 6)
    finally:
        base.device_arch.cache_clear()
