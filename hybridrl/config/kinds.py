"""What kinds of run there are, by `algorithm.name`."""

from hybridrl.config.schema import Config

REINFORCED = ("grpo", "ppo", "distill")
"""Runs that learn from the policy's own samples."""
OWN_ADVANTAGES = {"ppo": "gae", "distill": "reverse_kl"}
"""Kinds whose advantages are by token, from more than rewards, and the value of `algorithm.advantage` for each."""
SUPERVISED = ("sft", "preference", "reward_model")
"""Runs that learn from data alone: no engine, no judges."""
PAIRED = ("preference", "reward_model")
"""Supervised runs whose data compares or judges responses."""


def is_supervised(config: Config) -> bool:
    """Whether the run learns from data alone."""
    return config.algorithm.name in SUPERVISED


def learns_from_pairs(config: Config) -> bool:
    """Whether a row of the data is two responses to one prompt."""
    return config.algorithm.name == "reward_model" or (
        config.algorithm.name == "preference" and config.preference.loss != "kto"
    )


def samples_per_row(config: Config) -> int:
    """Sequences that a row of the data becomes in an update."""
    if is_supervised(config):
        return 2 if learns_from_pairs(config) else 1
    return config.rollout.n
