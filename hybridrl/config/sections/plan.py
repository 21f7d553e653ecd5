"""The dry run's own settings; training reads none of them."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class PlanConfig:
    """What `python -m hybridrl.plan` assumes, and what it does."""

    hardware: str = "h100"
    """A name in `conf/hardware`: the devices, nodes and links that the recipe is meant for."""
    mean_response_length: int | None = None
    """Tokens of an average response; None takes `rollout.max_response_length`, the longest there can be."""
    search: bool = False
    """Also tries other layouts on the same ranks, and ranks those that fit by the time of a step."""
    search_results: int = 8
    """Layouts that the search shows."""
