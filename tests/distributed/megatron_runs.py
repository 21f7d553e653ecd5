"""What the ranks of the Megatron tests run: build a tiny model, load it the slow way, forward and backward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file

from hybridrl.config.schema import Config, ModelConfig, ParallelConfig
from hybridrl.models.families import load_spec, weight_map
from hybridrl.models.megatron.build import build_model, forward, named_tensors, packed_seq_params, pad_multiple
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.groups import Groups, initialize
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout

VOCAB_MULTIPLE = 16  # pads the tiny vocabulary, unevenly over TP


def make_config(parallel: Mapping[str, Any], **model: Any) -> Config:
    """A run's configuration with these parallel sizes."""
    return Config(model=ModelConfig(vocab_multiple=VOCAB_MULTIPLE, **model), parallel=ParallelConfig(**parallel))


def make_groups(config: Config) -> Groups:
    """Megatron's groups for the configuration, over the pool's world."""
    parallel = config.parallel
    names = ("tp", "cp", "pp", "ep", "etp")
    world = torch.distributed.get_world_size()
    return initialize(ParallelSizes(world=world, **{n: getattr(parallel, n) for n in names}), vpp=parallel.vpp, seed=3)


def make_layout(spec: ModelSpec, config: Config, groups: Groups) -> MegatronLayout:
    """Where this world keeps the model's weights."""
    parallel = config.parallel
    return MegatronLayout(
        weight_map(spec),
        groups.sizes,
        vpp=parallel.vpp,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        vocab_multiple=config.model.vocab_multiple,
        engine_order=config.model.parameter_layout == "engine",
        dtype=config.model.dtype,
    )


def load_model(folder: Path, config: Config, groups: Groups) -> tuple[list[Any], MegatronLayout]:
    """The model with the folder's weights, copied piece by piece from the whole file."""
    spec = load_spec(folder)
    chunks, layout = build_model(spec, config), make_layout(spec, config, groups)
    tensors, whole = named_tensors(chunks), load_file(folder / "model.safetensors")
    with torch.no_grad():
        for piece in layout.pieces(groups.rank):
            box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            tensors[piece.param][piece.slices] = whole[piece.tensor][box].reshape(piece.extent)
    return chunks, layout


def to_tensor_names(layout: MegatronLayout, rank: int, values: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Values by parameter, where there are any, → values by tensor, on a rank that holds all of each tensor."""
    found: dict[str, np.ndarray] = {}
    for piece in layout.pieces(rank):
        if piece.param not in values:
            continue
        box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        into = found.setdefault(piece.tensor, np.zeros(layout.weights[piece.tensor].shape, np.float32))
        into[box] = values[piece.param][piece.slices].reshape(piece.box.shape).float().numpy()
    return found


class MicroBatch:
    """Sequences of token ids as one padded or packed batch, cut for a context-parallel rank, and back."""

    def __init__(self, sequences: Sequence[Sequence[int]], packed: bool, groups: Groups) -> None:
        self.lengths, self.cp = [len(s) for s in sequences], groups.sizes.cp
        multiple = pad_multiple(groups.sizes)
        self.packed, row = None, 2 * self.cp if self.cp > 1 else 1
        if packed:
            padded = [[*s] + [0] * (-len(s) % row) for s in sequences]
            fill = -sum(map(len, padded)) % multiple
            parts = [*padded, [0] * fill] if fill else padded
            self.packed = packed_seq_params(map(len, parts), cp=self.cp)
            whole = torch.tensor([[t for part in parts for t in part]])
            self.own = self._chunks([len(part) for part in parts], groups.coordinates.cp)
            self.starts = [0, *np.cumsum([len(part) for part in padded])]
        else:
            width = max(self.lengths) + -max(self.lengths) % multiple
            whole = torch.tensor([[*s] + [0] * (width - len(s)) for s in sequences])
            self.own = self._chunks([width], groups.coordinates.cp)
        self.width, self.tokens = whole.shape[1], whole[:, self.own]

    def _chunks(self, lengths: Sequence[int], rank: int) -> list[int]:
        """Of each sequence this rank's chunk from the front and the one as far from the back."""
        found, first = [], 0
        for length in lengths:
            positions, size = list(range(first, first + length)), length // (2 * self.cp)
            back = length - (rank + 1) * size
            found += (
                positions
                if self.cp == 1
                else positions[rank * size : (rank + 1) * size] + positions[back : back + size]
            )
            first += length
        return found

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """`[b, s / cp, ...]` → `[length, ...]` of each sequence, 0 at positions of other context-parallel ranks."""
        if self.cp > 1:
            index = torch.tensor(self.own)
            rows = rows.new_zeros(len(rows), self.width, *rows.shape[2:]).index_copy(1, index, rows)
        if self.packed is not None:
            return [rows[0, a : a + length] for a, length in zip(self.starts, self.lengths, strict=False)]
        return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]


