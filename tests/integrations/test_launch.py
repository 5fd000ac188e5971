"""`python -m flashtile.integrations.launch`, and that the command lines it is for take the names that the docs give."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interfaces import apart

import flashtile
from flashtile.integrations import launch, xformers
from flashtile.integrations import transformers as names

SOURCE = Path(flashtile.__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHTILE_")}
    return kept | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"} | more


def start(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the environment that the launcher gives it, or another."""
    return subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True)


def opened(*doors: str) -> dict[str, str]:
    return launch.variables(doors, str(SOURCE))


# The launcher


def test_options() -> None:
    assert launch.parsed(["trl", "sft", "--install"]) == (["transformers"], False, ["trl", "sft", "--install"])
    assert launch.parsed(["--install", "--flash-attn", "--", "--odd"]) == (["install", "flash_attn"], False, ["--odd"])
    assert launch.parsed(["--xformers", "--print-env"]) == (["xformers"], True, [])
    assert launch.command_line(["x.py", "-a"]) == [sys.executable, "x.py", "-a"]
    assert launch.command_line(["-m", "pkg"]) == [sys.executable, "-m", "pkg"]
    assert launch.command_line(["trl", "x.py"]) == ["trl", "x.py"]
    for given, pattern in (
        (["--nothing", "x"], "option: got --nothing; accepted: --transformers, --install, --flash-attn, --xformers, "),
        ([], "command: got ''; accepted: a command"),
        (["--print-env", "x"], "command: got 'x'"),
    ):
        with pytest.raises(ValueError, match=pattern):
            launch.parsed(given)


def test_every_option_has_a_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.VARIABLE, raising=False)
    monkeypatch.syspath_prepend(launch.STARTUP)
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    doors = importlib.import_module("sitecustomize").DOORS
    assert list(doors) == list(launch.OPTIONS.values())
    for _, module, function in doors.values():
        assert callable(getattr(importlib.import_module(module), function))


