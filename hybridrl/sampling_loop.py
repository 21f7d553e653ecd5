"""A step's samples: generate and judge, batch after batch, until the step has its groups."""

from collections import Counter

from hybridrl.rewards.score import reward_metrics
from hybridrl.rollout.collect import make_requests
from hybridrl.rollout.metrics import prefix_metrics, response_metrics, staleness_metrics
from hybridrl.rollout.samples import Group, Sample
from hybridrl.session import Session


def collect(session: Session, step: int) -> tuple[list[Group], dict[str, float]]:
    """The groups that the step trains on, alike on all ranks, and metrics of all samples that were generated for it.

    In the rollout phase. Every batch is spread over all replicas of the engine, also those that make up for dropped
    groups. Where one batch is enough, the engine is asleep already while it is judged. Raises NoSignalError, on all
    ranks, as `GroupPool.check` does.
    """
    pool, greedy = session.groups, session.config.algorithm.advantage == "remax"
    drawn: list[Sample] = []
    baselines: list[Sample] = []
    totals: Counter[str] = Counter()
    while not pool.full:
        pool.check()
        with session.timer("rollout"):
            requests = make_requests(
                session.prompts.next(pool.batch),
                session.config.rollout,
                seed=session.config.trainer.seed,
                step=step,
                eos_ids=session.eos_ids,
                greedy=greedy,
            )
            local = session.replicas.generate(requests)
            if pool.one_batch:
                session.hybrid.end_rollout()
        with session.timer("reward"):
            samples, counts = session.judge(local, requests)
        pool.add(requests, samples)
        totals.update(counts)
        for request, sample in zip(requests, samples, strict=True):
            (baselines if request.params.temperature == 0 else drawn).append(sample)
    groups, metrics = pool.take()
    metrics |= staleness_metrics([s for group in groups for s in group.samples], version=step - 1)
    if drawn:
        metrics |= {**reward_metrics(drawn), **response_metrics(drawn), **totals, **prefix_metrics(totals)}
    if baselines:
        metrics["reward/greedy"] = reward_metrics(baselines)["reward/mean"]
    return groups, metrics
