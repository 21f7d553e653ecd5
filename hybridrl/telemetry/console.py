"""What a person reads while a run goes on: what will run, a line a step, and where things are in the end."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hybridrl.config.batch import batch_arithmetic
from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec

COLUMNS = {
    "reward/mean": "reward",
    "eval/reward/mean": "eval",
    "sampling/batches": "batches",
    "loss/policy": "policy",
    "loss/sft": "loss",
    "loss/preference": "loss",
    "loss/value": "value loss",
    "value/explained_variance": "explained",
    "reward/accuracy": "accuracy",
    "holdout/accuracy": "held out",
    "loss/kl": "kl",
    "entropy": "entropy",
    "grad_norm": "|grad|",
    "response_length/mean": "length",
    "mismatch/logprob_abs_mean": "mismatch",
    "reward/errors": "judge errors",
    "update/skipped": "skipped",
    "time/step": "s/step",
}
"""Metrics shown on the console where a step has them, with their short names."""
_WHERE_NOT_ZERO = ("loss/kl", "reward/errors", "update/skipped")
"""Shown only where there is something to see."""


class RunConsole:
    """The console of a run of `steps` steps. On rank 0 alone."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console()
        self._spent = 0.0
        self._shown = 0
        """Steps made since this console began, which a resumed run does not begin at 1."""

    def introduce(self, config: Config, spec: ModelSpec, *, device: str, rows: int, dropped: int) -> None:
        """Says what will run: model, ranks, data and the arithmetic of a step."""
        parallel, trainer, supervised = config.parallel, config.trainer, is_supervised(config)
        world = trainer.nodes * trainer.ranks_per_node
        batch = batch_arithmetic(config, world)
        sizes = " · ".join(f"{name.upper()} {getattr(parallel, name)}" for name in ("tp", "cp", "pp", "ep", "etp"))
        experts = f", {spec.moe.num_experts} experts" if spec.moe is not None else ""
        judges = "" if supervised else f", judged by {', '.join(judge.name for judge in config.rewards.judges)}"
        left_out = f", {dropped} over the length limit dropped (data.overlong=drop)" if dropped else ""
        engine = "" if supervised else f"; engine {config.rollout.engine}"
        self.note(f": {config.algorithm.name} on {config.model.path}", head=trainer.name)
        for name, text in {
            "model": f"{spec.family}, {_count(_parameters(spec))} parameters{experts}, {config.model.dtype}",
            "ranks": f"{world} on {device}: {sizes} · DP {batch.dp}{engine}",
            "data": f"{rows:,} rows{left_out}{judges}",
            "folder": trainer.output_dir,
        }.items():
            self.note(f"  {name:<8}{text}")
        self.note("\n".join(f"  {line}" for line in str(batch).splitlines()))

    def note(self, text: str, head: str = "") -> None:
        """A line of its own, whose head is bold. Nothing in it is taken for markup."""
        self._console.print(Text.assemble((head, "bold"), text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: the step's metrics, generated tokens a second of the whole step, and the time that is left at the
        pace so far."""
        seconds = metrics.get("time/step", 0.0)
        self._shown, self._spent = self._shown + 1, self._spent + seconds
        shown = [
            f"{name} {f'{metrics[key]:.4g}':<9}"
            for key, name in COLUMNS.items()
            if key in metrics and (metrics[key] or key not in _WHERE_NOT_ZERO)
        ]
        if seconds and "tokens/generated" in metrics:
            shown.append(f"tokens/s {metrics['tokens/generated'] / seconds:<9.4g}")
        left = _clock(self._spent / self._shown * (self._steps - step))
        width = len(str(self._steps))
        self.note(f"  {' '.join(shown)} left {left}", head=f"step {step:>{width}}/{self._steps}")

    def conclude(self, folder: Path, model: Path | None) -> None:
        """Says where the results are."""
        self.note(f": {self._shown} steps in {_clock(self._spent)}", head="done")
        places = {
            "metrics": str(folder / "metrics.jsonl"),
            "curves": f"tensorboard --logdir {folder / 'tensorboard'}",
            "settings": str(folder / "config.yaml"),
            "model": f"{model}  (a Hugging Face folder; model.path={model} goes on from it)"
            if model
            else "not written (trainer.export_final=false)",
        }
        for name, place in places.items():
            self.note(f"  {name:<10}{place}")


def _parameters(spec: ModelSpec) -> int:
    return sum(prod(tensor.shape) for tensor in weight_map(spec).tensors)


def _count(number: int) -> str:
    """12,345,678 as 12.3 M."""
    for size, sign in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {sign}"
    return str(number)


def _clock(seconds: float) -> str:
    """75 s as 1:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
