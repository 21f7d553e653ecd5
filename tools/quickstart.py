"""The newcomer's run: GRPO on a small mixture of experts, on 2 ranks of this machine, with its reward curve.

    python tools/quickstart.py [--engine transformers] [hydra overrides …]

Starts `torchrun … -m hybridrl.train recipe=grpo_tiny_moe` into `outputs/quickstart`, draws the mean reward over the
steps, and ends with `quickstart: reward <first> -> <last> over <n> steps`, means over the first and the last five
steps. The exit status is 0 only if the reward rose from at most 0.6 to at least 0.9.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.telemetry.metrics import read_metrics
from hybridrl.telemetry.plot import plot_curve

FOLDER = Path("outputs/quickstart")
RANKS = 2
WINDOW = 5
MOST_AT_FIRST = 0.6
LEAST_AT_LAST = 0.9


def train(engine: str, overrides: Sequence[str]) -> int:
    """Runs the recipe in a world of its own; returns torchrun's exit status."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *("-m", "hybridrl.train", "recipe=grpo_tiny_moe", f"rollout.engine={engine}", "trainer.name=quickstart"),
        *(f"trainer.output_dir={FOLDER}", *overrides),
    ]
    # One thread a rank: two ranks on two cores, and torchrun need not say so.
    return subprocess.run(command, check=False, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


def means(records: Sequence[dict[str, Any]], window: int = WINDOW) -> tuple[float, float]:
    """Mean reward of the first and of the last `window` steps."""
    rewards = [record["reward/mean"] for record in records]
    first, last = rewards[:window], rewards[-window:]
    return sum(first) / len(first), sum(last) / len(last)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="transformers", choices=("transformers", "sglang"))
    parser.add_argument("overrides", nargs="*", help="hydra overrides, such as trainer.steps=200")
    arguments = parser.parse_args()
    status = train(arguments.engine, arguments.overrides)
    if status:
        print(f"quickstart: the run ended with exit status {status}", file=sys.stderr)
        return status
    records = read_metrics(FOLDER / "metrics.jsonl")
    curve = FOLDER / "reward.png"
    plot_curve(records, "reward/mean", curve, title="GRPO on a small mixture of experts: mean reward")
    first, last = means(records)
    print(f"  curve     {curve}")
    learned = first <= MOST_AT_FIRST and last >= LEAST_AT_LAST
    if not learned:
        print(f"quickstart: expected a rise from at most {MOST_AT_FIRST} to at least {LEAST_AT_LAST}", file=sys.stderr)
    print(f"quickstart: reward {first:.3f} -> {last:.3f} over {len(records)} steps", flush=True)
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
