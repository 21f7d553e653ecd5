"""A model that is spread over the world and trained: what the policy and the critic have in common.

Every method is collective: all ranks call it with the same rows, and all get the same result.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.config.schema import Config
from hybridrl.memory.region import Region, region_bytes
from hybridrl.memory.residence import Residence
from hybridrl.models.families import weight_map
from hybridrl.models.live import LiveTensors
from hybridrl.models.megatron.build import build_model, named_tensors, unwrap
from hybridrl.models.megatron.config import uses_transformer_engine
from hybridrl.models.megatron.rebind import parameter_bytes, rebind
from hybridrl.models.megatron.router import load_metrics, take_balance, update_biases
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.groups import Groups, current
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.configured import configured_layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.training.batch import with_weights
from hybridrl.training.losses import AnyLoss, Shares
from hybridrl.training.masters import import_masters
from hybridrl.training.microbatch import MicroBatch
from hybridrl.training.optimizer import Optimizer, wrap
from hybridrl.training.passes import Passes
from hybridrl.training.replay import Routed
from hybridrl.training.rows import Floats, Row
from hybridrl.training.schedule import Schedule

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel


class TrainedModel:
    """Weights, optimizer and passes of one model.

    Needs Megatron's groups for `sizes` (`hybridrl.parallel.groups.initialize`).

    Args:
        config: model, parallel, optimizer and trainer parts are used, and the rollout's temperature.
        spec: of the model in `folder`.
        sizes: the training world.
        folder: the Hugging Face folder that the weights come from.
        total_updates: length of the learning-rate schedule.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, sizes: ParallelSizes, *, folder: Path, total_updates: int
    ) -> None:
        self.config = config
        self.layout = training_layout(config, spec, sizes)
        self._groups = groups_of(sizes)
        self._chunks = wrap(load(config, spec, self.layout, self._groups, folder), config.optimizer)
        self.region = bind(self._chunks) if self._in_region else None
        """Where the parameters lie if they come and go page by page (`memory.parameters=single`)."""
        self.optimizer = Optimizer(self._chunks, config, total_updates)
        pieces = self.layout.pieces(self._groups.rank)
        import_masters(folder, pieces, self.tensors(), self.optimizer.inner.chained_optimizers)
        self._passes = Passes(self._chunks, config, spec, self._groups)

    replays = False
    """Whether routers take the experts that rows name: they are the policy's."""

    @property
    def _in_region(self) -> bool:
        """Whether the parameters are to lie in a region of memory of their own."""
        return False

    def tensors(self) -> LiveTensors:
        """This rank's live parameters and buffers, by the names of `layout`."""
        return named_tensors(self._chunks)

    @property
    def chunks(self) -> "list[DistributedDataParallel]":
        """The chunks of this rank, wrapped for gradient buffers."""
        return self._chunks

    @property
    def megatron_optimizer(self) -> Any:
        """Megatron's optimizer."""
        return self.optimizer.inner

    @property
    def moments(self) -> int:
        """Moments that the optimizer keeps of each parameter."""
        return self.optimizer.moments

    def reside(self, residence: Residence) -> None:
        """Has the model ask `residence` before it uses memory that a rollout may have moved away."""
        self.optimizer.residence = self._passes.residence = residence

    def update(self, rows: Sequence[Row], loss: AnyLoss, *, lr: float | None = None) -> dict[str, float]:
        """One optimizer step on all rows together: the same step however they are cut into ranks and micro-batches.

        `lr` takes the place of the schedule's learning rate for a step outside it (see `Optimizer.step`).
        Returns the loss's metrics over the whole batch, and `grad_norm` (before clipping), `lr`, `tokens/trained`,
        `micro_batches`, `update/skipped` (1 where a non-finite gradient held the step back).
        Raises NonFiniteGradientError as `Optimizer.step` does, and KeyError for a field that the loss needs.
        """
        self.optimizer.zero_grad()
        plan = self._passes.schedule(rows)
        sums = self._accumulate(rows, loss, plan)
        step = self.optimizer.step(lr)
        update_biases(self._chunks, 0.0 if step.skipped else self.config.model.router_bias_rate)
        return {
            **sums,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "tokens/trained": float(sum(row.trained for row in rows)),
            "micro_batches": float(plan.steps),
            "update/skipped": float(step.skipped),
        }

    def _accumulate(self, rows: Sequence[Row], loss: AnyLoss, plan: Schedule) -> dict[str, float]:
        """Forward and backward over the plan; the gradients are whole afterwards."""
        weighted = with_weights(rows, loss.aggregate, loss.aggregate_length)
        share = 1 / max(1, sum(row.trained for row in rows))
        sums = torch.zeros(len(loss.metrics), dtype=torch.float64, device=self._passes.device)

        compute: Callable[..., Shares] = loss

        def consume(batch: MicroBatch, *outputs: Tensor) -> Tensor:
            value, metrics = compute(*outputs, batch.fields, batch.mask, share, batch.segments)
            sums.add_(torch.stack([metrics[name] for name in loss.metrics]))
            return value

        balanced = self._scale_balance_loss(rows)
        routed = self._passes.routed(rows, backward=True) if self.replays else None
        self._passes.run(weighted, plan, (*loss.fields, "weights"), consume, backward=True, routed=routed)
        if not _speaks(self._groups):
            sums.zero_()
        dist.all_reduce(sums)
        metrics: dict[str, float] = dict(zip(loss.metrics, sums.tolist(), strict=True))
        metrics |= self._balance(rows) if balanced else {}
        metrics |= {} if self._passes.moe is None else load_metrics(self._chunks, self._passes.moe, self._passes.device)
        return metrics | ({} if routed is None else routed.metrics())

    def _scale_balance_loss(self, rows: Sequence[Row]) -> bool:
        """Makes the router's load-balancing loss a mean over all tokens of the batch; whether there is such a loss."""
        configs = [unwrap(chunk).config for chunk in self._chunks]
        if any(config.moe_router_load_balancing_type != "aux_loss" or not config.num_moe_experts for config in configs):
            return False
        for config in configs:
            config.moe_aux_loss_coeff = self.config.model.aux_loss_coef / sum(map(len, rows))
        return True

    def _balance(self, rows: Sequence[Row]) -> dict[str, float]:
        """The load-balancing loss as a mean over tokens and layers: 1 where all experts are chosen alike."""
        total = take_balance(self._chunks, self._passes.device)
        dist.all_reduce(total)
        layers = float(total[1]) / self._groups.sizes.stage  # each layer's router is on every rank of its stage
        return {"loss/aux": float(total[0]) / (sum(map(len, rows)) * layers)}


