"""Evaluation: settings without effect, and prompts that are not there."""

from collections.abc import Iterator
from dataclasses import fields

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config, EvaluationConfig
from hybridrl.config.validate.inputs import BUILTIN, data_file_problems, split_problems


def evaluation_problems(config: Config, files: bool) -> Iterator[str]:
    """Mistakes in `evaluation`; `files=False` leaves out what depends on this machine."""
    chosen, source = config.evaluation, config.data.source
    if chosen.every is None:
        yield from _idle(chosen, "without evaluation.every")
        return
    if is_supervised(config):
        name = config.algorithm.name
        yield f"evaluation.every={chosen.every} has no effect with algorithm.name={name}: the run samples nothing"
        return
    if not config.rewards.judges:
        yield f"evaluation.every={chosen.every}: there is no judge (rewards.judges) to measure responses"
    if chosen.n > 1 and chosen.temperature == 0:
        yield (
            f"evaluation.n={chosen.n} with evaluation.temperature=0: all samples of a prompt would be the same; set a "
            "temperature, or evaluation.n=1"
        )
    if source == "reasoning_gym":
        if chosen.path is not None:
            yield f"evaluation.path={chosen.path} has no effect with data.source=reasoning_gym; leave it null"
    elif chosen.path is None:
        yield f"evaluation.path is missing: data.source={source} reads a file or folder"
    elif files or chosen.path.startswith(BUILTIN):
        yield from data_file_problems("evaluation.path", chosen.path, source)
    yield from split_problems("evaluation.split", chosen.split, source)


def _idle(chosen: EvaluationConfig, reason: str) -> Iterator[str]:
    usual = EvaluationConfig()
    for field in fields(chosen):
        if (value := getattr(chosen, field.name)) != getattr(usual, field.name):
            yield f"evaluation.{field.name}={value} has no effect {reason}"
