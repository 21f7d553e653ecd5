"""Elements of a model, by how many tokens meet them."""

from hybridrl.models.weights import EXPERT_ROLES, Role, WeightMap


def parameters_met(weights: WeightMap) -> tuple[int, int]:
    """Elements that each token meets, and those of all experts; the embedding is neither."""
    sizes = {kind: kind.size * len(tensors) for kind, tensors in weights.kinds.items()}
    experts = sum(size for kind, size in sizes.items() if kind.role in EXPERT_ROLES)
    embedding = sum(size for kind, size in sizes.items() if kind.role is Role.EMBED)
    return sum(sizes.values()) - experts - embedding, experts


def params_of(weights: WeightMap) -> tuple[int, int]:
    """Parameters in all, and those that one token meets, the embedding among them."""
    _, experts = parameters_met(weights)
    total, spec = sum(t.size for t in weights), weights.spec
    if spec.moe is None:
        return total, total
    return total, total - experts + experts * spec.moe.top_k // spec.moe.num_experts
