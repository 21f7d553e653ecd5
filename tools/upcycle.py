"""Turns a dense Llama-family folder into a Mixtral-style mixture of experts that computes the same function.

    python tools/upcycle.py outputs/smollm2 --out outputs/smollm2_moe --experts 8 --top-k 2

Every expert is a copy of the dense MLP and the top-k weights sum to one, so whatever the router chooses, the layer's
output is the dense layer's. The routers get small random weights from a seed, so that experts part once trained
(Komatsuzaki et al., Sparse Upcycling, 2022). `lm_head` is untied and written. Runs layer by layer: the peak is the
dense model plus one layer of experts.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybridrl.files import folder_aside

KEPT = (
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "use_cache",
    "vocab_size",
)
COMPANIONS = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "generation_config")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def moe_config(dense: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    """The Mixtral configuration of an upcycled Llama; ValueError names every setting that has no equal there."""
    problems = []
    if dense.get("model_type") != "llama":
        problems.append(f"model_type is {dense.get('model_type')!r}, expected 'llama'")
    problems += [
        f"{key} is set, but Mixtral has no such biases" for key in ("attention_bias", "mlp_bias") if dense.get(key)
    ]
    if not 1 <= top_k <= experts:
        problems.append(f"top_k={top_k} is not between 1 and experts={experts}")
    if problems:
        raise ValueError("; ".join(problems))
    config = {key: dense[key] for key in KEPT if dense.get(key) is not None}
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }


class DenseFolder:
    """Tensors of a Hugging Face folder by name, single file or sharded."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                names = dict.fromkeys(file.keys(), "model.safetensors")
        self._files = {name: safe_open(folder / name, "pt") for name in set(names.values())}
        self._names = names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[self._names[name]].get_tensor(name)


def layer_tensors(dense: DenseFolder, layer: int, experts: int, router: torch.Tensor) -> dict[str, torch.Tensor]:
    """The Mixtral tensors of one layer; each expert is written, being a parameter of its own from now on."""
    prefix = f"model.layers.{layer}."
    copied = ("input_layernorm", "post_attention_layernorm", *ATTENTION)
    tensors = {f"{prefix}{name}.weight": dense[f"{prefix}{name}.weight"] for name in copied}
    tensors[f"{prefix}block_sparse_moe.gate.weight"] = router
    for dense_name, expert_name in MLP.items():
        weight = dense[f"{prefix}mlp.{dense_name}.weight"]
        for expert in range(experts):
            tensors[f"{prefix}block_sparse_moe.experts.{expert}.{expert_name}.weight"] = weight.clone()
    return tensors


def upcycle(source: Path, out: Path, *, experts: int, top_k: int, router_std: float = 0.02, seed: int = 0) -> None:
    """Writes the MoE folder `out` from the dense folder `source`, one file a layer, aside and renamed."""
    dense_config = json.loads((source / "config.json").read_text())
    config = moe_config(dense_config, experts, top_k)
    dense = DenseFolder(source)
    with folder_aside(out) as aside:
        _write_tensors(aside, dense, config, router_std, seed)
        (aside / "config.json").write_text(json.dumps(config, indent=2))
        for path in source.iterdir():
            if path.name.startswith(COMPANIONS):
                shutil.copy2(path, aside / path.name)


def _write_tensors(folder: Path, dense: DenseFolder, config: dict[str, Any], router_std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    embedding = dense["model.embed_tokens.weight"]
    weight_map: dict[str, str] = {}
    total = 0
    for part in range(layers + 1):
        if part < layers:
            router = torch.randn(experts, config["hidden_size"], generator=generator) * router_std
            tensors = layer_tensors(dense, part, experts, router.to(embedding.dtype))
        else:
            head = dense["lm_head.weight"] if "lm_head.weight" in dense else embedding.clone()
            norm = dense["model.norm.weight"]
            tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}
        file = f"model-{part + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="Hugging Face folder of a dense Llama-family model")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--router-std", type=float, default=0.02, help="of the routers' random weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} is already there; remove it or give another --out")
    upcycle(
        arguments.source,
        arguments.out,
        experts=arguments.experts,
        top_k=arguments.top_k,
        router_std=arguments.router_std,
        seed=arguments.seed,
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
