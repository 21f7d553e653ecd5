"""Prints samples that a run kept: python tools/show_rollouts.py outputs/run [--step 10] [--worst | --best] [-n 4]."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text


def read(folder: Path, step: int | None) -> list[dict[str, Any]]:
    """The samples of a step, or of the newest. Raises FileNotFoundError where there are none."""
    rollouts = folder / "rollouts" if (folder / "rollouts").is_dir() else folder
    files = sorted(rollouts.glob("step-*.jsonl"))
    chosen = files[-1:] if step is None else [file for file in files if file.stem == f"step-{step:08d}"]
    if not chosen:
        known = ", ".join(str(int(file.stem.removeprefix("step-"))) for file in files[-20:])
        raise FileNotFoundError(f"{rollouts} has no samples of step {step}; steps there: {known or 'none'}")
    return list(_whole(chosen[0]))


def _whole(file: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, but for lines that are cut short or broken, which are told."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            sample = json.loads(line or "null")
        except json.JSONDecodeError as error:
            print(f"{file}:{number} is left out, it is no whole line of JSON: {error}", file=sys.stderr)
        else:
            if sample is not None:
                yield sample


def show(sample: dict[str, Any], console: Console) -> None:
    """One sample: a headline of its numbers, the prompt, and the response."""
    advantages = sample["advantages"]
    mean = sum(advantages) / max(1, len(advantages)) if isinstance(advantages, list) else advantages
    reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
    numbers = (
        f"  reward {reward}  advantage {mean:+.3f}  {sample['prompt_tokens']} + {sample['response_tokens']} tokens  "
        f"{sample['finish']}  weights {', '.join(map(str, sample['versions'])) or 'none'}"
    )
    head = f"step {sample['step']}  prompt {sample['prompt_id']}  sample {sample['sample']}"
    console.print(Text.assemble((head, "bold"), numbers), soft_wrap=True)
    console.print(Text.assemble((sample["prompt"], "dim"), (sample["response"], "cyan")), soft_wrap=True)
    if sample["answer"] is not None:
        console.print(Text.assemble("answer: ", (str(sample["answer"]), "green")), soft_wrap=True)
    console.print()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder, or its rollouts/")
    parser.add_argument("--step", type=int, help="None for the newest")
    parser.add_argument("-n", type=int, default=4, help="samples to show")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    given = parser.parse_args(arguments)
    try:
        samples = read(given.run, given.step)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.best or given.worst:
        samples.sort(key=lambda sample: sample["reward"] if sample["reward"] is not None else 0.0, reverse=given.best)
    console = Console()
    for sample in samples[: given.n]:
        show(sample, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
