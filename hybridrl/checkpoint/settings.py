"""The configuration as a part of a run: going on from a checkpoint tells which settings are not what they were."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from hybridrl.config.save import without_secrets
from hybridrl.config.schema import Config

UNTOLD = ("trainer.resume", "trainer.output_dir", "checkpoint.load", "plan.")
"""Settings whose change says nothing about what is trained: starts of their keys."""
ABSENT = "absent"


class Settings:
    """Saves what a run was told to do. `note` tells a person something, on the rank that speaks."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self._settings: dict[str, Any] = without_secrets(asdict(config))
        self._note = note

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self._settings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tells every difference; a run may go on with other settings, as far as its parts allow it."""
        if found := differences(json.loads(state["json"]), self._settings):
            self._note(f"settings that the checkpoint was not made with: {'; '.join(found)}")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key=now (was …)` for each dotted key whose value is another one."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return [
        f"{key}={_shown(after, key)} (was {_shown(before, key)})"
        for key in dict.fromkeys([*after, *before])
        if not key.startswith(UNTOLD) and _shown(before, key) != _shown(after, key)
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], ensure_ascii=False) if key in leaves else ABSENT
