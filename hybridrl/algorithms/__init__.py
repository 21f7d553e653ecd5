"""Advantages, losses, divergences and their reduction: pure functions of tensors, in registries that a recipe names."""

from hybridrl.algorithms.advantages import ADVANTAGES
from hybridrl.algorithms.aggregate import AGGREGATES, token_weights
from hybridrl.algorithms.kl import KL_ESTIMATORS
from hybridrl.algorithms.pass_at_k import pass_at_k
from hybridrl.algorithms.policy_losses import POLICY_LOSSES
from hybridrl.algorithms.registry import Registry

__all__ = ["ADVANTAGES", "AGGREGATES", "KL_ESTIMATORS", "POLICY_LOSSES", "Registry", "pass_at_k", "token_weights"]
