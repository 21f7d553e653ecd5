"""The parts of one run: they are made here, wired together, and closed in reverse order."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoTokenizer

from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.config.load import save_config
from hybridrl.config.schema import Config
from hybridrl.data.demonstrations import build_demonstrations
from hybridrl.data.prompts import load_prompts
from hybridrl.data.rows import load_rows
from hybridrl.data.stream import DemonstrationStream, PromptStream
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import load_spec
from hybridrl.parallel import groups
from hybridrl.parallel.device import choose_device
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.sync import WeightSync
from hybridrl.rewards.score import Judges, reward_metrics
from hybridrl.rollout.causal_model import eos_token_ids
from hybridrl.rollout.collect import share
from hybridrl.rollout.engine import Engine
from hybridrl.rollout.metrics import response_metrics
from hybridrl.rollout.samples import Request, Sample
from hybridrl.rollout.transformers_engine import TransformersEngine
from hybridrl.telemetry.memory import peak_bytes
from hybridrl.telemetry.metrics import MetricsWriter, set_aside
from hybridrl.telemetry.timer import Timer
from hybridrl.training.actor import Actor, Reference
from hybridrl.training.batch import mismatch
from hybridrl.training.rows import Row


def _leave_world(
    own: bool, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """After an error the connections stay open until the process ends: closing them makes the other ranks fail too, and
    their errors would be told as the first (see `hybridrl.parallel.failure`)."""
    groups.shutdown(world=own and error is None)


class MismatchError(RuntimeError):
    """Trainer and engine disagree about the log-probs of the sampled tokens by more than `trainer.max_mismatch`."""


class Session:
    """Everything that the loop calls, for one configuration on this rank. Use as a context manager.

    What can be wrong with the input is found first: data and tokenizer are read before a model is built.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.trainer.output_dir)
        self._stack = ExitStack()

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
        """Whether the run learns from demonstrations alone."""
        return self.config.algorithm.name == "sft"

    def _start(self) -> None:
        config = self.config
        self.device = choose_device(config.trainer.device)
        own_world = not dist.is_initialized()
        if own_world:
            groups.start_world(self.device)
        self._stack.push(partial(_leave_world, own_world))
        self.rank, world = dist.get_rank(), dist.get_world_size()
        parallel = config.parallel
        sizes = ParallelSizes(
            world=world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp
        )
        groups.initialize(sizes, vpp=parallel.vpp, seed=config.trainer.seed)
        self.timer = Timer(torch.cuda.synchronize if self.device.type == "cuda" else None)
        self.model_folder = builtin.resolve(config.model.path, cache_folder())
        self.tokenizer_folder = builtin.resolve(config.model.tokenizer or config.model.path, cache_folder())
        self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_folder)
        self.eos_ids = eos_token_ids(self.model_folder)
        self._read_data()
        spec = load_spec(self.model_folder)
        updates = config.trainer.steps * (
            config.trainer.prompts_per_step // (config.trainer.mini_batch_prompts or config.trainer.prompts_per_step)
        )
        self.actor = Actor(config, spec, sizes, folder=self.model_folder, total_updates=updates)
        self.reference: Reference | None = None
        if not self.supervised:
            self.judges = self._stack.enter_context(Judges(config.rewards))
            self.engine = self._make_engine()
            self._sync = self._stack.enter_context(self._make_sync())
            self._leads = self._is_leader()
            if config.algorithm.kl.where != "none":
                self.reference = Reference(config, spec, sizes, folder=self.model_folder)
        self._open_folder()

    def _read_data(self) -> None:
        config = self.config
        common: dict[str, Any] = {"seed": config.data.seed, "shuffle": config.data.shuffle}
        if self.supervised or config.warm_start.steps:
            batch = config.trainer.prompts_per_step if self.supervised else config.warm_start.batch_size
            option = "trainer.prompts_per_step" if self.supervised else "warm_start.batch_size"
            limit = config.rollout.max_prompt_length + config.rollout.max_response_length
            examples = build_demonstrations(load_rows(config.data), config.data, self.tokenizer, limit, self.eos_ids)
            self.demonstrations = DemonstrationStream(examples.demonstrations, batch=batch, option=option, **common)
            self.dropped = examples.dropped
        if not self.supervised:
            prompts = load_prompts(config.data, self.tokenizer, config.rollout.max_prompt_length)
            self.prompts = PromptStream(prompts.prompts, batch=config.trainer.prompts_per_step, **common)
            self.dropped = prompts.dropped

    def _make_engine(self) -> Engine:
        config = self.config
        return TransformersEngine(
            self.model_folder,
            ranks=range(dist.get_world_size()),
            rank=self.rank,
            device=self.device,
            dtype=getattr(torch, config.model.dtype),
            max_batch_size=config.rollout.max_batch_size,
        )

    def _make_sync(self) -> WeightSync:
        config, engine = self.config, self.engine
        return WeightSync(
            self.actor.layout,
            self.actor.tensors(),
            engine.layout,
            engine.parameters(),
            self.rank,
            bucket_bytes=config.reshard.bucket_bytes,
            ranks_per_node=config.trainer.ranks_per_node,
            verify=config.reshard.verify,
        )

    def _is_leader(self) -> bool:
        """Whether this is the lowest rank of its replica: the one whose samples and rewards count."""
        replicas: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, self.engine.replica)
        return replicas.index(self.engine.replica) == self.rank

    def _open_folder(self) -> None:
        self.writer: MetricsWriter | None = None
        if self.rank != 0:
            return
        console = Console()
        aside = set_aside(self.folder)
        if aside is not None:
            console.print(f"an earlier run in {self.folder} was moved to {aside}")
        if self.dropped:
            console.print(f"{self.dropped} rows over the length limit were dropped (data.overlong=drop)")
        save_config(self.config, self.folder)
        self.writer = MetricsWriter(self.folder, self.config.trainer.steps, console)
        self._stack.callback(self.writer.close)

    def sync_weights(self, version: int) -> None:
        """Brings the trained weights into the engine, and into service as `version`."""
        self.engine.wake()
        self._sync.run(version)
        self.engine.publish(version)

    def judge(self, local: Sequence[Sample], requests: Sequence[Request]) -> tuple[list[Sample], dict[str, float]]:
        """Rewards this replica's samples; returns the samples of all replicas, on every rank, and their metrics."""
        counts = self.judges.score(local if self._leads else (), self.tokenizer)
        samples = share(local, requests, replica=self.engine.replica, num_replicas=self.engine.num_replicas)
        totals = torch.tensor(list(counts.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        failures = dict(zip(counts, totals.tolist(), strict=True))
        return samples, {**reward_metrics(samples), **response_metrics(samples), **failures}

    def score(self, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
        """The rows with the trainer's own log-probs (and the reference's where a KL asks), and the engine's mismatch.

        Raises MismatchError, on all ranks, where the mismatch exceeds `trainer.max_mismatch`.
        """
        rows = [
            row.with_fields(old_log_probs=values) for row, values in zip(rows, self.actor.log_probs(rows), strict=True)
        ]
        if self.reference is not None:
            found = self.reference.log_probs(rows)
            rows = [row.with_fields(ref_log_probs=values) for row, values in zip(rows, found, strict=True)]
        gap = mismatch(rows)
        limit, mean = self.config.trainer.max_mismatch, gap["mismatch/logprob_abs_mean"]
        if limit is not None and mean > limit:
            raise MismatchError(
                f"log-probs of the sampled tokens differ by {mean:.6g} on average between trainer and engine, over "
                f"trainer.max_mismatch={limit}: the two do not compute the same model; look at dtype, temperature, "
                "top-p and top-k, and the weight sync before training on"
            )
        return rows, gap

    def record(self, step: int, *metrics: dict[str, float]) -> None:
        """Writes a step's metrics, with the times since the last record and the peak of memory over all ranks."""
        peak = torch.tensor(float(peak_bytes()), dtype=torch.float64, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        merged = {key: value for part in metrics for key, value in part.items()}
        merged |= self.timer.take() | {"memory/peak": float(peak)}
        if self.writer is not None:
            self.writer.write(step, merged)

    def export(self) -> None:
        """Writes the trained weights into the run folder as a Hugging Face model (`hf/`)."""
        chosen = self.config.trainer.export_dtype
        export_weights(
            self.folder / "hf",
            self.actor.layout,
            self.actor.tensors(),
            self.rank,
            source=self.model_folder,
            tokenizer=self.tokenizer_folder,
            dtype=None if chosen == "parameters" else chosen,
        )
