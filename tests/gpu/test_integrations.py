"""Other packages on a GPU: torch's flash attention registry, transformers and Thunder, in bfloat16 against the same
call in float64 or with torch's own kernels. tests/integrations has the rest, on any device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from flashtile.backends import native
from flashtile.integrations import torch_flash

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)


@pytest.fixture
def active() -> Iterator[None]:
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flashtile")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.fixture(autouse=True)
def default_kernels() -> None:
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def names_of(function: Callable[[], Any]) -> set[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def assert_our_kernels(names: set[str]) -> None:
    """Of both passes, in a profile: torch's operators reach them without an operator of ours."""
    for way in ("fwd", "bwd"):
        assert any(re.search(rf"{way}_\w*(sm\d+|simt)", name) for name in names), sorted(names)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]


def with_gradients(call: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float = 0.02) -> None:
    """By the norm of each tensor: rounding to bfloat16 is far below, a wrong mask or scale far above."""
    for mine, expected in zip(ours, exact, strict=True):
        error = (mine.double() - expected.double()).norm() / expected.double().norm()
        assert error.item() <= tolerance


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sdpa_through_the_registry(head_dim: int, is_causal: bool) -> None:
    inputs = leaves(*[(2, 4, 300, head_dim)] * 3)
    dout = torch.randn(2, 4, 300, head_dim, device="cuda")
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: E731
    results: list[Tensor] = []
    names = names_of(lambda: results.extend(with_gradients(call, inputs, dout)))
    assert_our_kernels(names)
    assert not any("pytorch_flash" in name for name in names)
    if native.missing() is None:  # no Python in the second call
        by_python = {f"flashtile::{name}{end}" for name in ("forward", "backward") for end in ("", "_fallback")}
        assert not by_python & names_of(lambda: with_gradients(call, inputs, dout))
    with sdpa_kernel(SDPBackend.MATH):
        exact = [x.detach().double().requires_grad_() for x in inputs]
        assert_close(results, with_gradients(call, exact, dout))


def test_activation_prints_nothing() -> None:
    """torch warns of the first kernel of a process that is replaced; from C++ it would go to stderr."""
    statements = "torch_flash.register(); torch.nn.attention.activate_flash_attention_impl('flashtile')"
    code = f"import torch; from flashtile.integrations import torch_flash; {statements}"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.usefixtures("active")
def test_varlen_attn_through_the_registry() -> None:
    lengths = [5, 200, 95]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    inputs = leaves(*[(sum(lengths), 4, 64)] * 3)
    dout = torch.randn(sum(lengths), 4, 64, device="cuda")
    call = lambda q, k, v: varlen_attn(q, k, v, ends, ends, 200, 200, window_size=(-1, 0))  # noqa: E731
    results: list[Tensor] = []
    assert "flashtile::forward" in names_of(lambda: results.extend(with_gradients(call, inputs, dout)))

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [[x.transpose(0, 1) for x in t.split(lengths)] for t in (q, k, v)]
        outs = [F.scaled_dot_product_attention(*row, is_causal=True) for row in zip(*parts, strict=True)]
        return torch.cat([out.transpose(0, 1) for out in outs])

    with sdpa_kernel(SDPBackend.MATH):
        exact = [x.detach().double().requires_grad_() for x in inputs]
        assert_close(results, with_gradients(one_by_one, exact, dout))


@pytest.mark.usefixtures("active")
def test_a_compiled_model_through_the_registry() -> None:
    torch._dynamo.reset()
    model = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, device="cuda").bfloat16()
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager")
    out: list[Tensor] = []
    names = names_of(lambda: out.append(compiled(x)) or out[0].float().sum().backward())
    assert_our_kernels(names)
    with sdpa_kernel(SDPBackend.MATH):
        expected = model.double()(x.double())
    assert_close(out, [expected], tolerance=0.05)


# transformers


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    from flashtile.integrations.transformers import register

    register()
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0}
    with torch.device("cuda"):
        config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=None)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():  # with the initial weights the scores are next to 0
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4.0)
            layer.self_attn.k_proj.weight.mul_(4.0)
    return model


@pytest.mark.parametrize("has_padding", [False, True])
def test_llama(has_padding: bool) -> None:
    model = llama()
    ids = torch.randint(1, 1000, (3, 200), device="cuda")
    mask = torch.ones_like(ids)
    if has_padding:
        mask[1, :60] = 0
    weights = torch.randn(int(mask.sum()), 1000, device="cuda")
    results: dict[str, list[Tensor]] = {}
    for name in ("flashtile", "sdpa"):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        (logits.float() * weights).sum().backward()
        results[name] = [logits.detach(), *(p.grad for p in model.parameters())]
    assert_close(results["flashtile"], results["sdpa"], tolerance=0.1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_llama_generates(cache: str) -> None:
    """Two kernels may break a tie of bfloat16 logits differently, so the logits are compared."""
    model = llama().eval()
    ids = torch.randint(1, 1000, (2, 70), device="cuda")
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    model.set_attn_implementation("flashtile")
    names = names_of(lambda: model.generate(ids, **options))
    assert "flashtile::forward" in names
    found = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
    assert found.sequences.shape == (2, 78)
    model.set_attn_implementation("sdpa")
    expected = model(found.sequences).logits[:, 69:-1]
    assert_close([torch.stack(found.logits, 1)], [expected], tolerance=0.1)


def test_a_compiled_llama() -> None:
    torch._dynamo.reset()
    model = llama().eval()
    ids = torch.randint(1, 1000, (2, 128), device="cuda")
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("flashtile")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close([compiled(ids).logits], [expected], tolerance=0.1)
        assert any("fwd_sm90" in name or "fwd_sm80" in name for name in names_of(lambda: compiled(ids)))


# Thunder


def test_thunder() -> None:
    try:
        import thunder
    except Exception as error:  # with a torch that is too new for it, importing it fails in many ways
        pytest.skip(f"thunder cannot be imported: {type(error).__name__}: {error}")
    from flashtile.integrations.thunder import flashtile_ex

    layer = torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16)

    def model(x: Tensor) -> Tensor:
        q, k, v = (t.view(2, 128, 4, 64).transpose(1, 2) for t in layer(x).split(256, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 128, 256)

    jitted = thunder.jit(model, executors=[flashtile_ex, *thunder.get_default_executors()])
    (x,) = leaves((2, 128, 256))
    dout = torch.randn(2, 128, 256, device="cuda")
    results: list[Tensor] = []
    names = names_of(lambda: results.extend(with_gradients(jitted, [x], dout)))
    assert {"flashtile::forward", "flashtile::backward"} <= names
    assert "flashtile_forward" in str(thunder.last_traces(jitted)[-1])
    assert "flashtile_backward" in str(thunder.last_backward_traces(jitted)[-1])
    assert_close(results, with_gradients(model, [x], dout))
