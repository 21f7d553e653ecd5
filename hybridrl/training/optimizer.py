"""The optimizer step: Megatron's gradient buffers and optimizer, our learning rate, and what happens to bad gradients.

Gradients arrive as plain sums over all tokens of all ranks, already weighted for the whole batch: nothing here divides
by ranks, micro-batches or tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel import compat as compat  # isort: skip - must precede megatron.core

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from hybridrl.config.schema import Config, OptimizerConfig
from hybridrl.memory.residence import Always, Residence
from hybridrl.models.megatron.build import named_tensors
from hybridrl.training.lr import lr_at
from hybridrl.training.replicas import ReplicatedRows


class NonFiniteGradientError(RuntimeError):
    """Several updates in a row had a gradient that is infinite or NaN."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step did."""

    grad_norm: float
    """Norm of the whole gradient before clipping; infinite or NaN where the step was skipped."""
    lr: float
    skipped: bool


def wrap(chunks: Sequence[GPTModel], config: OptimizerConfig) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers (float32), summed over replicas when the backward passes are done.

    Parameters move into contiguous buffers, so import weights first and ask for tensors afterwards.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        # A weight sync reads the parameters straight after the step: they must not wait for the next forward pass.
        overlap_param_gather=False,
        use_distributed_optimizer=config.distributed,
    )
    return [
        DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class Optimizer:
    """Megatron's optimizer over wrapped chunks. Every rank calls `step`, and all step or all skip.

    Must be made after the weights are imported: with bfloat16 parameters it copies them into float32 masters.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], config: Config, total_updates: int) -> None:
        self.config = config.optimizer
        self.chunks = chunks
        self.total_updates = total_updates
        self.residence: Residence = Always()
        """Is asked before gradients or optimizer state are used, which a rollout may have moved away."""
        self.updates = 0
        """Updates made; skipped ones do not count, so they do not move the schedule."""
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._patience = config.trainer.max_nonfinite_steps
        self.inner = get_megatron_optimizer(_megatron_config(config), list(chunks), use_gloo_process_groups=False)
        self._replicas = ReplicatedRows(chunks)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = self._sum_gradients

    @property
    def moments(self) -> int:
        """Moments that are kept of each parameter."""
        return 2 if self.config.name == "adam" else int(self.config.momentum > 0)

    def zero_grad(self) -> None:
        """Clears the gradient buffers. Call before each update's first forward pass."""
        self.residence.before_gradients()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, lr: float | None = None) -> Step:
        """One update with the gradients in the buffers, clipped by the norm of the whole gradient.

        `lr` takes the place of the schedule's learning rate; such a step does not move the schedule.
        With an infinite or NaN norm on any rank no rank changes anything, weights, moments and schedule.
        Raises NonFiniteGradientError, on all ranks, after `trainer.max_nonfinite_steps` such steps in a row.
        """
        self.residence.before_step()
        scheduled = lr is None
        lr = lr_at(self.updates + 1, self.config, self.total_updates) if lr is None else lr
        self.inner.prepare_grads()
        norm = self._norm()
        if not _all_ranks(math.isfinite(norm)):
            self._skip(norm)
            return Step(norm, lr, skipped=True)
        if self.config.clip_grad > 0:
            self._clip(norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step_with_ready_grads()
        self.updates += scheduled
        self._skipped_in_a_row = 0
        return Step(norm, lr, skipped=False)

    def state_dict(self) -> dict[str, int]:
        """The counters: what the schedule and the patience with bad gradients depend on. Moments are saved apart."""
        return {"updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from these counters."""
        self.updates, self.skipped = state["updates"], state["skipped"]
        self._skipped_in_a_row = state["skipped_in_a_row"]

    def forget(self) -> None:
        """Clears the moments and their step counts, as if no update had been made. Weights and schedule stay."""
        self.residence.before_step()
        for part in self.inner.chained_optimizers:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # where Transformer Engine's and Apex's Adam count, for all parameters at once

    def _sum_gradients(self, model: Any, num_tokens: Any = None, **options: Any) -> None:
        """Megatron's own reduction without its division by the number of tokens: token weights are global already."""
        finalize_model_grads(model, None, **options)
        self._replicas.sum_gradients()

    def _norm(self) -> float:
        """Norm of the whole gradient, each distinct element counted once."""
        norm = float(self.inner.get_grad_norm())
        if not self._replicas or not math.isfinite(norm):
            return norm
        return math.sqrt(max(0.0, norm**2 - self._replicas.surplus(self.inner.chained_optimizers[0])))

    def _clip(self, norm: float) -> None:
        scale = self.config.clip_grad / (norm + 1e-6)
        if scale < 1:
            parts = self.inner.chained_optimizers
            gradients = [p.grad for part in parts for p in part.get_parameters() if p.grad is not None]
            if gradients:  # a rank may hold no shard at all, where there are more ranks than a bucket has pieces
                torch._foreach_mul_(gradients, scale)

    def _skip(self, norm: float) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row < self._patience:
            return
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, _first_bad(self.chunks))
        places = [f"rank {rank}: {name}" for rank, name in enumerate(found) if name is not None]
        raise NonFiniteGradientError(
            f"the gradient norm was {norm} in {self._skipped_in_a_row} updates in a row, the last one update "
            f"{self.updates + 1} (trainer.max_nonfinite_steps={self._patience}); first parameter with a non-finite "
            f"gradient: {'; '.join(places) or 'none, the sum of squares overflows'}"
        )


def _megatron_config(config: Config) -> MegatronOptimizerConfig:
    chosen = config.optimizer
    dtype = getattr(torch, config.model.dtype)
    return MegatronOptimizerConfig(
        optimizer=chosen.name,
        lr=chosen.lr,
        min_lr=chosen.min_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.beta1,
        adam_beta2=chosen.beta2,
        adam_eps=chosen.eps,
        sgd_momentum=chosen.momentum,
        clip_grad=chosen.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=chosen.distributed,
    )


def _all_ranks(good: bool) -> bool:
    """Whether it holds on every rank of the world."""
    device = torch.cuda.current_device()
    flag = torch.tensor([good], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _first_bad(chunks: Sequence[DistributedDataParallel]) -> str | None:
    for name, tensor in named_tensors(chunks).items():
        gradient = getattr(tensor, "main_grad", None)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return name
    return None
