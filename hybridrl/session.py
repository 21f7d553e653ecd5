"""The parts of one run: they are made here, wired together, and closed in reverse order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from hybridrl.algorithms.kl_control import KlController
from hybridrl.config.kinds import is_supervised
from hybridrl.config.load import ConfigError, save_config
from hybridrl.config.schema import Config
from hybridrl.config.validate.algorithm import updates_a_step
from hybridrl.files import held
from hybridrl.inputs import Inputs, read_inputs
from hybridrl.memory.timeshare import held_in_rollout, make_room
from hybridrl.models.families import trained_spec
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel import groups
from hybridrl.parallel.device import choose_device
from hybridrl.parallel.signals import Stopped, StopSignals
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.parallel.watchdog import Watchdog
from hybridrl.rewards.reward_model import split_judges
from hybridrl.rewards.score import Judges
from hybridrl.rollout.engines import make_engine
from hybridrl.rollout.groups import GroupPool
from hybridrl.rollout.replicas import Replicas
from hybridrl.rollout.samples import Request, Sample
from hybridrl.rollout.stops import decoding
from hybridrl.run_models import RunModels, make_models
from hybridrl.saved import checkpoints_of, export
from hybridrl.shared import device_bytes, share_device
from hybridrl.telemetry.console import RunConsole
from hybridrl.telemetry.memory import peak_bytes, plot_trace, write_trace
from hybridrl.telemetry.metrics import MetricsWriter, set_aside
from hybridrl.telemetry.rollouts import write_rollouts
from hybridrl.telemetry.timer import Timer
from hybridrl.telemetry.tracker import Tracker
from hybridrl.telemetry.versions import save_versions
from hybridrl.training.actor import Reference
from hybridrl.training.losses import Loss
from hybridrl.training.mismatch import MismatchError, beyond, mismatch
from hybridrl.training.model import TrainedModel
from hybridrl.training.rows import Floats, Row
from hybridrl.training.value import Value
from hybridrl.training.visiting import VisitingReference


def _leave_world(
    own: bool, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """After an error the connections stay open until the process ends: closing them makes the other ranks fail too, and
    their errors would be told as the first (see `hybridrl.parallel.failure`)."""
    groups.shutdown(world=own and error is None)


def _with_field(rows: Sequence[Row], name: str, values: Sequence[Floats]) -> list[Row]:
    return [row.with_fields(**{name: found}) for row, found in zip(rows, values, strict=True)]


class Session:
    """Everything that the loop calls, for one configuration on this rank. Use as a context manager.

    What can be wrong with the input is found first: before there is a process group, data and tokenizer are read (if
    `inputs` does not hold them yet) and the judges started. Both raise ConfigError.
    """

    def __init__(self, config: Config, inputs: Inputs | None = None) -> None:
        self.config = config
        self._inputs = inputs
        self.folder = Path(config.trainer.output_dir)
        self._stack = ExitStack()
        self.writer: MetricsWriter | None = None
        self._unsaid: list[str] = []
        self._take_models(RunModels())

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def supervised(self) -> bool:
        """Whether the run learns from data alone."""
        return is_supervised(self.config)

    def _start(self) -> None:
        config = self.config
        self.device = choose_device(config.trainer.device)
        inputs = self._read_data() if self._inputs is None else self._inputs
        self.model_folder, self.tokenizer_folder = inputs.model_folder, inputs.tokenizer_folder
        self.tokenizer, self.eos_ids = inputs.tokenizer, inputs.eos_ids
        if inputs.demonstrations is not None:
            self.demonstrations = inputs.demonstrations
        if inputs.prompts is not None:
            self.prompts = inputs.prompts
        self.evaluation = inputs.evaluation
        if inputs.preferences is not None:
            self.preferences = inputs.preferences
        if not self.supervised:
            self.judges = self._start_judges()
        sizes = self._start_world()
        self._stop = self._stack.enter_context(StopSignals(config.checkpoint.grace_s))
        watchdog = self._stack.enter_context(Watchdog(config.trainer.stall_timeout_s))
        self.timer = Timer(torch.cuda.synchronize if self.device.type == "cuda" else None, watchdog.pass_border)
        spec = trained_spec(self.model_folder)
        self._take_models(make_models(config, spec, sizes, folder=self.model_folder, updates=self._updates))
        self.reference: Reference | VisitingReference | None = None
        if not self.supervised:
            make_room(config.memory, self.actor)
            self.engine = make_engine(
                config,
                self.model_folder,
                spec,
                self.device,
                self._stack,
                self.actor.layout,
                self.tokenizer_folder,
                held_bytes=held_in_rollout(config.memory, self.actor),
                device_bytes=device_bytes(self.device),
            )
            self.share = self._stack.enter_context(share_device(self, self._stack))
            self.hybrid = self.share.hybrid
            self.replicas = Replicas(
                self.engine,
                max_imbalance=config.rollout.max_imbalance,
                decode=decoding(self.tokenizer) if config.rollout.stop else None,
            )
            self._leads = self._is_leader()
            self.groups = GroupPool(config.algorithm.dynamic_sampling, config.trainer.prompts_per_step)
            kl = config.algorithm.kl
            self.kl = KlController(kl.coef, target=kl.target, gain=kl.gain)
        if self.wants_reference:
            self.reference = self._make_reference(spec, sizes)
        if self.rank == 0:
            self._stack.enter_context(held(self.folder))  # a run that is being ended may save there yet
        self._resume()
        self._open_folder(spec, inputs)
        self.checkpoints.check_place()

    def _resume(self) -> None:
        """Names what a checkpoint holds of this run, and goes on from one if `trainer.resume` says so."""
        self.checkpoints = checkpoints_of(self)
        with self._saving():
            self.done = self.checkpoints.resume()
        """Steps that were done before this process."""

    def _take_models(self, made: RunModels) -> None:
        if made.actor is not None:
            self.actor = made.actor
        self.reward_model, self.critic, self.teacher = made.reward_model, made.critic, made.teacher
        self.reward_models = made.judges
        self._value_loss = Value(clip=self.config.critic.clip)

    @property
    def trained(self) -> TrainedModel:
        """The model that the run is for, and exports."""
        return self.actor if self.reward_model is None else self.reward_model

    @property
    def wants_reference(self) -> bool:
        """Whether the algorithm compares with a frozen policy."""
        algorithm, preference = self.config.algorithm, self.config.preference
        if algorithm.name == "preference":
            return preference.reference == "on_the_fly"
        return algorithm.kl.where != "none"

    def _start_world(self) -> ParallelSizes:
        own_world = not dist.is_initialized()
        if own_world:
            groups.start_world(self.device, timeout_s=self._patience_s)
        self._stack.push(partial(_leave_world, own_world))
        self.rank, parallel = dist.get_rank(), self.config.parallel
        sizes = ParallelSizes(
            world=dist.get_world_size(),
            tp=parallel.tp,
            cp=parallel.cp,
            pp=parallel.pp,
            ep=parallel.ep,
            etp=parallel.etp,
        )
        groups.initialize(sizes, vpp=parallel.vpp, seed=self.config.trainer.seed, timeout_s=self._patience_s)
        return sizes

    @property
    def _patience_s(self) -> float:
        """How long collectives wait for a rank: longer than the watchdog, which names it."""
        return max(groups.TIMEOUT_S, 2 * (self.config.trainer.stall_timeout_s or 0.0))

    @property
    def _updates(self) -> int:
        """Optimizer updates of the whole run, the warm start's apart."""
        steps = self.config.trainer.steps - self.config.critic.warmup_steps
        return steps * updates_a_step(self.config)

    def _read_data(self) -> Inputs:
        return read_inputs(self.config)

    def _start_judges(self) -> Judges:
        """The judges, in their worker processes. Raises ConfigError for one that cannot be imported or called."""
        try:
            rules, _ = split_judges(self.config.rewards.judges)
            return self._stack.enter_context(Judges(replace(self.config.rewards, judges=rules)))
        except ValueError as error:
            raise ConfigError([f"rewards.judges: {error}"]) from error

    def _make_reference(self, spec: ModelSpec, sizes: ParallelSizes) -> Reference | VisitingReference:
        visitor = None if self.supervised else self.share.visitor(self.actor.tensors())
        if visitor is not None:
            return VisitingReference(self.actor, visitor)
        return Reference(self.config, spec, sizes, folder=self.model_folder)

    def _is_leader(self) -> bool:
        """Whether this is the lowest rank of its replica: the one whose samples and rewards count."""
        replicas: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, self.engine.replica)
        return replicas.index(self.engine.replica) == self.rank

    def _open_folder(self, spec: ModelSpec, inputs: Inputs) -> None:
        """Makes the run folder and says what will run; on rank 0."""
        if self.rank != 0:
            return
        console = RunConsole(self.config.trainer.steps)
        console.introduce(self.config, spec, device=str(self.device), rows=inputs.rows, dropped=inputs.dropped)
        continues = self.checkpoints.continues
        if not continues and (aside := set_aside(self.folder)) is not None:
            console.note(f"an earlier run in {self.folder} was moved to {aside}")
        save_config(self.config, self.folder)
        save_versions(self.folder)
        tracker = Tracker(self.config, self.folder) if self.config.trainer.wandb_project is not None else None
        self.writer = MetricsWriter(self.folder, console, done=self.done if continues else 0, tracker=tracker)
        self._stack.callback(self.writer.close)
        for text in self._unsaid:
            self.note(text)

    @contextmanager
    def rollout_phase(self, version: int) -> Iterator[dict[str, float]]:
        """The engine has the device, with the trained weights in service as `version`.

        Yields the bytes that brought them there, of all ranks together, as `sync/*_bytes`.
        """
        with ExitStack() as stack:
            with self.timer("sync"):
                found = stack.enter_context(self.hybrid.rollout_phase(version))
                moved = self._totals({key: value for key, value in found.items() if key.endswith("_bytes")})
            yield moved

    def _totals(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The sums over all ranks."""
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(metrics, values.tolist(), strict=True))

    def judge(self, local: Sequence[Sample], requests: Sequence[Request]) -> tuple[list[Sample], dict[str, float]]:
        """Rewards this replica's samples; returns those of all replicas, on every rank, and the counts of a batch."""
        counts = self.judges.score(local if self._leads else (), self.tokenizer)
        served = {name: count * self._leads for name, count in self.replicas.take_counts().items()}
        samples = self.replicas.share(local, requests)
        if self.reward_models is not None:
            self.reward_models.score(samples)
        return samples, self._totals({**counts, **served})

    def score(self, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
        """The rows with `old_log_probs`, what the reference, the teacher and the critic say where there are such, and
        metrics of the engine's mismatch.

        Where the engine's own log-probs are the old ones (`algorithm.old_log_probs=engine`), nothing is computed and no
        mismatch known. Raises MismatchError, on all ranks, where one exceeds a limit of `mismatch.stop`.
        """
        own = self.config.algorithm.old_log_probs == "trainer"
        old = [row.fields["rollout_log_probs"] for row in rows]
        if own:
            scores = self.actor.score(rows, keep_routes=self.config.algorithm.routing_replay == "r2")
            old = scores.log_probs
            if scores.routes is not None:
                rows = [replace(row, routes=routes) for row, routes in zip(rows, scores.routes, strict=True)]
        rows = _with_field(rows, "old_log_probs", old)
        if self.reference is not None:
            found = self.reference.log_probs(rows)
            rows = _with_field(rows, "ref_log_probs", found)
        if self.teacher is not None:
            rows = _with_field(rows, "teacher_log_probs", self.teacher.log_probs(rows))
        if self.critic is not None:
            rows = _with_field(rows, "values", self.critic.values(rows))
        return rows, self._mismatch(rows) if own else {}

    def update(self, rows: Sequence[Row], loss: Loss, *, step: int) -> dict[str, float]:
        """One update on these rows: of the critic, where there is one, and of the policy, once the critic is warm."""
        found: dict[str, float] = {}
        if self.critic is not None:
            learnt = self.critic.update(rows, self._value_loss)
            named = {key: value for key, value in learnt.items() if key in self._value_loss.metrics}
            found = named | {f"critic/{key}": learnt[key] for key in ("grad_norm", "lr", "update/skipped")}
        if step > self.config.critic.warmup_steps:
            found |= self.actor.update(rows, loss)
        return found

    def _mismatch(self, rows: Sequence[Row]) -> dict[str, float]:
        gap, limits = mismatch(rows), self.config.mismatch
        if wrong := beyond(gap, limits.stop, "mismatch.stop"):
            raise MismatchError(
                f"trainer and engine disagree about the sampled tokens: {'; '.join(wrong)}. The two do not compute the "
                "same model: look at dtype, temperature, top-p and top-k, and the weight sync before training on"
            )
        if doubtful := beyond(gap, limits.warn, "mismatch.warn"):
            self.note(f"mismatch of trainer and engine: {'; '.join(doubtful)}")
        return gap

    def record(self, step: int, *metrics: dict[str, float]) -> None:
        """Writes a step's metrics, with the times since the last record and the peak of memory over all ranks."""
        most = {"memory/peak": float(peak_bytes())}
        if not self.supervised:
            most = self._memory_metrics(step)
        values = torch.tensor(list(most.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        merged = {key: value for part in metrics for key, value in part.items()}
        merged |= self.timer.take() | dict(zip(most, values.tolist(), strict=True))
        self._recorded = merged
        if self.writer is not None:
            self.writer.write(step, merged)

    def _memory_metrics(self, step: int) -> dict[str, float]:
        """This rank's memory since the last step; on rank 0 its entries are written to the trace."""
        ledger = self.share.ledger
        entries = ledger.take()
        if self.writer is not None and self.config.memory.trace:
            write_trace(self.folder, step, entries)
        return {
            "memory/peak": float(max(ledger.highest, peak_bytes())),
            "memory/unowned_growth": float(ledger.growth),
            **{f"memory/{entry.event}": float(entry.total) for entry in entries},
            **self.hybrid.take_metrics(),
        }

    def steps(self) -> Iterator[int]:
        """The steps that are to be made, from 1 or from where the run goes on. After each the run may be saved, and
        ends here, by `Stopped`, if a signal asked for it."""
        self.checkpoints.states.check()
        for step in range(self.done + 1, self.config.trainer.steps + 1):
            yield step
            self._safe_point(step)

    def _saving(self) -> AbstractContextManager[None]:
        """Parameters and optimizer are where they can be read and written."""
        return nullcontext() if self.supervised else self.hybrid.saving()

    def _safe_point(self, step: int) -> None:
        """Training has its weights and its optimizer, and nothing is under way."""
        number = self._stop.agreed(self.device)
        if self.writer is not None:
            self.writer.sync()
        with self.timer("save"), self._saving() if self.checkpoints.due(step, number is not None) else nullcontext():
            self.checkpoints.safe_point(step, self._recorded, save=number is not None)
        every = self.config.checkpoint.hf_every
        if every is not None and step % every == 0:
            with self.timer("export"), self._saving():
                export(self, self.checkpoints.folder / f"hf-{step:08d}")
        if number is not None:
            self.note(f"ended by a signal after step {step}, which is saved in {self.checkpoints.folder}")
            raise Stopped(number)

    def keep_rollouts(self, step: int, samples: Sequence[Sample], rows: Sequence[Row]) -> None:
        """Writes the first of the step's samples, whose rows these are, into `rollouts/` for a person to read."""
        count = self.config.trainer.rollout_records
        if self.writer is not None and count:
            advantages = ([float(v) for v in row.fields["advantages"][row.mask]] for row in rows[:count])
            chosen = zip(samples[:count], advantages, strict=True)
            write_rollouts(self.folder / "rollouts", step, chosen, self.tokenizer.decode)

    def note(self, text: str) -> None:
        """Says something on the console, once for all ranks; as soon as there is one."""
        if self.writer is not None:
            self.writer.console.note(text)
        else:
            self._unsaid.append(text)

    def finish(self) -> None:
        """Writes the trained weights into the run folder as a Hugging Face model (`hf/`), and says where things are."""
        self.checkpoints.finish()
        model = self.folder / "hf" if self.config.trainer.export_final else None
        if model is not None:
            with self._saving():
                export(self, model)
        if self.writer is not None:
            if not self.supervised and self.config.memory.trace:
                plot_trace(self.folder)
            self.writer.console.conclude(self.folder, model)
