"""One problem on several backends: what each gives, by the error rule against fp64, and bit by bit where that is
promised.

Promised bits: the dropout mask is the same on every backend; with deterministic=True a second run gives the same
tensors; keys in pages give what the same keys give in plain rows, wherever the backend says that it runs both in the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashtile import families, ops
from flashtile.backends import registry
from flashtile.backends.base import Backend, GradNeeds
from flashtile.backends.segments import segments
from flashtile.families import assemble
from flashtile.lab.check.trial import Trial
from flashtile.problem import AttentionArgs, Problem, page_size, row_axis
from flashtile.testing import GRADS, OUTPUTS, Inputs, Result, disagreements, expect, oracle, run


class DeviceLost(RuntimeError):  # noqa: N818
    """The GPU takes no more work from this process: a kernel read or wrote where it must not."""

    def __init__(self, backends: str, reason: str) -> None:
        super().__init__(reason)
        self.backends = backends  # whose it was, with commas between if it may be any of several


@dataclass
class Verdict:
    """Outcome of a trial: complaints by backend, empty where all is well, and why the others did not run."""

    complaints: dict[str, list[str]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.complaints.items() if found]


def judge(trial: Trial, backends: Sequence[Backend], device: str, oracle_device: str | None = None) -> Verdict:
    """Runs the trial on every backend that takes it. Raises DeviceLost where nothing can be run any more.

    The oracle runs on `oracle_device`, by default the same device.
    """
    try:
        with forced(trial.families):
            return _judge(trial, backends, device, oracle_device or device)
    except DeviceLost:
        raise
    except Exception as error:
        if not is_alive(device):
            raise DeviceLost(",".join(backend.name for backend in backends), str(error)) from error
        raise


def is_alive(device: str) -> bool:
    """The device still takes work."""
    try:
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError:
        return False


@contextmanager
def forced(names: tuple[str, ...]) -> Iterator[None]:
    """Inside, calls on the CUDA engine take kernels of these families or are refused. All threads share it."""
    if not names:
        yield
        return
    try:
        with families.forced(*names):
            assemble.clear_plans()
            yield
    finally:
        assemble.clear_plans()


def _judge(trial: Trial, backends: Sequence[Backend], device: str, oracle_device: str) -> Verdict:
    verdict, inputs = Verdict(), trial.make(device)
    takers = [backend for backend in backends if _takes(backend, inputs, trial.has_backward, verdict)]
    if not takers:
        return verdict
    there = inputs if oracle_device == device else trial.make(oracle_device)
    expected = expect(there, has_backward=trial.has_backward)
    probe = dropout_probe(inputs, trial.seed) if trial.case.dropout_p > 0.0 else None
    bits = None if probe is None else oracle(probe, has_backward=False).out != 0
    pages, rows = paged_and_plain(inputs) if trial.case.kind in ("paged", "cache") else (None, None)
    for backend in takers:
        found = verdict.complaints[backend.name] = list[str]()
        try:
            result = _run(inputs, backend, trial.has_backward)
            found += disagreements(
                _moved(result, oracle_device), there, expected, is_relative=trial.case.values == "wide"
            )
            if trial.case.deterministic:
                found += _differences(
                    result, _run(inputs, backend, trial.has_backward), "a second run gives other bits"
                )
            if probe is not None and bits is not None:
                found += _wrong_bits(_run(probe, backend, False).out != 0, bits)
            # A BLAS library may round strided matrices in another way
            if pages is not None and rows is not None and backend.is_layout_exact:
                is_alike = _details(backend, pages) == _details(backend, rows)
                if is_alike:
                    paged, plain = _run(pages, backend, False), _run(rows, backend, False)
                    found += _differences(paged, plain, "pages give other bits than plain rows")
        except Exception as error:
            found.append(f"raised {type(error).__name__}: {error}")
            if not is_alive(device):
                raise DeviceLost(backend.name, str(error)) from error
    return verdict


def warm(trial: Trial, backend: Backend, device: str) -> None:
    """Makes every call of the trial once, so that whatever compiles, compiles now. What goes wrong shows when the trial
    is judged."""
    for args, call, has_backward in _calls(trial, backend, device):
        # Below autograd, whose backward passes of one device all run in one thread
        with torch.no_grad():
            out, lse = ops.forward(*args)
            if has_backward:
                ops.backward(call.dout, call.dlse, *args, out, lse, list(_needs(args)))


def compile_jobs(trial: Trial, backend: Backend, device: str) -> dict[Hashable, Callable[[], None]]:
    """Returns what the calls of the trial would wait for, as jobs for other processes."""
    jobs: dict[Hashable, Callable[[], None]] = {}
    for args, call, has_backward in _calls(trial, backend, device):
        grads = ops.empty_grads(args, _needs(args)) if has_backward else None
        jobs |= backend.compile_jobs(args, call.dout, call.dlse, *ops.empty_outputs(args), grads)
    return jobs


def _calls(trial: Trial, backend: Backend, device: str) -> Iterator[tuple[AttentionArgs, Inputs, bool]]:
    """Yields the calls that judging the trial makes on a backend, if that takes it, each with whether a backward pass
    follows."""
    inputs = trial.make(device)
    if not _takes(backend, inputs, trial.has_backward, Verdict()):
        return
    for call in (inputs, *_companions(trial, inputs)):
        has_backward = trial.has_backward and call is inputs
        needs_bias_grad = has_backward and call.args.bias is not None
        yield (
            _for(backend, call.args)._replace(needs_grad=has_backward, needs_bias_grad=needs_bias_grad),
            call,
            has_backward,
        )


def _needs(args: AttentionArgs) -> GradNeeds:
    return GradNeeds(True, True, True, args.bias is not None, args.sinks is not None)


def _companions(trial: Trial, inputs: Inputs) -> Iterator[Inputs]:
    """The calls that a trial makes beside its own."""
    if trial.case.dropout_p > 0.0:
        yield dropout_probe(inputs, trial.seed)
    if trial.case.kind in ("paged", "cache"):
        yield from paged_and_plain(inputs)


def _for(backend: Backend, args: AttentionArgs) -> AttentionArgs:
    return args._replace(backend=backend.name)


def _takes(backend: Backend, inputs: Inputs, has_backward: bool, verdict: Verdict) -> bool:
    needs_bias_grad = has_backward and inputs.args.bias is not None
    reason = registry.refusal(
        backend, Problem.of(inputs.args._replace(needs_grad=has_backward, needs_bias_grad=needs_bias_grad))
    )
    if reason is not None:
        verdict.refusals[backend.name] = reason
    return reason is None


def _details(backend: Backend, inputs: Inputs) -> dict[str, str]:
    return backend.details(Problem.of(inputs.args))


def _run(inputs: Inputs, backend: Backend, has_backward: bool) -> Result:
    _poison(inputs, has_backward)
    return run(Inputs(_for(backend, inputs.args), inputs.dout, inputs.dlse), has_backward=has_backward)


def _poison(inputs: Inputs, has_backward: bool) -> None:
    """NaN into the memory that the results will most likely be given: what a backend leaves unwritten is seen."""
    blocks = list(ops.empty_outputs(inputs.args))
    if has_backward:
        grads = ops.empty_grads(inputs.args, _needs(inputs.args))
        blocks += [grad for grad in grads if grad is not None]
    for block in blocks:
        block.fill_(torch.nan)


def _moved(result: Result, device: str) -> Result:
    return Result(*(None if tensor is None else tensor.to(device) for tensor in result))  # type: ignore[arg-type]


def _differences(one: Result, other: Result, what: str) -> list[str]:
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in OUTPUTS + GRADS]
    return [f"{name}: {what}" for name, a, b in pairs if a is not None and not torch.equal(a, b)]


def _wrong_bits(ours: Tensor, right: Tensor) -> list[str]:
    wrong = int((ours != right).sum())
    return [f"dropout: {wrong} of {right.numel()} bits are not those of the definition"] if wrong else []


def dropout_probe(inputs: Inputs, seed: int) -> Inputs:
    """Returns the same call with all scores 0 and one key to each column of v: out is 0 exactly where its key is hidden
    or dropped."""
    args, rows = inputs.args, row_axis(inputs.args.layout)
    num_rows, dim = args.v.shape[rows], args.v.shape[-1]
    first = seed % max(1, num_rows - dim + 1)
    ones = torch.zeros(num_rows, dim, dtype=args.v.dtype, device=args.v.device)
    ones[first:].fill_diagonal_(1)
    ones = ones if args.layout == "bhsd" else ones[:, None]

    def zero(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.where(torch.isfinite(tensor), 0.0, tensor)

    changed = args._replace(
        q=torch.zeros_like(args.q),
        v=torch.where(args.v.isnan(), args.v, ones),  # rows that must not be read stay so
        bias=zero(args.bias),
        alibi_slopes=zero(args.alibi_slopes),
        sinks=zero(args.sinks),
    )
    return inputs._replace(args=changed)


def paged_and_plain(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """A paged call with one split of the keys, and the same call over the same keys as plain rows."""
    args = inputs.args._replace(deterministic=True, num_splits=0)
    assert args.block_table is not None
    pages = tuple(tensor if args.layout == "bshd" else tensor.transpose(1, 2) for tensor in (args.k, args.v))
    if args.cu_seqlens_q is not None:
        found = segments(args)
        rows = [
            torch.cat([none[:0].flatten(0, 1), *(segment.keys(tensor)[0].transpose(0, 1) for segment in found)])
            for tensor, none in zip((args.k, args.v), pages, strict=True)
        ]
    else:
        at = torch.arange(args.block_table.shape[1] * page_size(args), device=args.k.device)
        table = args.block_table.long().clamp(0, len(args.k) - 1)  # what it has out of bounds holds no key
        rows = [tensor[table[:, at // page_size(args)], at % page_size(args)] for tensor in pages]
    k, v = (tensor.contiguous() if args.layout == "bshd" else tensor.transpose(-2, -3).contiguous() for tensor in rows)
    return inputs._replace(args=args), inputs._replace(args=args._replace(k=k, v=v, block_table=None))