def coefficients(sequence: int, length: int, vocab: int) -> torch.Tensor:
    """Fixed weights of the logits of a sequence, so that their weighted sum is a loss, alike in every layout."""
    return torch.randn(length, vocab, generator=torch.Generator().manual_seed(100 + sequence))


def run_model(
    folder: Path,
    parallel: Mapping[str, Any],
    sequences: Sequence[Sequence[int]],
    packed: Sequence[bool],
    backward: bool = False,
    **model: Any,
) -> list[dict[str, Any]]:
    """For each form, padded or packed: logits of each sequence `[length, vocab]` (last stage; else none) and, with
    `backward`, gradients by parameter.

    The sequences go through Megatron's schedule as two micro-batches of different widths, twice.
    """
    config = make_config(parallel, **model)
    groups = make_groups(config)
    chunks, layout = load_model(folder, config, groups)
    return [_run(chunks, layout, groups, sequences, form, backward) for form in packed]


def _run(
    chunks: list[Any],
    layout: MegatronLayout,
    groups: Groups,
    sequences: Sequence[Sequence[int]],
    packed: bool,
    backward: bool,
) -> dict[str, Any]:
    vocab, half = layout.weights.spec.vocab_size, (len(sequences) + 1) // 2
    batches = [MicroBatch(part, packed, groups) for part in (sequences[:half], sequences[half:])]
    results: list[list[torch.Tensor]] = []
    for _ in range(2):  # the second call meets whatever the first has cached
        for tensor in named_tensors(chunks).values():
            tensor.grad = None
        outputs = _schedule(chunks, batches, half, groups, vocab, backward)
        results.append([row for index in sorted(outputs) for row in batches[index].split(outputs[index])])
    again = max((float((a - b).abs().max()) for a, b in zip(*results, strict=True)), default=0.0)
    tensors = named_tensors(chunks)
    for tensor in tensors.values():
        if getattr(tensor, "sequence_parallel", False) and tensor.grad is not None:
            torch.distributed.all_reduce(tensor.grad, group=groups.tp)  # each rank saw some of the tokens
    for row in results[-1]:
        torch.distributed.all_reduce(row, group=groups.cp)  # zeros and one rank's own
    return {
        "logits": [_whole_vocabulary(row, groups)[:, :vocab].float().numpy() for row in results[-1]],
        "repeat": again,
        "shapes": {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()},
        "layout": {name: (param.shape, param.dtype) for name, param in layout.params(groups.rank).items()},
        "grads": {name: tensor.grad.float().numpy() for name, tensor in tensors.items() if tensor.grad is not None},
        "tensor_grads": to_tensor_names(
            layout, groups.rank, {n: t.grad for n, t in tensors.items() if t.grad is not None}
        )
        if backward and groups.sizes.world == 1
        else {},
    }


def _schedule(
    chunks: list[Any], batches: list[MicroBatch], half: int, groups: Groups, vocab: int, backward: bool
) -> dict[int, torch.Tensor]:
    outputs: dict[int, torch.Tensor] = {}

    def step(data: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        index, batch = next(data)
        logits = forward(chunk, batch.tokens, batch.packed)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            outputs[index] = output.detach()
            first = groups.coordinates.tp * output.shape[-1]
            total = output.new_zeros(())
            for i, row in enumerate(batch.split(output)):
                mine = coefficients(i + index * half, len(row), vocab)[:, first : first + output.shape[-1]]
                total = total + (row[:, : mine.shape[1]] * mine).sum()
            return total, torch.tensor(1, dtype=torch.int), {}

        return logits, loss

    run = get_forward_backward_func()
    data = [iter(list(enumerate(batches))) for _ in chunks]
    run(
        forward_step_func=step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=1,  # lengths are exchanged (variable_seq_lengths), these two are not used
        micro_batch_size=1,
        forward_only=not backward,
    )
    return outputs


def _whole_vocabulary(row: torch.Tensor, groups: Groups) -> torch.Tensor:
    parts = [torch.empty_like(row) for _ in range(groups.sizes.tp)]
    torch.distributed.all_gather(parts, row.contiguous(), group=groups.tp)
    return torch.cat(parts, dim=-1)
