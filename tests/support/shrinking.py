"""Causal language models of transformers, all of them, shrunk by a rule over names of fields.

The rule knows no model. It gives sizes, counts and lengths small values by their names, and leaves
out what is listed for each layer. What then cannot be built is told with the reason.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 2
VOCABULARY = 96

# The first pattern that matches the whole name of a field gives its value.
_RULES: tuple[tuple[str, int], ...] = (
    (r"(pad|bos|eos|sep|cls|mask|decoder_start|forced_\w+)_token_id", 1),
    (r"(\w+_)?vocab(_size)?(_\w+)?", VOCABULARY),
    (r"n_vocab|n_words", VOCABULARY),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers)", LAYERS),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv|multi_query_group_num)", 2),
    (r"(\w+_)?(num_attention_heads|num_heads|n_heads?|n_embd_heads)", 4),
    (r"(encoder|decoder)_attention_heads", 4),
    (r"mamba_(d_head|head_dim)", 16),
    (r"(num|n)_(\w+_)?(experts_per_\w+|experts_activated)|moe_(k|topk|top_k)|top_k|topk", 2),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)", 4),
    (r"(n_group|topk_group|num_expert_groups?|n_shared_experts|num_shared_experts)", 1),
    (r"(\w+_)?n_?groups", 1),
    (r"(first_k_dense_replace|moe_layer_start_index|num_dense_layers)", 1),
    (r"(hidden_size|d_model|n_embd|dim|hidden_dim|model_dim|embedding_size|emb_dim)", 32),
    (r"word_embed_proj_dim", 32),
    (r"(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|head_dim|d_kv|qk_head_dim|rotary_dim)", 8),
    (r"(\w+_)?(head_dim|head_size|d_head|attention_head_size)", 8),
    (r"(q_lora_rank|kv_lora_rank|\w*lora_rank\w*)", 16),
    (r"(\w*intermediate_size\w*|ffn_dim|d_ff|n_inner|ffn_hidden_size|(en|de)coder_ffn_dim)", 64),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len\w*|max_sequence_length)", 128),
    (r"(sliding_window|window_size|attention_chunk_size|local_attention_size)", 16),
    (r"(state_size|ssm_state_size|mamba_d_state|time_step_rank|mamba_dt_rank)", 8),
    (r"(\w*chunk_size|conv_kernel|mamba_d_conv)", 4),
)
# Fields with an entry for each layer, which the config makes itself of its depth.
_BY_LAYER = re.compile(r"layer_types|\w*layers_block_type|\w*layer_idx|\w*_layer_types|\w*_pattern")


def names() -> list[str]:
    """Return the model types of all causal language models."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING))


def shrunk(name: str) -> nn.Module:
    """Build the model of a type with small sizes and seeded random weights."""
    import transformers

    config = shrunk_config(CONFIG_MAPPING[name])
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    cls = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    text = config.get_text_config(decoder=True)
    own = text if isinstance(text, cls.config_class) else config
    for field in ("use_cache", "is_decoder"):
        if hasattr(own, field):
            setattr(own, field, field == "is_decoder")
    torch.manual_seed(0)
    model = cls(own)
    _randomize(model)
    return model.eval()


def shrunk_config(cls: type[PreTrainedConfig], depth: int = 0) -> Any:
    """Return a config with small values, and small configs of its parts."""
    plain = cls()
    given: dict[str, Any] = {}
    for field in _fields(cls, plain):
        value = getattr(plain, field, None)
        part = cls.sub_configs.get(field) if depth < 2 else None
        if isinstance(value, PreTrainedConfig) and part is not None:
            given[field] = shrunk_config(type(value), depth + 1).to_dict()
        elif type(value) is int or (value is None and _small(field) is not None):
            small = _small(field)
            if small is not None and value != 0 and not (value is None and "layers" in field):
                given[field] = _consistent(field, small, plain)
    return cls(**given)


def _consistent(field: str, small: int, plain: Any) -> int:
    """Return the value that keeps what a config has in common between two fields."""
    heads = getattr(plain, "num_attention_heads", None)
    if small == 2 and "kv" in field.replace("key_value", "kv") and getattr(plain, field) == heads:
        return 4  # each head has its own keys
    if field == "head_dim" and hasattr(plain, "expand"):
        return 16  # four heads share twice the hidden size
    return small


def _fields(cls: type[PreTrainedConfig], plain: PreTrainedConfig) -> Iterator[str]:
    known = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__annotations__", {})}
    for field in sorted(known | set(vars(plain))):
        if not field.startswith("_") and field not in ("self", "kwargs"):
            yield field


def _small(field: str) -> int | None:
    return next((size for rule, size in _RULES if re.fullmatch(rule, field)), None)


def _randomize(model: nn.Module) -> None:
    """Give parameters that start at a constant some noise: zeros hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.02 * noise)


def batches_for(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return two batches of tokens, of two lengths."""
    found = []
    for tokens in (12, 16):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(2, VOCABULARY, (2, tokens), generator=generator)
        mask = torch.ones_like(ids)
        found.append({"input_ids": ids, "attention_mask": mask})
    return found
