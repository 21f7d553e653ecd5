"""A KL coefficient that steers the divergence towards a target."""

from typing import Any


class KlController:
    """Constant without a target; with one, after each step coef ← coef·(1 + gain·clip(KL / target - 1, -0.2, 0.2)).

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2 (gain 0.1).

    Args:
        coef: the first coefficient.
        target: of the divergence of a response, in nats. None: the coefficient stays.
    """

    def __init__(self, coef: float, *, target: float | None = None, gain: float = 0.1) -> None:
        self.coef = coef
        """Of the step to come."""
        self._target = target
        self._gain = gain

    def update(self, kl: float) -> None:
        """Takes notice of a step's mean divergence, in nats a response."""
        if self._target is not None:
            error = min(max(kl / self._target - 1, -0.2), 0.2)
            self.coef *= 1 + self._gain * error

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the saved coefficient; one that does not move stays as configured."""
        if self._target is not None:
            self.coef = float(state["coef"])