SCRIPT = """
import multiprocessing, os, sys

def report():
    import transformers, torch
    from flashtile.integrations import torch_ops
    assert "ftile" in transformers.AttentionInterface._global_mapping
    assert torch_ops._libraries
    from flash_attn import flash_attn_func
    from xformers.ops import memory_efficient_attention
    print(__name__, os.environ["RANK"], sys.argv[1:], flush=True)

if __name__ == "__main__":
    report()
    process = multiprocessing.get_context("spawn").Process(target=report)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_every_process_of_torchrun(tmp_path: Path) -> None:
    """By the command line: the script, its arguments and a process that it spawns."""
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--transformers", "--install", "--flash-attn", "--xformers"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command = [
        sys.executable,
        "-m",
        "flashtile.integrations.launch",
        *options,
        *torchrun,
        "script.py",
        "a",
        "--install",
    ]
    done = start(command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["__main__ 0 ['a', '--install']", "__mp_main__ 0 ['a', '--install']"]


# Modules that say what is imported and called, in place of the real ones
STAND_INS = {
    "torch.py": "print('torch')",
    "flashtile/__init__.py": "import torch\nprint('flashtile')\n\n\ndef install():\n    print('install')\n",
    "flashtile/integrations/__init__.py": "",
    "flashtile/integrations/flash_attn.py": "def install():\n    print('flash_attn.install')\n",
    "flashtile/integrations/transformers.py": (
        "import flashtile\nfrom transformers.modeling_utils import model\n"
        "def register():\n    print('register', model)\n"
    ),
    "transformers/__init__.py": "",
    "transformers/modeling_utils.py": "import torch\nmodel = 1\nprint('models')\n",
}
ALL = ["torch", "flashtile", "install", "flash_attn.install"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch", ALL),
        ("import flashtile", ALL),
        ("import flashtile.integrations.flash_attn", ALL),
        ("import flashtile.integrations.transformers", [*ALL, "models", "register 1"]),
        ("import transformers", []),
        ("import transformers.modeling_utils", [*ALL, "models", "register 1"]),
        ("from transformers.modeling_utils import model; import torch, flashtile", [*ALL, "models", "register 1"]),
        ("from importlib.util import find_spec as f; f('torch'), f('flashtile'); import torch", ALL),
        ("import sys; sys.exit(7)", []),
    ],
)
def test_whatever_is_imported_first(code: str, expected: list[str], tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "script.py").write_text(code)
    paths = opened("install", "flash_attn", "transformers") | {"PYTHONPATH": str(launch.STARTUP)}
    done = start([sys.executable, "script.py"], tmp_path, **paths)
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr
    assert done.returncode == (7 if "exit" in code else 0)


def test_an_import_that_fails_is_waited_for_again(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nif not hasattr(sys, 'again'):\n    sys.again = 1\n    1 / 0\n")
    (tmp_path / "flashtile.py").write_text("def install():\n    print('install')\n")
    code = "try:\n    import torch\nexcept ZeroDivisionError:\n    import torch\n"
    paths = opened("install") | {"PYTHONPATH": str(launch.STARTUP)}
    done = start([sys.executable, "-c", code], tmp_path, **paths)
    assert (done.returncode, done.stdout) == (0, "install\n"), done.stderr


def test_flashtile_is_found_wherever_it_is(tmp_path: Path) -> None:
    """The launcher may have found it by a path that the program does not have."""
    (tmp_path / "torch.py").write_text("")
    code = "import sys\ntry:\n    import torch\nexcept Exception:\n    pass\nprint(sys.path[-1])"
    paths = opened("install") | {"PYTHONPATH": os.pathsep.join([str(launch.STARTUP), str(tmp_path)])}
    done = start([sys.executable, "-P", "-c", code], tmp_path, **paths)
    assert done.stdout.strip() == str(SOURCE), done.stderr


def test_nothing_is_imported_by_itself(tmp_path: Path) -> None:
    """A process that does not use torch pays nothing, and another sitecustomize is imported, too."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.other = __file__\n")
    paths = {"PYTHONPATH": os.pathsep.join([opened()["PYTHONPATH"], str(tmp_path)]), launch.VARIABLE: "install"}
    code = (
        "import sys; assert 'torch' not in sys.modules and 'flashtile' not in sys.modules; print(sys.other)\n"
        "print(sys.modules['sitecustomize'].__file__)"
    )
    done = start([sys.executable, "-c", code], tmp_path, **paths)
    assert done.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2, done.stderr


def test_variables_for_a_shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a b")
    assert launch.main(["--install", "--print-env"]) == 0
    script = capsys.readouterr().out + 'echo "$FLASHTILE_LAUNCH|$PYTHONPATH"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"install|{launch.STARTUP}:/a b"


def test_errors_of_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "posix")
    assert launch.main(["--nothing"]) == 2
    assert "option: got --nothing" in capsys.readouterr().err
    assert launch.main(["no-such-command-at-all"]) == 127
    assert "no-such-command-at-all: " in capsys.readouterr().err
    assert launch.main(["--help"]) == 0
    assert "--print-env" in capsys.readouterr().out


# What the command lines of others take


def functions(path: str) -> dict[str, ast.FunctionDef]:
    """The functions and methods of a file, without their decorators."""
    found = {}
    for node in ast.walk(ast.parse(apart(path).read_text())):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            found[node.name] = node
    return found


def constant(path: str, name: str) -> Any:
    """The value of a set of strings at the top of a file."""
    (node,) = (
        x for x in ast.parse(apart(path).read_text()).body if isinstance(x, ast.Assign) and x.targets[0].id == name
    )
    return eval(ast.unparse(node.value))


def compiled(node: ast.FunctionDef, **scope: Any) -> Any:
    node.returns = None
    for argument in node.args.args:
        argument.annotation = None
    exec(ast.unparse(node), scope)
    return scope[node.name]


