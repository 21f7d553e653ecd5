"""A whole step of training, by phase: seconds of each, and bytes by owner, so that a change can be compared.

    python benchmarks/step.py --json FILE                             # the tiny recipe, 2 ranks here
    python benchmarks/step.py --recipe grpo_smollm2_moe --json FILE   # needs its model, see the recipe
    python benchmarks/step.py --json FILE memory.optimizer=host       # what follows is given to the run

It runs `hybridrl.train` under torchrun and reads what the run wrote: medians over the steps after the first two.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.config.compose import compose
from hybridrl.telemetry.memory import TRACE, read_trace
from hybridrl.telemetry.metrics import read_metrics

WARM = 2
"""Steps that are not counted: the first ones take memory and make moments."""
PHASES = ("sync", "rollout", "reward", "logprob", "update")


def measure(recipe: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs a recipe for `steps` steps and returns the medians: `seconds`, `memory` and `bytes` by event and owner."""
    ranks = compose([f"recipe={recipe}", *overrides]).trainer.ranks_per_node
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "hybridrl.train", f"recipe={recipe}", f"trainer.steps={steps}", "trainer.export_final=false"]
        subprocess.run(
            [*command, f"trainer.output_dir={folder}/run", *overrides], check=True, stdout=subprocess.DEVNULL
        )
        records = read_metrics(Path(folder) / "run" / "metrics.jsonl")[WARM:]
        trace = read_trace(Path(folder) / "run" / TRACE)
    seconds = {key: _median(records, f"time/{key}") for key in (*PHASES, "step")}
    seconds["other"] = seconds["step"] - sum(seconds[phase] for phase in PHASES)
    names = sorted(key for key in records[-1] if key.startswith("memory/"))
    last = [record for record in trace if record["step"] == trace[-1]["step"]]
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "ranks": ranks,
        "steps": len(records),
        "seconds": seconds,
        "memory": {name.removeprefix("memory/"): _median(records, name) for name in names},
        "bytes": {record["event"]: record["owners"] for record in last},
    }


def render(result: dict[str, Any]) -> str:
    """A table of the phases, and one of the owners at each change of phase."""
    step = result["seconds"]["step"]
    lines = [f"{result['recipe']} on {result['ranks']} ranks, medians of {result['steps']} steps"]
    lines += [f"  {key:10} {value:9.4f} s {value / step:6.1%}" for key, value in result["seconds"].items()]
    events = list(result["bytes"])
    lines.append(f"  {'MiB':16}" + "".join(f"{event:>11}" for event in events))
    for owner in result["bytes"][events[0]]:
        row = "".join(f"{result['bytes'][event][owner] / 2**20:11.2f}" for event in events)
        lines.append(f"  {owner:16}{row}")
    return "\n".join(lines)


def _median(records: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(record[key] for record in records)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="grpo_tiny_moe")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("overrides", nargs="*", help="key=value for the run")
    options = parser.parse_intermixed_args()
    if options.steps <= WARM:
        parser.error(f"--steps={options.steps}: the first {WARM} are not counted, so give more")
    result = measure(options.recipe, options.steps, options.overrides)
    print(render(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
