"""What the SGLang tests share: engines over tiny models, weights for them, and the reference by transformers.

Functions here run on the ranks of the pool. SGLang is imported within them, so that this module can be imported where
SGLang is absent.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.rollout.samples import Prompt, Request, Sample, SamplingParams
from hybridrl.rollout.sglang.options import EngineOptions
from hybridrl.rollout.stops import Decode
from tests.models.tiny import tiny_folder

if TYPE_CHECKING:
    from hybridrl.rollout.sglang.engine import SGLangEngine

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here: `make test-sglang` runs this"
)

MAX_POSITIONS = 128
CHANGES: dict[str, dict[str, Any]] = {"mixtral": {"head_dim": None, "hidden_size": 64}}
"""Settings of tiny models that SGLang serves otherwise than transformers: its Mixtral heeds no `head_dim`."""


def options(variant: str, **changes: Any) -> EngineOptions:
    """Options of an engine for a tiny model; `changes` are fields of EngineOptions."""
    chosen: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_positions": MAX_POSITIONS, "kv_tokens": 2048}
    return EngineOptions(folder=folder(variant), **{**chosen, **changes})


def folder(variant: str) -> Path:
    """The variant's Hugging Face folder. A test calls it before the pool's ranks do."""
    return tiny_folder(variant, **CHANGES.get(variant, {}))


@contextmanager
def opened(
    variant: str, version: int | None = 0, *, release_weights: bool = False, **changes: Any
) -> Iterator["SGLangEngine"]:
    """An engine with the folder's weights in service as `version`, or none where that is None; closed at the end."""
    from hybridrl.rollout.sglang.engine import SGLangEngine

    engine = SGLangEngine(options(variant, **changes), release_weights=release_weights)
    try:
        if version is not None:
            write(engine, checkpoint(variant))
            engine.publish(version)
        yield engine
    finally:
        engine.close()


def checkpoint(variant: str, seed: int | None = None) -> dict[str, Tensor]:
    """The tensors of the variant's files; with a seed, each with noise added, the same on every rank."""
    from safetensors.torch import load_file

    tensors = load_file(folder(variant) / "model.safetensors")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        tensors = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in sorted(tensors.items())}
    return tensors


def write(engine: "SGLangEngine", tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint's tensors into the engine's parameters, by the golden path from rank 0."""
    from hybridrl.reshard.golden import golden_sync
    from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout

    rank = dist.get_rank()
    source = HuggingFaceLayout(engine.layout.weights, [0])
    golden_sync(source, tensors if rank == 0 else {}, engine.layout, engine.parameters(), rank)


def reference(variant: str, seed: int | None = None) -> Any:
    """Transformers' own model with the same weights as `checkpoint(variant, seed)`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    if seed is None:
        return AutoModelForCausalLM.from_pretrained(folder(variant), dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as other:
        shutil.copytree(folder(variant), other, dirs_exist_ok=True)
        save_file(checkpoint(variant, seed), Path(other) / "model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()


def logits(model: Any, sample: Sample) -> Tensor:
    """[response, vocabulary]: what each token of a response was drawn from."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
    with torch.no_grad():
        rows: Tensor = model(ids).logits[0]
    return rows[len(sample.prompt.token_ids) - 1 : -1]


def log_prob_error(model: Any, samples: Sequence[Sample], temperature: float) -> float:
    """Mean |log-prob of the engine - log-prob of the model| over all sampled tokens."""
    errors = []
    for sample in samples:
        expected = torch.log_softmax(logits(model, sample) / temperature, -1)
        expected = expected.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        errors.append((expected - torch.tensor(sample.log_probs)).abs())
    return float(torch.cat(errors).mean())


def prompts(count: int, vocabulary: int = 50) -> list[Prompt]:
    """Prompts of 1 to about 40 tokens; two of them begin alike."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 3, 40, 17, 8, 30]
    made = []
    for i in range(count):
        ids = torch.randint(3, vocabulary, (lengths[i % len(lengths)],), generator=generator).tolist()
        made.append(tuple(ids))
    if count > 3:
        made[3] = (*made[2], 9, 9)
    return [Prompt(id=i, token_ids=ids) for i, ids in enumerate(made)]


def requests(count: int, n: int = 1, **params: Any) -> list[Request]:
    """`n` samples each of `count` prompts. No token stops them unless `stop_token_ids` is given."""
    chosen = SamplingParams(**{"max_new_tokens": 16, **params})
    return [
        Request(prompt=prompt, index=index, seed=1000 * prompt.id + index, params=chosen)
        for prompt in prompts(count)
        for index in range(n)
    ]


def requests_with_stops(engine: Any, decode: Decode) -> list[Request]:
    """Requests, some of whose answers by the embedded engine hold a stop string of two tokens, some a stop token."""
    plain = requests(6, n=2, max_new_tokens=30)
    whole = engine.generate(plain)
    stop = tuple({decode(whole[i].response_ids[at : at + 2]) for i, at in ((0, 4), (3, 20), (7, 0))})
    params = SamplingParams(max_new_tokens=30, stop=stop, stop_token_ids=(whole[5].response_ids[9],))
    return [replace(request, params=params) for request in plain]


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    """The responses alone."""
    return [sample.response_ids for sample in samples]


def gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