def test_trl() -> None:
    """trl 1.16.0: the option is any text, and the scripts hand it over. Packed batches come with their lengths."""
    (config,) = (
        x for x in ast.parse(apart("trl/trainer/model_config.py").read_text()).body if isinstance(x, ast.ClassDef)
    )
    (field,) = (x for x in config.body if isinstance(x, ast.AnnAssign) and x.target.id == "attn_implementation")
    assert "choices" not in ast.unparse(field)
    for script in ("sft", "dpo", "grpo", "reward"):
        assert "attn_implementation=model_args.attn_implementation" in apart(f"trl/scripts/{script}.py").read_text()
    collator = apart("trl/trainer/sft_trainer.py").read_text()
    assert 'output["cu_seq_lens_q"] = output["cu_seq_lens_k"] = cu_seq_lens' in collator


def test_axolotl_takes_the_hub_name_and_xformers() -> None:
    """axolotl 0.19.0: names with a slash and its own pass, "flashtile" does not."""
    canonical = constant("axolotl/utils/schemas/enums.py", "CANONICAL_ATTN_IMPLS")
    check = compiled(
        functions("axolotl/utils/schemas/config.py")["validate_attn_implementation"],
        CANONICAL_ATTN_IMPLS=canonical,
        SHORT_FORM_ALIAS_TO_CANONICAL={},
    )
    for name in (names.HUB_NAME, "sdpa", "xformers"):
        assert check(None, name) == name
    with pytest.raises(ValueError, match="not a recognized backend"):
        check(None, "flashtile")
    packing = constant("axolotl/utils/schemas/enums.py", "ATTN_IMPLS_SUPPORTING_PACKING")
    assert "xformers" in packing
    assert names.HUB_NAME not in packing


def test_axolotls_attention_by_xformers() -> None:
    """Its own function, of axolotl 0.19.0, over our xformers: packed rows and shared key heads, with gradients."""
    node = functions("axolotl/monkeypatch/attention/xformers.py")["xformers_attention_forward"]
    lengths = [5, 9, 3]
    starts = torch.tensor([[0, *lengths]], dtype=torch.int32).cumsum(1)
    forward = compiled(
        node,
        torch=torch,
        xformers=xformers,
        xformers_attention=xformers.ops.fmha.memory_efficient_attention,
        get_cu_seqlens_from_pos_ids=lambda ids: (starts, None),
        Optional=None,
    )
    config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})
    # As a projection's rows lie
    q, k, v = (torch.randn(1, 17, n, 8).transpose(1, 2).requires_grad_() for n in (4, 2, 2))
    ids = torch.cat([torch.arange(n) for n in lengths])[None]
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    for position_ids, training, shown in ((ids, True, mask), (None, True, None), (None, False, None)):
        module = type("Module", (), {"config": config, "training": training})
        out, _ = forward(module, q, k, v, position_ids=position_ids)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, shown, is_causal=shown is None, enable_gqa=True
        ).transpose(1, 2)
        dout = torch.randn_like(expected)
        torch.testing.assert_close(out.reshape(expected.shape), expected)
        grads = [torch.autograd.grad(x.reshape(dout.shape), (q, k, v), dout) for x in (out, expected)]
        torch.testing.assert_close(*grads)


def test_verl() -> None:
    """verl 0.9.1: the name is part of the model's override_config."""
    source = ast.unparse(functions("verl/workers/config/model.py")["__post_init__"])
    assert "self.override_config.get('attn_implementation', 'flash_attention_2')" in source
    assert "attn_implementation=attn_implementation" in source
    imports = apart("verl/utils/torch_functional.py").read_text()
    assert "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss" in imports


def test_llama_factory_takes_its_own_names_alone() -> None:
    """LLaMA-Factory 0.9.5: "sdpa" is what flashtile.install() serves."""
    source = apart("llamafactory/extras/constants.py").read_text()
    (enum,) = (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "AttentionFunction")
    assert {x.value.value for x in enum.body if isinstance(x, ast.Assign)} == {"auto", "disabled", "sdpa", "fa2", "fa3"}
