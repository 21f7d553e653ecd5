"""`reasoning_gym`: the data set's own scorer, `score_answer(answer, entry)`.

Prompts made by `data.source=reasoning_gym` carry the entry, and how its data set was made, under the metadata key
`reasoning_gym`. The answer handed to the scorer is what stands between the last `<answer>` and `</answer>`, or without
such a pair the whole response, both without white space at the ends. An `<answer>` that is never closed scores 0.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hybridrl.data.tasks import METADATA_KEY, create_dataset

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def reasoning_gym_score(response: str, answer: str | None, metadata: Mapping[str, Any]) -> float | None:
    """The data set's own score, in [0, 1] for nearly all; None if the prompt is of no reasoning-gym data set."""
    origin = metadata.get(METADATA_KEY)
    if origin is None:
        return None
    recipe = {key: origin[key] for key in ("task", "args", "seed", "size")}
    dataset = _dataset(json.dumps(recipe, sort_keys=True))
    extracted = extract_answer(response)
    return 0.0 if extracted is None else float(dataset.score_answer(extracted, origin["entry"]))


def extract_answer(response: str) -> str | None:
    """The text that is scored; None if the last `<answer>` is never closed."""
    tags = list(_TAG.finditer(response))
    opened = [i for i, tag in enumerate(tags) if not tag.group(1)]
    if not opened:
        return response.strip()
    last = opened[-1]
    if last + 1 == len(tags):
        return None
    return response[tags[last].end() : tags[last + 1].start()].strip()


@lru_cache(maxsize=64)
def _dataset(recipe: str) -> Any:
    return create_dataset(**json.loads(recipe))
