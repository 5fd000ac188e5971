"""`flashtile bench --tiles`: every tile checked, timed and counted, written, drawn and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from flashtile.errors import Unsupported, unsupported, value_error
from flashtile.lab.bench import device
from flashtile.lab.bench.files import writable_folder
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.rows import Environment, Row, Writer, as_dict, shared_fields
from flashtile.lab.bench.sweep import Sweep, gpu_settings
from flashtile.lab.bench.terminal import INTERRUPTED, collect, make_console, say, say_files, say_remark, show
from flashtile.lab.dtypes import dtype_key
from flashtile.lab.ladder import counters
from flashtile.lab.ladder.rows import Counters
from flashtile.lab.options import BenchOptions
from flashtile.lab.profile.gpu import current_arch
from flashtile.lab.profile.ncu import Call
from flashtile.lab.tiles import figures, study, tables
from flashtile.lab.tiles.rows import TileFacts, TileRow
from flashtile.lab.tiles.study import Study, Trial
from flashtile.plans.arch import Arch

_BUDGET_S = 0.05


def prepare(options: BenchOptions, arguments: Sequence[str]) -> Callable[[], int]:
    """The job; what can be refused is refused here, before anything is measured."""
    if replace(options, has_tiles=False, dtype=None, out=None, as_json=False) != BenchOptions():
        raise value_error("--tiles", "options of a sweep beside it", "--dtype, --out and --json", "Drop the others")
    chosen = study.studies(None if options.dtype is None else dtype_key(options.dtype))
    where, line = device.resolve(None)
    if where != "cuda":
        way_out = "`flashtile compile` needs none and shows what the kernels of the table take"
        raise unsupported("--tiles", "no GPU here", "a GPU that torch sees", way_out)
    folder, arch = writable_folder(options.out or device.own_results(where)), current_arch()
    console = make_console(options.as_json)
    say(console, line)
    study.compile_all(chosen, arch)
    return Run(chosen, arch, folder, device.environment(where, arguments), console, options.as_json).start


@dataclass
class Run:
    """A study under way."""

    chosen: Sequence[Study]
    arch: Arch
    folder: Path
    env: Environment
    console: Console
    as_json: bool = False

    def start(self) -> int:
        rows, written, load = list[TileRow](), list[Path](), Load("cuda")
        try:
            for one in self.chosen:
                path = self.folder / f"tiles_{one.dtype}.csv"
                found = self._study(one)
                with Writer(path, TileRow) as writer:
                    writer.add(found)
                rows += found
                written.append(path)
                show(self.console, tables.study_table(found))
                self._say_refusals(found)
                try:
                    written += figures.draw(path)
                except Unsupported as error:
                    say(self.console, str(error))
        except KeyboardInterrupt:
            self.console.print("Interrupted: files that were written are complete.", highlight=False)
            return INTERRUPTED
        say_files(self.console, written)
        say_remark(self.console, load.remark())
        if self.as_json:
            print(json.dumps([as_dict(row) for row in rows], indent=1))
        return 1 if any(row.status == "inaccurate" for row in rows) else 0

    def _say_refusals(self, rows: Sequence[TileRow]) -> None:
        reasons = {
            f"{row.status}: d={row.head_dim} {row.tile}: {row.reason}": None for row in rows if row.status != "ok"
        }
        for text in reasons:
            say(self.console, text)

    def _study(self, chosen: Study) -> list[TileRow]:
        """Each head dim by itself: its tiles and the peer take turns in every round."""
        timed = list[Row]()

        def measured(say: Callable[[str], None]) -> Iterator[list[Row]]:
            for head_dim in chosen.head_dims:
                contenders = [*(trial.provider() for trial in chosen.trials(head_dim)), study.peer(chosen)]
                sweep = Sweep(chosen.plan(head_dim), contenders, gpu_settings(_BUDGET_S), self.env)
                yield from sweep.rows(lambda point, name: say(f"d={point.head_dim}: {name}"))

        collect(self.console, 2 * len(chosen.head_dims), measured, timed.extend)
        counted, reason = self._count(timed)
        trials = {trial.provider_name: trial for head_dim in chosen.head_dims for trial in chosen.trials(head_dim)}
        peers = {row.point: row.tflops for row in timed if row.is_baseline and row.is_ok}
        studied = []
        for row in timed:
            if not row.is_baseline:
                counts, why = (
                    (Counters(), "counted in the full call")
                    if row.is_causal
                    else (counted.get(row.provider, Counters()), reason)
                )
                studied.append(self._row(trials[row.provider], row, counts, why, chosen.peer, peers.get(row.point)))
        return studied

    def _count(self, timed: Sequence[Row]) -> tuple[dict[str, Counters], str]:
        """Returns what Nsight Compute counts in a full call of each tile that ran, and why it counts nothing."""
        calls = [
            Call(row.provider, row.point) for row in timed if row.is_ok and not row.is_baseline and not row.is_causal
        ]
        if not calls:
            return {}, ""
        try:
            found = counters.profile(calls, source=study.__name__)
        except Unsupported as error:
            return {}, str(error)
        return {call.provider: one for call, one in zip(calls, found, strict=True)}, ""

    def _row(
        self, trial: Trial, row: Row, counted: Counters, why: str, peer: str, peer_tflops: float | None
    ) -> TileRow:
        use = None if row.status == "refused" else trial.facts(row.is_causal, self.arch)
        return TileRow(
            **shared_fields(TileFacts, row),
            kernel=trial.row.kernel,
            arch=self.arch.name,
            seqlen=row.seqlen_q,
            tile=trial.name,
            block_m=trial.row.owned,
            block_n=trial.row.streamed,
            num_threads=trial.row.num_threads,
            is_chosen=trial.is_chosen(row.is_causal, self.arch),
            shared_bytes=trial.row.shared_bytes,
            registers=None if use is None else use.resources.registers,
            spill_bytes=None if use is None else use.resources.spill_bytes,
            blocks=None if use is None else use.blocks,
            occupancy=None if use is None else use.occupancy,
            computed_occupancy=None if use is None else use.computed_occupancy,
            peer=peer,
            peer_tflops=peer_tflops,
            no_counters=why,
            **asdict(counted),
            env=self.env,
        )
