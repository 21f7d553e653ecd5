"""Reading a Hugging Face `config.json` strictly: every problem is collected, and told at once.

A family module reads the settings it knows through `Settings`; what it cannot honour becomes a problem. Nothing here
imports transformers: a configuration is data.
"""

from collections.abc import Mapping
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What a scaling cannot do without."""


class UnsupportedModelError(ValueError):
    """A model that hybridrl cannot train as its configuration describes it; `problems` has a line for each reason."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{what} is not supported:", *problems]))


class Settings:
    """A configuration whose readers note each problem and go on; `finish` raises all of them together.

    A key that is absent takes its default, which must be the one of transformers' own configuration class. Readers
    without a default demand the key.
    """

    def __init__(self, config: Mapping[str, Any], known_types: tuple[str, ...]) -> None:
        self.config = config
        self.family = str(config.get("model_type"))
        self.problems: list[str] = []
        if self.family not in known_types:
            self.note("model_type", self.family, " or ".join(known_types))
        if config.get("quantization_config") is not None:
            self.note("quantization_config", config["quantization_config"], "none: give unquantized weights")

    def note(self, key: str, found: object, supported: str) -> None:
        """Adds a problem."""
        self.problems.append(f"{key}={found!r}; supported: {supported}")

    def finish(self) -> None:
        """Raises UnsupportedModelError where there was any problem."""
        if self.problems:
            raise UnsupportedModelError(f"model_type {self.family!r} with these settings", self.problems)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, for settings that need no check; null counts as absent."""
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of these keys that is set (aliases of one setting), as a whole number of at least `least`."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.note(key, value, f"a whole number of at least {least}")
                return least
            return value
        if default is None:
            self.note(" or ".join(keys), None, f"a whole number of at least {least}")
            return least
        return default

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.note(key, value, "a number")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.note(key, value, "true or false")
            return default
        return value

    def only(self, key: str, *supported: Any, default: Any) -> None:
        """The setting must be one of these values."""
        value = self.get(key, default)
        if value not in supported:
            self.note(key, value, " or ".join(map(repr, supported)))

    def dtype(self) -> str:
        """The checkpoint's dtype: `dtype`, or `torch_dtype` as older configurations call it."""
        value = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if value not in ("float32", "bfloat16", "float16"):
            self.note("dtype", value, "'float32', 'bfloat16' or 'float16'")
        return value

    def rope(
        self, default_theta: float = 10000.0, default_partial: float = 1.0
    ) -> tuple[float, dict[str, Any] | None, float]:
        """Rotary base, scaling and the rotated part of a head.

        Reads `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` and `partial_rotary_factor` (before).
        The scaling has its `rope_type` and factors; None where positions are not scaled.
        """
        parameters = self.get("rope_parameters")
        if parameters is None:
            parameters = {**self.get("rope_scaling", {})}
        elif not isinstance(parameters, Mapping) or any(isinstance(v, Mapping) for v in parameters.values()):
            self.note("rope_parameters", parameters, "one set of rotary parameters for all layers")
            parameters = {}
        parameters = dict(parameters)
        old = parameters.pop("type", "default")
        kind = parameters.pop("rope_type", old)
        theta = parameters.pop("rope_theta", self.get("rope_theta", default_theta))
        partial = parameters.pop("partial_rotary_factor", self.get("partial_rotary_factor", default_partial))
        if kind not in ROPE_TYPES:
            self.note("rope_type", kind, " or ".join(map(repr, ROPE_TYPES)))
        for key, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                self.note(key, value, "a number above 0")
                return default_theta, None, 1.0
        missing = [key for key in ROPE_KEYS.get(kind, ()) if parameters.get(key) is None]
        if missing:
            self.note("rope_type", kind, f"{kind!r} with {', '.join(missing)}")
        scaling = None if kind == "default" else {"rope_type": kind, **parameters}
        return float(theta), scaling, float(partial)

    def full_attention(self, num_layers: int) -> None:
        """Notes sliding-window attention in any layer."""
        types = self.get("layer_types", [])
        if set(types) - {"full_attention"}:
            self.note("layer_types", sorted(set(types)), "'full_attention' in every layer")
        if types and len(types) != num_layers:
            self.note("layer_types", f"{len(types)} entries", f"one for each of the {num_layers} layers")

    def common(
        self,
        *,
        default_head_dim: int | None = None,
        default_kv_heads: int | None = None,
        rope_theta: float = 10000.0,
        partial_rotary: float = 1.0,
        norm_eps: float = 1e-6,
    ) -> dict[str, Any]:
        """The fields of a `ModelSpec` that the families with grouped-query attention share.

        `default_kv_heads` counts where the key is absent (None: as many as heads); null means as many as heads.
        """
        layers = self.integer("num_hidden_layers")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        absent = "num_key_value_heads" not in self.config
        kv_heads = self.integer("num_key_value_heads", default=default_kv_heads or heads if absent else heads)
        if heads % kv_heads:
            self.note("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
        if default_head_dim is None and self.get("head_dim") is None and hidden % heads:
            self.note("hidden_size", hidden, f"a multiple of num_attention_heads={heads} where head_dim is not given")
        self.only("hidden_act", "silu", default="silu")
        self.only("attention_dropout", 0, 0.0, default=0.0)
        self.full_attention(layers)
        theta, scaling, partial = self.rope(rope_theta, partial_rotary)
        return {
            "family": self.family,
            "num_layers": layers,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": self.integer("head_dim", default=default_head_dim or hidden // heads),
            "ffn_size": self.integer("intermediate_size"),
            "vocab_size": self.integer("vocab_size"),
            "tied": self.flag("tie_word_embeddings", False),
            "norm_eps": self.number("rms_norm_eps", norm_eps),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "partial_rotary_factor": partial,
            "max_positions": self.integer("max_position_embeddings"),
            "dtype": self.dtype(),
        }
