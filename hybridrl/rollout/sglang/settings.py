"""Settings of a model that SGLang reads from `config.json`, where a folder may lack them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARGUMENT = "json_model_override_args"
"""SGLang's argument for settings that go over those of the folder."""

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""By `model_type`: what transformers leaves out when it writes a folder, since its own class knows no other value.
`hybridrl.models` reads them where they are there, and refuses others."""


def completed(folder: Path, server_args: Mapping[str, Any]) -> dict[str, str]:
    """The argument with what the folder's `config.json` leaves out, under what `server_args` set; {} for nothing."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    missing = {k: v for k, v in LEFT_OUT.get(config.get("model_type", ""), {}).items() if k not in config}
    if not missing:
        return {}
    return {ARGUMENT: json.dumps({**missing, **json.loads(server_args.get(ARGUMENT, "{}"))})}
