"""Some of each step's samples, for a person to read: one file a step, one JSON object a line."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridrl.files import file_aside
from hybridrl.rollout.samples import Sample


def write_rollouts(
    folder: Path,
    step: int,
    samples: Iterable[tuple[Sample, Sequence[float]]],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Writes samples, each with the advantages of its trained tokens, to `<folder>/step-<n>.jsonl`, anew and whole.

    Of a prompt its text, of a row of data nothing else: metadata is the judges' and may hold what must not be shown.
    """
    lines = [json.dumps(_record(step, sample, values, decode), ensure_ascii=False) for sample, values in samples]
    with file_aside(folder / f"step-{step:08d}.jsonl") as aside:
        aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _record(
    step: int, sample: Sample, advantages: Sequence[float], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    values = [float(value) for value in advantages]
    return {
        "step": step,
        "prompt_id": sample.prompt.id,
        "sample": sample.index,
        "prompt": sample.prompt.text or decode(sample.prompt.token_ids),
        "response": decode(sample.response_ids),
        "answer": sample.prompt.answer,
        "reward": _number(sample.reward),
        "rewards": {name: _number(value) for name, value in sample.rewards.items()},
        "failed": sample.failed,
        "advantages": values[0] if values and all(value == values[0] for value in values) else values,
        "prompt_tokens": len(sample.prompt.token_ids),
        "response_tokens": len(sample.response_ids),
        "versions": sorted(set(sample.versions)),
        "finish": str(sample.finish),
    }


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
