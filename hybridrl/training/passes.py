"""Running a batch through a model that is spread over the world: forward, or forward and backward, by a schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hybridrl.parallel import compat as compat  # isort: skip - must precede megatron.core

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hybridrl.config.schema import Config
from hybridrl.memory.residence import Always, Residence
from hybridrl.models.megatron.build import drop_graphs, forward, packed_seq_params, pad_multiple
from hybridrl.models.megatron.context import Share
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.groups import Groups
from hybridrl.training.logprobs import Vocabulary, token_log_probs
from hybridrl.training.microbatch import MicroBatch, make_micro_batch
from hybridrl.training.replay import Routed
from hybridrl.training.rows import Row, rows_together
from hybridrl.training.schedule import Schedule, schedule

Consume = Callable[..., Tensor]
"""`(micro_batch, *outputs) -> loss`, called on the last pipeline stage, alike on TP ranks.

The outputs, [b, s] float32 each, are log-probs and entropies, or of a model with a scalar head its values alone."""


class Passes:
    """How batches run through the chunks of one model. Every path that yields log-probs goes through here, so that all
    of them use the rollout's temperature."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Config, spec: ModelSpec, groups: Groups) -> None:
        self.chunks = list(chunks)
        self.config = config
        self.groups = groups
        self.vocabulary = Vocabulary(
            size=spec.vocab_size, rank=groups.coordinates.tp, ranks=groups.sizes.tp, group=groups.tp
        )
        self.pad_multiple = pad_multiple(groups.sizes)
        self.device = next(self.chunks[0].parameters()).device
        self.outputs = 1 if spec.scalar_head else 2
        """Numbers that the model says of each token."""
        self.moe = spec.moe
        self.residence: Residence = Always()
        """Is asked before parameters are used, which a rollout may have moved away."""

    def schedule(self, rows: Sequence[Row]) -> Schedule:
        """The micro-batches of all data-parallel ranks. Raises ValueError for token ids outside the vocabulary."""
        size = self.vocabulary.size
        bad = [r.index for r in rows if int(r.token_ids.min()) < 0 or int(r.token_ids.max()) >= size]
        if bad:
            raise ValueError(f"rows {bad[:8]} hold token ids outside the model's vocabulary of {size}")
        trainer, sizes = self.config.trainer, self.groups.sizes
        return schedule(
            [len(row) for row in rows],
            ranks=sizes.dp,
            max_tokens=trainer.max_tokens_per_micro_batch,
            packing=trainer.packing,
            max_rows=trainer.micro_batch_size,
            pad_multiple=self.pad_multiple,
            count_multiple=sizes.pp if len(self.chunks) > 1 else 1,
            together=rows_together(rows),
            cp=sizes.cp,
        )

    def run(
        self,
        rows: Sequence[Row],
        plan: Schedule,
        fields: Sequence[str],
        consume: Consume,
        *,
        backward: bool,
        routed: Routed | None = None,
    ) -> None:
        """Runs this rank's micro-batches of the plan; with `backward`, leaves the summed gradients in the buffers.

        `routed` gives routers their choices, or keeps these (see `routed`).
        """
        with nullcontext() if routed is None else routed.running():
            self._run(rows, plan, fields, consume, backward, routed)
        drop_graphs(self.chunks)

    def routed(self, rows: Sequence[Row], *, backward: bool, keep: bool = False) -> Routed | None:
        """For a pass over rows whose routed experts are given, or with `keep` are wanted; None for any other pass.

        Raises ValueError for rows with routed experts in a model without experts.
        """
        if not keep and all(row.routes is None for row in rows):
            return None
        if self.moe is None:
            raise ValueError("rows have routed experts, but the model has no experts")
        return Routed(self.chunks, rows, self.moe, self.groups, keep=keep, backward=backward)

    def _run(
        self,
        rows: Sequence[Row],
        plan: Schedule,
        fields: Sequence[str],
        consume: Consume,
        backward: bool,
        routed: Routed | None,
    ) -> None:
        self.residence.before_forward()
        mine = plan.micro_batches[self.groups.coordinates.dp]
        iterators = [self._micro_batches(rows, mine, fields) for _ in self.chunks]
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=self._step(consume, routed),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=plan.steps,
                seq_length=self.config.trainer.max_tokens_per_micro_batch,  # shapes are sent along, this is not used
                micro_batch_size=1,
                forward_only=not backward,
            )

    def _micro_batches(
        self, rows: Sequence[Row], steps: Sequence[Sequence[int]], fields: Sequence[str]
    ) -> Iterator[MicroBatch]:
        for indices in steps:
            yield make_micro_batch(
                rows,
                indices,
                fields,
                packing=self.config.trainer.packing,
                pad_multiple=self.pad_multiple,
                cp=self.groups.sizes.cp,
                device=self.device,
            )

    def _step(self, consume: Consume, routed: Routed | None) -> Callable[..., Any]:
        """Megatron's forward step: a micro-batch → the output, and the function that makes a loss of it."""

        def step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(batches)
            share = self._share(batch)
            packed = None if batch.lengths is None else packed_seq_params(batch.lengths, cp=self.groups.sizes.cp)
            if routed is not None:
                routed.prepare(chunk, batch, share)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, None]:
                value = consume(batch, *self._read(output, batch, share))
                # Megatron wants a number of tokens to divide by; `_sum_gradients` leaves it aside.
                return value, torch.ones((), dtype=torch.int, device=self.device), None

            tokens, padding = batch.tokens, batch.padding
            if share is not None:
                tokens, padding = share.cut(tokens), share.cut(padding)
            return forward(chunk, tokens, packed, padding if self.moe is not None else None), loss

        return step

    def _share(self, batch: MicroBatch) -> Share | None:
        """What this context-parallel rank computes of a micro-batch; None where it is all."""
        if self.groups.sizes.cp == 1:
            return None
        return Share(batch.lengths or (batch.tokens.shape[1],), self.groups, self.device)

    def _read(self, output: Tensor, batch: MicroBatch, share: Share | None) -> tuple[Tensor, ...]:
        """What the model's output [b, s / CP, vocabulary / TP], or [b, s / CP, 1] of a scalar head, says of each token:
        [b, s], alike on all context-parallel ranks."""
        found: tuple[Tensor, ...]
        if self.outputs == 1:
            found = (output[..., 0].float(),)
        else:
            labels = batch.labels if share is None else share.cut(batch.labels)
            flat = token_log_probs(
                output.flatten(0, 1),
                labels.flatten(),
                self.vocabulary,
                temperature=self.config.rollout.temperature,
                chunk=self.config.trainer.logprob_chunk,
            )
            found = tuple(values.view_as(labels) for values in flat)
        return found if share is None else share.gather(*found)
