"""Requests, and the slow way to what the engine computes: one whole forward pass, one sequence, no cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.rollout.samples import Prompt, Request, SamplingParams
from hybridrl.rollout.seeds import sample_seed
from hybridrl.rollout.transformers_engine import TransformersEngine
from tests.models.tiny import tiny_folder


def prompt(number: int, length: int | None = None, vocab: int = 50) -> Prompt:
    """A prompt of that id; its tokens, and its length if none is given, differ from number to number."""
    generator = torch.Generator().manual_seed(1000 + number)
    length = 1 + int(torch.randint(0, 12, (1,), generator=generator)) if length is None else length
    return Prompt(id=number, token_ids=tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()))


def requests(prompts: Sequence[Prompt], n: int = 1, **params: Any) -> list[Request]:
    """n requests a prompt, seeded; without stop ids unless given."""
    chosen = SamplingParams(**{"max_new_tokens": 12, **params})
    return [
        Request(prompt=p, index=i, seed=sample_seed(7, 0, p.id, i), params=chosen) for p in prompts for i in range(n)
    ]


def loaded_engine(
    variant: str = "qwen3_moe", changes: dict[str, Any] | None = None, **kwargs: Any
) -> TransformersEngine:
    """An engine with the tiny folder's own weights in service as version 0."""
    engine = TransformersEngine(tiny_folder(variant, **(changes or {})), load=True, **kwargs)
    engine.publish(0)
    return engine


def reference_model(variant: str = "qwen3_moe", **changes: Any) -> Any:
    """The same folder as transformers itself loads it, with the plain implementations."""
    from transformers import AutoModelForCausalLM

    options = {"experts_implementation": "eager"} if "moe" in variant or variant == "mixtral" else {}
    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder(variant, **changes), dtype=torch.float32, attn_implementation="eager", **options
    )
    return model.eval()


def slow_log_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same distribution, one token at a time, in double precision."""
    weights = [math.exp(x / temperature - max(logits) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if top_p < 1 and mass >= top_p - 1e-6:
            break
    total = sum(weights[i] for i in kept)
    return [math.log(weights[i] / total) if i in kept else -math.inf for i in range(len(logits))]


@torch.no_grad()
def reference_log_probs(model: Any, request: Request, response: Sequence[int]) -> list[float]:
    """Log-probs of a response under the sampling distribution."""
    p = request.params
    ids = [*request.prompt.token_ids, *response]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    rows = logits[len(request.prompt.token_ids) - 1 : -1].tolist()
    return [
        slow_log_probs(row, p.temperature, p.top_k, p.top_p)[token] for row, token in zip(rows, response, strict=True)
    ]
