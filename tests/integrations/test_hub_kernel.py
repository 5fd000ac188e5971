"""The kernel repository of tools/make_hub_kernel.py, loaded by the `kernels` package and by transformers themselves.

Each test is a process of its own, with `kernels` and nothing else of the packages that are kept apart. The folder
stands in for the download: LOCAL_KERNELS is the switch of `kernels` for that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from interfaces import apart
from test_docs import BLOCKS

import flashtile

SOURCE = Path(flashtile.__file__).parents[1]
ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_hub_kernel.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of the repository, and a folder for Python's path with `kernels`."""
    where = tmp_path_factory.mktemp("hub")
    for version in ("1", "2"):
        subprocess.run(
            [sys.executable, TOOL, "--repo-id", "org/flashtile", "--version", version, "--out", where / version],
            check=True,
        )
    (where / "path").mkdir()
    for path in apart("kernels").parent.glob("kernels*"):
        (where / "path" / path.name).symlink_to(path)
    return where


def run(folder: Path, code: str, has_package: bool = True) -> str:
    """Runs a script; has_package: flashtile itself can be imported, too."""
    paths = [str(folder / "path"), *([str(SOURCE)] if has_package else [])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHTILE_")}
    environment = kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LOCAL_KERNELS": f"org/flashtile={folder / '1'}:org/ftile={folder / '1'}:other/flashtile={folder / '2'}",
        "HF_HUB_OFFLINE": "1",
        "FLASHTILE_CACHE": "0",
        "OMP_NUM_THREADS": "1",
    }
    script = PRELUDE.format(folder=str(folder)) + textwrap.dedent(code)
    command = [sys.executable, *([] if has_package else ["-P"]), "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


PRELUDE = """
import sys, torch
from pathlib import Path
from kernels import get_kernel

FOLDER = Path("{folder}")
torch.manual_seed(0)


def operators(namespace):
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.partition("::")[2] for name in names if name.startswith(namespace + "::"))
"""


def test_two_versions_beside_the_package(folder: Path) -> None:
    run(
        folder,
        """
        import flashtile
        one, two = (get_kernel(f"{org}/flashtile", version=1) for org in ("org", "other"))
        assert len({one.__name__, two.__name__, flashtile.__name__}) == 3
        assert one.attention is not two.attention
        q, k, v = (torch.randn(2, 3, 17, 16, requires_grad=True) for _ in range(3))
        dout = torch.randn(2, 3, 17, 16)
        expected = flashtile.attention(q, k, v, causal=True)
        grads = torch.autograd.grad(expected, (q, k, v), dout)
        for kernel in (one, two):
            out = kernel.attention(q, k, v, causal=True)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), grads)
            # Each runs its own operators
            with torch.profiler.profile() as profile, torch.no_grad():
                kernel.attention(q, k, v)
            ran = {event.name.partition("::")[0] for event in profile.events()}
            assert kernel.__name__ in ran
            assert not ran & ({one.__name__, two.__name__, "flashtile"} - {kernel.__name__})
            assert operators(kernel.__name__)
            torch.testing.assert_close(
                kernel.flash_attn_interface.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))),
                flashtile.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))),
            )
        # Each has classes of errors, reports and switches of its own
        try:
            one.attention(torch.randn(1, 1, 4, 600), torch.randn(1, 1, 4, 600), torch.randn(1, 1, 4, 600))
        except one.Unsupported as error:
            assert "head_dim 600" in str(error)
        assert flashtile.Unsupported is not one.Unsupported
        """,
    )


def test_alone(folder: Path) -> None:
    """Without the package nothing of it is imported and no operator has its name."""
    run(
        folder,
        """
        import importlib.util
        assert importlib.util.find_spec("flashtile") is None
        kernel = get_kernel("org/flashtile", version=1)
        assert "transformers" not in sys.modules
        q = torch.randn(2, 3, 9, 16)
        mask = torch.rand(9, 9) > 0.3
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
        torch.testing.assert_close(kernel.attention(q, q, q, mask=mask), expected)
        compiled = torch.compile(kernel.attention, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, q, q, mask=mask), expected)
        torch.testing.assert_close(torch.vmap(kernel.attention)(*[q[:, None]] * 3)[:, 0], kernel.attention(q, q, q))
        import torch.distributed
        ring = __import__(f"{kernel.__name__}.distributed.ring")  # has operators, too
        assert not [name for name in sys.modules if name.partition(".")[0] == "flashtile"]
        assert not operators("flashtile")
        assert "ring_forward" in operators(kernel.__name__)
        # The folder for older versions of kernels
        spec = importlib.util.spec_from_file_location("old", FOLDER / "1/build/torch-cpu/flashtile/__init__.py")
        old = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(old)
        assert old.attention is kernel.attention
        """,
        has_package=False,
    )


def test_transformers_by_the_name(folder: Path) -> None:
    run(
        folder,
        """
        from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config
        from transformers import T5ForConditionalGeneration

        NAME = "org/flashtile"
        SIZES = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=None)
        window = dict(head_dim=16, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
        t5 = dict(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
        ids = torch.randint(1, 90, (3, 13))
        padding = torch.arange(13) >= torch.tensor([0, 4, 9])[:, None]
        kernel = get_kernel(NAME, version=1)
        for kind, config, more in (
            (LlamaForCausalLM, LlamaConfig(**SIZES), {}),
            (Gemma2ForCausalLM, Gemma2Config(**SIZES, **window), {}),
            (T5ForConditionalGeneration, T5Config(**t5, decoder_start_token_id=0), {"decoder_input_ids": ids}),
        ):
            model = kind(config).eval()
            for mask in (None, padding.long()):
                results = []
                for name in ("eager", NAME):
                    model.set_attn_implementation(name, allow_all_kernels=True)
                    assert model.config._attn_implementation == name
                    model.zero_grad()
                    with torch.profiler.profile() as profile:
                        logits = model(ids, attention_mask=mask, **more).logits
                    ran = any(event.name.startswith(kernel.__name__ + "::") for event in profile.events())
                    assert ran == (name == NAME)
                    kept = logits if mask is None or more else logits[padding]
                    kept.square().mean().backward()
                    results.append([kept, *(p.grad for p in model.parameters() if p.grad is not None)])
                torch.testing.assert_close(results[0], results[1], rtol=2e-4, atol=2e-5)
                if kind is LlamaForCausalLM:
                    given = {"attention_mask": padding.long()} if mask is not None else {}
                    tokens = []
                    for name in ("eager", NAME):
                        model.set_attn_implementation(name, allow_all_kernels=True)
                        tokens.append(model.generate(ids, max_new_tokens=5, do_sample=False, **given))
                    assert torch.equal(*tokens)
        # A name without "flash": transformers treats the model as one with "sdpa"
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        expected = model(ids).logits
        model.set_attn_implementation("org/ftile", allow_all_kernels=True)
        torch.testing.assert_close(model(ids).logits, expected)
        made = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=NAME)
        assert made.config._attn_implementation == NAME
        """,
    )


def test_the_block_of_the_docs(folder: Path) -> None:
    run(folder, BLOCKS["A kernel of Hugging Face's hub"], has_package=False)


def test_the_layout(folder: Path) -> None:
    """By what `kernels` has for its builder and for its checks."""
    run(
        folder,
        """
        from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
        import json
        root = FOLDER / "1"
        build = Build.open(root)
        assert sorted(str(backend).lower().rpartition(".")[2] for backend in build.general.backends) == ["cpu", "cuda"]
        names = {"CARD.md", "LICENSE", "build.toml", "flake.nix", "torch-ext", "build"}
        assert {x.name for x in root.iterdir()} == names
        for backend in ("cuda", "cpu"):
            variant = root / "build" / f"torch-{backend}"
            metadata = Metadata.read_from_file(variant / "metadata.json")
            assert (str(metadata.name), metadata.version, metadata.license) == ("flashtile", 1, "MIT")
            assert metadata.id.isidentifier() and backend in metadata.id
            found = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
            metadata.digest.validate(found)
            assert found.files == metadata.digest.files
            built = {x.relative_to(variant).as_posix() for x in variant.rglob("*") if x.is_file()}
            kept = {x.relative_to(root / "torch-ext/flashtile").as_posix()
                    for x in (root / "torch-ext/flashtile").rglob("*") if x.is_file()}
            assert {x for x in built - kept if "__pycache__" not in x} == {
                "_ops.py", "metadata.json", "flashtile/__init__.py"}
            assert not kept - built
            assert {"families/fwd_sm90/fwd_sm90.cuh", "families/speeds.csv", "families/tiles.csv"} < kept
        ids = [Metadata.read_from_file(FOLDER / v / "build/torch-cpu/metadata.json").id for v in "12"]
        assert ids[0] != ids[1]
        """,
    )


def test_imports_that_cannot_be_relative_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOL.parent)
    import make_hub_kernel as tool

    for text in ("import flashtile\n", "import flashtile.ops\n", "def f():\n    import flashtile.ops as ops\n"):
        with pytest.raises(SystemExit, match="cannot be relative"):
            tool.rewritten(text, "x.py")
    with pytest.raises(SystemExit, match=r"backends/x\.py has operators; add it to FILES_WITH_OPERATORS"):
        tool.rewritten("op = torch.ops.flashtile.forward\n", "backends/x.py")
    text = "from flashtile import ops\nfrom flashtile.plans.plan import Step\n"
    assert tool.rewritten(text, "backends/x.py") == "from .. import ops\nfrom ..plans.plan import Step\n"
    assert tool.rewritten(text, "x.py") == "from . import ops\nfrom .plans.plan import Step\n"
    text = 'from flashtile import ops\nx = f"flashtile::{name}", "flashtile::forward"\n'
    assert tool.rewritten(text, "ops.py").splitlines()[2] == 'x = f"{_OPS_NAME}::{name}", f"{_OPS_NAME}::forward"'
