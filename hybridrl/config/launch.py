"""What the launcher says about this process, and how a refused configuration ends it, before torch is loaded."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

EXIT_STATUS = 2
_WAIT_S = 60.0


@dataclass(frozen=True)
class Launch:
    """Ranks as the launcher set them in the environment; one rank where there is no launcher."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch":
        world = int(environment.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            world=world,
            local_world=int(environment.get("LOCAL_WORLD_SIZE", world)),
            launched="WORLD_SIZE" in environment,
        )


def refuse(problems: Sequence[str], launch: Launch) -> NoReturn:
    """Prints the numbered problems to stderr once a node, and exits with status 2.

    torchrun ends all ranks of a node as soon as one has ended, so the others wait for the one that prints. What it
    leaves in torchrun's error file is shown again in torchrun's own closing report, so that it is the last thing read.
    """
    if launch.local_rank != 0:
        time.sleep(_WAIT_S)
        sys.exit(EXIT_STATUS)
    noun = "mistake" if len(problems) == 1 else "mistakes"
    numbered = "\n".join(f"{i:>3}. {_indent(text)}" for i, text in enumerate(problems, 1))
    message = f"hybridrl: {len(problems)} {noun} in the configuration\n{numbered}"
    print(message, file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        told = {"timestamp": str(int(time.time())), "py_callstack": message}
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": told}}, file)
    sys.exit(EXIT_STATUS)


def _indent(text: str) -> str:
    return text.replace("\n", "\n     ")
