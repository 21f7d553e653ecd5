"""SGLang in the trainer's process against SGLang's own Engine: tokens/s, weight sync, time to first token, memory.

    .venv-sglang/bin/python benchmarks/rollout.py --json FILE      # on a CPU; the environment of `make sglang-cpu`

Both answer the same prompts greedily and take the same weights from the same full tensors, on one rank, each in a
process of its own, one after the other. The Engine's sync is its fastest that serialises: `update_weights_from_tensor`
with a flattened bucket. Memory is what all processes of a side add to it. See benchmarks/README.md.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridrl.rollout.samples import Prompt, Request, SamplingParams

MIB = 2**20
RESPONSE = 32
SIZES = {
    "tiny": {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8},
    "200 MB": {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 16},
}
"""Of Qwen3-MoE models; the second has over 200 MB of float32 weights."""
COLUMNS = (
    ("tokens_per_s", "tokens/s", 1.0),
    ("sync_s", "sync ms", 1e3),
    ("first_token_s", "first token ms", 1e3),
    ("rss", "memory MB", 1.0),
)


def main() -> None:
    """Measures both sides for every size, prints a table and what must hold, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only these")
    parser.add_argument("--repeat", type=int, default=5, help="timed repetitions")
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        for size in options.size or SIZES:
            folder = Path(parent) / size.replace(" ", "-")
            _isolated(_make_model, folder, SIZES[size])
            for side, measure in (("in process", _in_process), ("engine", _engine)):
                row = _isolated(measure, folder, options.prompts, options.repeat)
                rows.append({"size": size, "side": side, **row})
                print(_line(rows[-1]), flush=True)
    print(_judge(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def _isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        # the Engine's processes could not be children of a daemon
        return pool.apply(_undaemonised, (function, *arguments))


def _undaemonised(function: Callable[..., Any], *arguments: Any) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return function(*arguments)


def _make_model(folder: Path, sizes: dict[str, int]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes["hidden_size"] // 8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **sizes,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)


def _requests(count: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=0.0, max_new_tokens=RESPONSE)
    made = [tuple(torch.randint(3, 4096, (24,), generator=generator).tolist()) for _ in range(count)]
    return [Request(prompt=Prompt(id=i, token_ids=ids), index=0, seed=i, params=params) for i, ids in enumerate(made)]


def _rss() -> float:
    """MB of this process and all under it; memory that they share counts once."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        total += process.memory_full_info().pss
    return float(total / MIB)


def _measure(
    generate: Callable[[Sequence[Request]], list[list[int]]], sync: Callable[[], None], count: int, repeat: int
) -> dict[str, Any]:
    """Medians over the repetitions after one to warm up. A first token is a whole request for one, after a sync."""
    from dataclasses import replace

    requests = _requests(count)
    one = [replace(requests[0], params=replace(requests[0].params, max_new_tokens=1))]
    rates, syncs, firsts = [], [], []
    tokens: list[list[int]] = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        sync()
        syncs.append(time.perf_counter() - start)
        start = time.perf_counter()
        generate(one)
        firsts.append(time.perf_counter() - start)
        start = time.perf_counter()
        tokens = generate(requests)
        rates.append(sum(map(len, tokens)) / (time.perf_counter() - start))
    return {
        "tokens_per_s": statistics.median(rates[1:]),
        "sync_s": statistics.median(syncs[1:]),
        "first_token_s": statistics.median(firsts[1:]),
        "tokens": tokens,
    }


def _in_process(folder: Path, count: int, repeat: int) -> dict[str, Any]:
    import torch.distributed as dist
    from safetensors.torch import load_file

    from hybridrl.reshard.layouts.huggingface import HuggingFaceLayout
    from hybridrl.reshard.sync import WeightSync
    from hybridrl.rollout.sglang.engine import SGLangEngine
    from hybridrl.rollout.sglang.options import EngineOptions

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = load_file(folder / "model.safetensors")
    before = _rss()
    options = EngineOptions(
        folder=folder, dtype="float32", device="cpu", max_positions=1024, kv_tokens=4096, max_running_requests=count
    )
    engine = SGLangEngine(options)
    layout = HuggingFaceLayout(engine.layout.weights, [0])
    version = 0
    with WeightSync(layout, tensors, engine.layout, engine.parameters(), 0) as weight_sync:

        def sync() -> None:
            nonlocal version
            version += 1
            weight_sync.run(version)
            engine.publish(version)

        found = _measure(lambda r: [s.response_ids for s in engine.generate(r)], sync, count, repeat)
        found["rss"] = _rss() - before
    engine.close()
    return found


def _engine(folder: Path, count: int, repeat: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    from hybridrl.rollout.sglang import cpu

    cpu.enable()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    tensors = load_file(folder / "model.safetensors")
    before = _rss()
    engine = Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_custom_all_reduce=True,
        grammar_backend="none",
        max_total_tokens=4096,
        max_running_requests=count,
        random_seed=0,
        log_level="error",
    )

    def sync() -> None:
        engine.begin_weight_update()
        bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        engine.update_weights_from_tensor(
            [MultiprocessingSerializer.serialize(payload)], load_format="flattened_bucket"
        )
        engine.end_weight_update()

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": requests[0].params.max_new_tokens, "ignore_eos": True}
        answers = engine.generate(input_ids=[list(r.prompt.token_ids) for r in requests], sampling_params=params)
        return [list(answer["output_ids"]) for answer in answers]

    try:
        found = _measure(generate, sync, count, repeat)
        found["rss"] = _rss() - before
    finally:
        engine.shutdown()
    return found


def _line(row: dict[str, Any]) -> str:
    cells = [f"{name} {row[key] * factor:9.1f}" for key, name, factor in COLUMNS]
    return f"{row['size']:8} {row['side']:11} " + "  ".join(cells)


def _judge(rows: Sequence[dict[str, Any]]) -> str:
    """What must hold of each size, and whether it does."""
    lines = ["", "must hold:"]
    by_side = {(row["size"], row["side"]): row for row in rows}
    for size in dict.fromkeys(row["size"] for row in rows):
        ours, theirs = by_side[size, "in process"], by_side[size, "engine"]
        ratio = theirs["sync_s"] / ours["sync_s"]
        lines.append(f"  {'holds' if ratio >= 5 else 'FAILS'}  {size}: {ratio:.1f} times as fast a sync, at least 5")
        same = ours["tokens"] == theirs["tokens"]
        lines.append(f"  {'holds' if same else 'FAILS'}  {size}: the same tokens")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
