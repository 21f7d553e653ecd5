"""The policy on prompts that it is not trained on: generated and judged as in a step, and only measured."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hybridrl.config.schema import Config
from hybridrl.rewards.score import reward_metrics
from hybridrl.rollout.collect import make_requests
from hybridrl.rollout.metrics import response_metrics
from hybridrl.rollout.samples import Sample
from hybridrl.session import Session

SEED_STEP = 0
"""Stands for the step in the seeds of all evaluations, which then differ by the weights alone; steps begin at 1."""


def is_due(config: Config, step: int) -> bool:
    """Whether the weights are measured after this step."""
    every = config.evaluation.every
    return every is not None and (step % every == 0 or step == config.trainer.steps)


def evaluate(session: Session, step: int) -> dict[str, float]:
    """Metrics of the weights after `step`, where it is time for them; else none. Every rank calls it, between phases.

    - `eval/reward/mean`, `/std` and each judge's: over all samples; `eval/reward/best`: the mean over prompts of the
      best of their samples;
    - `eval/reward/errors`: samples that a judge failed on;
    - `eval/response_length/…` as of a step's samples; `eval/prompts`: how many there are.
    """
    config, chosen = session.config, session.config.evaluation
    if session.evaluation is None or not is_due(config, step):
        return {}
    drawn = replace(config.rollout, n=chosen.n, temperature=chosen.temperature, top_p=chosen.top_p)
    with session.timer("evaluation"), session.rollout_phase(version=step):
        requests = make_requests(
            session.evaluation, drawn, seed=config.trainer.seed, step=SEED_STEP, eos_ids=session.eos_ids
        )
        local = session.replicas.generate(requests)
        session.hybrid.end_rollout()
        samples, counts = session.judge(local, requests)
    found = {**_measured(samples), "reward/errors": counts["reward/errors"]}
    return {f"eval/{key}": value for key, value in found.items()}


def _measured(samples: Sequence[Sample]) -> dict[str, float]:
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            by_prompt[sample.prompt.id].append(sample.reward)
    best = sum(map(max, by_prompt.values())) / len(by_prompt) if by_prompt else float("nan")
    prompts = len({sample.prompt.id for sample in samples})
    return reward_metrics(samples) | {"reward/best": best, "prompts": float(prompts)} | response_metrics(samples)
