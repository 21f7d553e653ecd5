"""Building a model under Megatron's groups, naming its weights, and running it forward."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from hybridrl.config.schema import Config
from hybridrl.models.live import LiveTensors, Slot, slot
from hybridrl.models.megatron.config import transformer_config
from hybridrl.models.megatron.rope import Rotary
from hybridrl.models.megatron.scalar_head import ScalarHead
from hybridrl.models.megatron.specs import block_spec
from hybridrl.models.spec import ModelSpec
from hybridrl.models.vocabulary import padded_as_engine, padded_to_multiple
from hybridrl.parallel.sizes import ParallelSizes


def padded_vocab(spec: ModelSpec, config: Config) -> int:
    """Rows of the training vocabulary, by the rule of the run's parameter layout."""
    if config.model.parameter_layout == "engine":
        return padded_as_engine(spec.vocab_size, config.parallel.tp)
    return padded_to_multiple(spec.vocab_size, config.model.vocab_multiple, config.parallel.tp)


def build_model(spec: ModelSpec, config: Config) -> list[GPTModel]:
    """This rank's part of the model, one module a virtual pipeline chunk, on this rank's device.

    All weights are zero, norms one, until they are imported; the padding rows of the vocabulary stay zero. Collective:
    every rank must call it, with Megatron's groups made for the same sizes. Raises UnsupportedModelError for what
    Megatron cannot honour.
    """
    transformer = transformer_config(spec, config)
    chunks = range(config.parallel.vpp) if config.parallel.vpp > 1 else (None,)
    return [_build_chunk(spec, config, transformer, chunk) for chunk in chunks]


def _build_chunk(spec: ModelSpec, config: Config, transformer: object, chunk: int | None) -> GPTModel:
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=block_spec(
            spec, transformer, chunk=chunk, engine_layout=config.model.parameter_layout == "engine"
        ),
        vocab_size=padded_vocab(spec, config),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied and not spec.scalar_head,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    if spec.scalar_head and model.post_process:
        model.output_layer = ScalarHead(model.config, model.output_layer.weight.device)
    if spec.mla is None:  # latent attention has its own in every layer
        model.rotary_pos_emb = Rotary(spec, model.pg_collection.cp)
    return model


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel)."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def named_tensors(chunks: Sequence[torch.nn.Module]) -> LiveTensors:
    """Parameters and persistent buffers by the names of the `megatron` layout, in module order.

    The name is Megatron's local one, with `chunk{v}.` before it where there are several chunks. With PP > 1 a tied
    model's last stage has its copy of the embedding as `output_layer.weight`.
    """
    slots: dict[str, Slot] = {}
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for path, module in unwrap(chunk).named_modules():
            own = [name for name, _ in module.named_parameters(recurse=False)]
            passing = module._non_persistent_buffers_set
            own += [name for name, _ in module.named_buffers(recurse=False) if name not in passing]
            slots |= {f"{prefix}{path}.{name}": slot(module, name) for name in own}
    return LiveTensors(slots)


def packed_seq_params(lengths: Iterable[int], *, cp: int = 1) -> PackedSeqParams:
    """Bounds of sequences that lie end to end in one row, for `forward`. Raises ValueError for a length below 1.

    With `cp` context-parallel ranks they are the bounds of the whole row, and 2·cp divides each length.
    """
    lengths = list(lengths)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"packed sequences of lengths {lengths}: expected at least one, of at least 1 token each")
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(torch.cuda.current_device())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # Transformer Engine asks for these under context parallelism, and compares them on the device where it is not.
        cu_seqlens_q_padded=bounds if cp > 1 else None,
        cu_seqlens_kv_padded=bounds if cp > 1 else None,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def pad_multiple(sizes: ParallelSizes) -> int:
    """The tokens of a packed row, or the length of a padded batch, must be a multiple of this.

    Sequence parallelism cuts the tokens into TP equal parts, context parallelism into 2·CP before that, in a pack those
    of each sequence. Fill a packed row with one more sequence of padding tokens, a padded batch on the right.
    """
    return sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1)


def forward(
    chunk: torch.nn.Module,
    tokens: torch.Tensor,
    packed: PackedSeqParams | None = None,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs one chunk, bare or wrapped; with pipeline parallelism, inside Megatron's schedule.

    `tokens` int64 `[b, s]`, padded on the right, or packed `[1, t]` with the bounds in `packed`. Positions count from 0
    in each sequence. Under context parallelism they are this rank's share (see `Share`). `padding` bool `[b, s]` is
    True at padding, which the load-balancing loss and the load of experts then leave out. The last chunk of the last
    stage returns logits `[b, s, padded_vocab / tp]` in the model's dtype, this TP rank's columns (whose last ones may
    be padding: ids of `spec.vocab_size` and above, logit 0), or with a scalar head values `[b, s, 1]`, float32; the
    others return hidden states `[s, b, hidden]`, `s / tp` with sequence parallelism.
    """
    model = unwrap(chunk)
    if padding is not None and model.config.sequence_parallel and not model.pre_process:
        # Megatron cuts the mask on the first stage alone, and there are other stages.
        ranks = model.config.tensor_model_parallel_size
        padding = padding.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return chunk(
        input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed, padding_mask=padding
    )


def drop_graphs(chunks: Iterable[torch.nn.Module]) -> None:
    """Lets go of the autograd graph of the last micro-batch.

    Megatron's token dispatchers keep the routing probabilities of their last call, and with them that micro-batch's
    activations and, in cycles that no garbage collector sees, the model and its process groups.
    """
    for chunk in chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is None:
                continue
            for name, value in vars(dispatcher).items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    setattr(dispatcher, name, None)