def training_layout(config: Config, spec: ModelSpec, sizes: ParallelSizes) -> MegatronLayout:
    """Where each rank of this training world keeps which weights."""
    return configured_layout(config, weight_map(spec), sizes, transformer_engine=uses_transformer_engine())


def groups_of(sizes: ParallelSizes) -> Groups:
    groups = current()
    if groups.sizes != sizes:
        raise RuntimeError(f"Megatron's groups are of {groups.sizes}, the model was asked for {sizes}")
    return groups


def load(config: Config, spec: ModelSpec, layout: MegatronLayout, groups: Groups, folder: Path) -> "list[GPTModel]":
    chunks = build_model(spec, config)
    # `model.dtype` is the user's word; what config.json says of the files' dtype need not hold for every tensor.
    import_weights(folder, layout, named_tensors(chunks), groups.rank, convert=True)
    return chunks


def bind(chunks: "Sequence[DistributedDataParallel]") -> Region:
    """Moves the parameters of wrapped chunks into a region, for good. Before the optimizer is made.

    The largest of Megatron's parameter buffers is there twice meanwhile; no optimizer state is there yet.
    """
    region = Region(region_bytes(parameter_bytes(chunks)), next(chunks[0].parameters()).device)
    region.commit()
    rebind(chunks, region.take)
    return region


def _speaks(groups: Groups) -> bool:
    """Whether this rank is the one of its replica that reports: the first TP and CP rank of the last stage."""
    return groups.is_last_stage and groups.coordinates.tp == 0 and groups.coordinates.cp == 0


def score_rows(
    passes: Passes, groups: Groups, rows: Sequence[Row], *, routed: Routed | None = None
) -> list[list[Floats]]:
    """What the model says of each token, output by output: [length] float32 a row, in the order of the rows."""
    starts = [0, *accumulate(len(row) for row in rows)]
    flat = np.zeros((passes.outputs, starts[-1]), np.float32)

    def consume(batch: MicroBatch, *outputs: Tensor) -> Tensor:
        for out, values in zip(flat, outputs, strict=True):
            for row, found in batch.split(values):
                out[starts[row] : starts[row + 1]] = found
        return outputs[0].new_zeros(())

    passes.run(rows, passes.schedule(rows), (), consume, backward=False, routed=routed)
    if not _speaks(groups):
        flat.fill(0)
    whole = torch.from_numpy(flat).to(passes.device)
    dist.all_reduce(whole)  # each entry is one rank's number and zeros: exact
    return [[values[a:b] for a, b in pairwise(starts)] for values in whole.cpu().numpy()]
