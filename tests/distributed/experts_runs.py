"""What ranks run to compare stacked experts with Megatron's own, expert by expert."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.megatron.stacked_experts import StackedExperts
from hybridrl.parallel.groups import initialize
from hybridrl.parallel.sizes import ParallelSizes


def make_config(experts: int, hidden: int, ffn: int, dtype: torch.dtype, **options: Any) -> TransformerConfig:
    """Megatron's configuration of one layer with experts."""
    defaults: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": ffn,
        "num_moe_experts": experts,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "moe_token_dispatcher_type": "alltoall",
    }
    return TransformerConfig(**{**defaults, **options})


def make_pair(
    experts: int, hidden: int, ffn: int, dtype: torch.dtype, **options: Any
) -> tuple[StackedExperts, SequentialMLP]:
    """Both kinds of module with the same random weights, on a world of one rank."""
    config = make_config(experts, hidden, ffn, dtype, **options)
    groups = get_default_pg_collection()
    stacked = StackedExperts(experts, config, pg_collection=groups)
    backend = LocalSpecProvider()
    parts = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    sequential = SequentialMLP(experts, config, parts, pg_collection=groups)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weights in (stacked.w13, stacked.w2):
            weights.copy_(torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5)
        for index, expert in enumerate(sequential.local_experts):
            expert.linear_fc1.weight.copy_(stacked.w13[index])
            expert.linear_fc2.weight.copy_(stacked.w2[index])
    return stacked, sequential


def one_step(
    module: torch.nn.Module, counts: Sequence[int], hidden: int, dtype: torch.dtype, expanded: bool
) -> dict[str, torch.Tensor]:
    """Output and gradients of a forward and a backward pass over random tokens."""
    generator = torch.Generator().manual_seed(sum(counts))
    tokens = torch.randn(sum(counts), hidden, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).requires_grad_()
    output, bias = module(tokens, torch.tensor(counts), probs)
    assert bias is None
    module.zero_grad()
    if expanded:
        output.sum().backward()
    else:
        output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    w13, w2 = gradients(module)
    return {"output": output.detach(), "tokens": tokens.grad, "probs": probs.grad, "w13": w13, "w2": w2}


def gradients(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the two projections, stacked."""
    if isinstance(module, StackedExperts):
        return module.w13.grad, module.w2.grad
    grads = [(expert.linear_fc1.weight.grad, expert.linear_fc2.weight.grad) for expert in module.local_experts]
    return torch.stack([fc1 for fc1, _ in grads]), torch.stack([fc2 for _, fc2 in grads])


def compare(
    batches: Sequence[Sequence[int]], hidden: int, ffn: int, dtype: str, expanded: bool = False
) -> list[dict[str, float]]:
    """For each batch, by tensor: the largest difference from Megatron's experts, relative to the largest element."""
    initialize(ParallelSizes(world=1))
    kind = getattr(torch, dtype)
    pair = make_pair(len(batches[0]), hidden, ffn, kind)
    found = []
    for counts in batches:
        ours, theirs = (one_step(module, counts, hidden, kind, expanded) for module in pair)
        found.append(
            {
                name: float((ours[name] - value).abs().max() / value.abs().max())
                if value.any()
                else float(ours[name].any())
                for name, value in theirs.items()
                if value.numel()
            }
        )
        assert all(ours[name].shape == value.shape for name, value in theirs.items())
        assert all(ours[name].dtype == value.dtype for name, value in theirs.items())
    return found


def marks(tp: int, ep: int, etp: int) -> dict[str, Any]:
    """What the parameters tell Megatron's optimizer, in this world."""
    initialize(ParallelSizes(world=torch.distributed.get_world_size(), tp=tp, ep=ep, etp=etp))
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    config = make_config(8, 16, 32, torch.float32, **sizes, sequence_parallel=tp > 1)
    module = StackedExperts(8 // ep, config, pg_collection=get_default_pg_collection())
    names = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride")
    marks = {name: [getattr(p, mark) for mark in names] for name, p in module.named_parameters()}
    return {**marks, "shapes": [tuple(p.shape) for p in module.parameters()]}


def refused(**options: Any) -> str:
    """What the error says about these settings; empty where they are taken."""
    initialize(ParallelSizes(world=1))
    config = make_config(4, 16, 32, torch.float32)
    for name, value in options.items():
        setattr(config, name, value)
    try:
        StackedExperts(4, config, pg_collection=get_default_pg_collection())
    except ValueError as error:
        return str(error)
    return ""
