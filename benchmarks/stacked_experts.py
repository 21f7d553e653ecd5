"""A training step of stacked experts against Megatron's SequentialMLP: forward, backward, gradients into a buffer.

    python benchmarks/stacked_experts.py --json FILE

Both have the same weights and get the same tokens, dealt to the experts at random; loss and gradients are compared
first. The two take turns, step by step, and the fastest step counts, which a busy machine disturbs least.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridrl.parallel import groups
from hybridrl.parallel.sizes import ParallelSizes

from megatron.core.models.backends import LocalSpecProvider  # isort: skip - after hybridrl.parallel
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

from hybridrl.models.megatron.stacked_experts import StackedExperts

EXPERTS = 32
CASES = tuple((hidden, tokens) for hidden in (64, 256, 512) for tokens in (2, 8, 16, 64, 128, 256))
"""Hidden size, and mean tokens of an expert. An expert's intermediate size is half the hidden size."""
SMALL_HIDDEN, SMALL_TOKENS = 256, 64
"""Up to here stacked experts must be at least as fast; beyond, at least 0.8 times as fast."""
TOLERANCE = 1e-6


def make_modules(hidden: int) -> tuple[StackedExperts, SequentialMLP]:
    """Both kinds of module, with the same weights."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        ffn_hidden_size=hidden // 2,
        moe_ffn_hidden_size=hidden // 2,
        num_moe_experts=EXPERTS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        moe_token_dispatcher_type="alltoall",
    )
    stacked = StackedExperts(EXPERTS, config, pg_collection=get_default_pg_collection())
    backend = LocalSpecProvider()
    parts = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    sequential = SequentialMLP(EXPERTS, config, parts, pg_collection=get_default_pg_collection())
    with torch.no_grad():
        for index, expert in enumerate(sequential.local_experts):
            stacked.w13[index] = expert.linear_fc1.weight.normal_(0, hidden**-0.5)
            stacked.w2[index] = expert.linear_fc2.weight.normal_(0, hidden**-0.5)
    return stacked, sequential


def make_step(module: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Callable[[], float]:
    """A training step without the optimizer; returns the loss."""
    tokens, counts, probs, weights = batch
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)

    def step() -> float:
        for parameter in parameters:
            parameter.main_grad.zero_()
        output, _ = module(tokens.detach().requires_grad_(), counts, probs.detach().requires_grad_())
        loss = (output * weights).sum()
        loss.backward()
        for parameter in parameters:  # as Megatron's gradient buffers take them
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        return float(loss)

    return step


def make_batch(hidden: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Tokens, how many each expert gets, their probabilities, and weights that make a loss of the output."""
    total = EXPERTS * tokens
    counts = torch.randint(EXPERTS, (total,)).bincount(minlength=EXPERTS)
    return torch.randn(total, hidden), counts, torch.rand(total), torch.randn(total, hidden) / total


def measure(hidden: int, tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of the fastest step of both, and how far they differ."""
    torch.manual_seed(tokens)
    stacked, sequential = make_modules(hidden)
    batch = make_batch(hidden, tokens)
    both = [make_step(module, batch) for module in (stacked, sequential)]
    ours, theirs = (step() for step in both)
    gradients = [
        torch.stack([getattr(e, n).weight.main_grad for e in sequential.local_experts])
        for n in ("linear_fc1", "linear_fc2")
    ]
    difference = max(
        float((mine.main_grad - own).abs().max() / own.abs().max())
        for mine, own in zip((stacked.w13, stacked.w2), gradients, strict=True)
    )
    times: tuple[list[float], list[float]] = [], []
    for _ in range(steps):
        for step, seconds in zip(both, times, strict=True):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    stacked_s, sequential_s = map(min, times)
    small = hidden <= SMALL_HIDDEN and tokens <= SMALL_TOKENS
    return {
        "experts": EXPERTS,
        "hidden": hidden,
        "tokens_per_expert": tokens,
        "stacked_seconds": stacked_s,
        "sequential_seconds": sequential_s,
        "speed": sequential_s / stacked_s,
        "needed": 1.0 if small else 0.8,
        "loss_difference": abs(ours - theirs) / abs(theirs),
        "gradient_difference": difference,
    }


def main() -> int:
    """Measures all cases; the status is 1 where one is slower than it must be, or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="writes the results there")
    parser.add_argument("--steps", type=int, default=30, help="steps of each in a case")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups.start_world(torch.device("cpu"))
    groups.initialize(ParallelSizes(world=1))
    results, failed = [], False
    print(
        f"{EXPERTS} experts, {options.threads} threads\nhidden  tokens/expert  stacked ms  sequential ms  speed  needed"
    )
    for hidden, tokens in CASES:
        one = measure(hidden, tokens, options.steps)
        results.append(one)
        good = one["speed"] >= one["needed"] and max(one["loss_difference"], one["gradient_difference"]) <= TOLERANCE
        failed |= not good
        print(
            f"{hidden:6} {tokens:14} {1e3 * one['stacked_seconds']:11.2f} {1e3 * one['sequential_seconds']:14.2f} "
            f"{one['speed']:6.2f} {one['needed']:7.1f}{'' if good else '  <- not met'}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    groups.shutdown(world=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
