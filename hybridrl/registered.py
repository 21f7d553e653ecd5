"""The names that a configuration may give where the code keeps a registry."""

from collections.abc import Iterable, Mapping

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregate import AGGREGATES
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.policy_losses import POLICY_LOSSES
from hybridrl.config.kinds import OWN_ADVANTAGES

NAMES: Mapping[str, Iterable[str]] = {
    "algorithm.advantage": (*ADVANTAGES, *OWN_ADVANTAGES.values()),
    "algorithm.policy_loss": POLICY_LOSSES,
    "algorithm.kl.estimator": KL_ESTIMATORS,
    "algorithm.aggregate": AGGREGATES,
}
"""Key → registered names."""
