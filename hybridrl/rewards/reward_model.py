"""Reward models as judges: they score whole sequences on the training ranks, in batches, between the other judges and
the update.

Limits: a reward model reads the policy's token ids as they are, so it needs the policy's vocabulary; it stays on the
device for the whole run, sharded as the policy is; it does not see answers or metadata.
"""

from collections.abc import Sequence
from pathlib import Path

from hybridrl.config.schema import Config, JudgeConfig
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.rewards.score import judge_names
from hybridrl.rollout.samples import Sample
from hybridrl.training.frozen import FrozenRewardModel
from hybridrl.training.preference import scored_row

NAME = "reward_model"


def split_judges(judges: Sequence[JudgeConfig]) -> tuple[list[JudgeConfig], list[JudgeConfig]]:
    """Those that run in worker processes, and reward models."""
    return [j for j in judges if j.name != NAME], [j for j in judges if j.name == NAME]


class RewardModels:
    """The reward models of a run.

    Args:
        folders: of each of `judges`, with its sizes.
        rules: names of the other judges' scores: a sample that lacks one keeps the reward that its failure gave it.
    """

    def __init__(
        self,
        judges: Sequence[JudgeConfig],
        folders: Sequence[tuple[Path, ModelSpec]],
        config: Config,
        sizes: ParallelSizes,
        rules: Sequence[JudgeConfig],
    ) -> None:
        self._rules = judge_names(rules)
        self._named = list(zip(judge_names(judges), judges, strict=True))
        self._models = [FrozenRewardModel(config, spec, sizes, folder=folder) for folder, spec in folders]

    def score(self, samples: Sequence[Sample]) -> None:
        """Adds each model's weighted score of prompt and response to the rewards of samples that did not fail.

        Collective: all ranks call it with the same samples.
        """
        if not samples:
            return
        rows = [scored_row(i, [*s.prompt.token_ids, *s.response_ids]) for i, s in enumerate(samples)]
        for (name, judge), model in zip(self._named, self._models, strict=True):
            for sample, score in zip(samples, model.scores_of_rows(rows).tolist(), strict=True):
                sample.rewards[name] = score
                if not sample.failed and all(rule in sample.rewards for rule in self._rules):
                    sample.reward = (sample.reward or 0.0) + judge.weight * score
