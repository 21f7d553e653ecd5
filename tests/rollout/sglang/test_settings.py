"""What is added to a model's settings for SGLang."""

import json
from pathlib import Path

from hybridrl.rollout.sglang.settings import completed


def _folder(path: Path, **settings: object) -> Path:
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_what_a_folder_leaves_out_is_added_and_nothing_else(tmp_path: Path) -> None:
    found = completed(_folder(tmp_path, model_type="deepseek_v3", topk_method="noaux_tc"), {})
    assert json.loads(found["json_model_override_args"]) == {"moe_layer_freq": 1, "scoring_func": "sigmoid"}


def test_settings_of_the_user_stay(tmp_path: Path) -> None:
    own = {"json_model_override_args": '{"moe_layer_freq": 2, "first_k_dense_replace": 0}'}
    found = json.loads(completed(_folder(tmp_path, model_type="deepseek_v3"), own)["json_model_override_args"])
    assert found["moe_layer_freq"] == 2
    assert found["first_k_dense_replace"] == 0
    assert found["topk_method"] == "noaux_tc"


def test_a_whole_folder_and_other_models_are_left_alone(tmp_path: Path) -> None:
    whole = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert completed(_folder(tmp_path, model_type="deepseek_v3", **whole), {}) == {}
    assert completed(_folder(tmp_path, model_type="qwen3_moe"), {"json_model_override_args": "{}"}) == {}
