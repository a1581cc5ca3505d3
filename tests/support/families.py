"""Small models of the families that people quantize, with random weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _seeded(LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes}))


def qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, **changes}
    return _seeded(Qwen3ForCausalLM, Qwen3Config(**fields))


def gemma3(**changes: Any) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    fields = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, **changes}
    return _seeded(Gemma3ForCausalLM, Gemma3TextConfig(**fields))


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    fields = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, **changes}
    return _seeded(GPT2LMHeadModel, GPT2Config(**fields))


def bert(**changes: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    return _seeded(BertModel, BertConfig(**{**SIZES, **changes}))


def electra(**changes: Any) -> nn.Module:
    """Its embeddings are smaller than its blocks, and projected before them."""
    from transformers import ElectraConfig, ElectraModel

    return _seeded(ElectraModel, ElectraConfig(**{**SIZES, "embedding_size": 16, **changes}))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, **changes}
    return _seeded(MixtralForCausalLM, MixtralConfig(**fields))


def qwen3_moe(**changes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    fields = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, **experts, **changes}
    return _seeded(Qwen3MoeForCausalLM, Qwen3MoeConfig(**fields))


def olmoe(**changes: Any) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return _seeded(OlmoeForCausalLM, OlmoeConfig(**{**SIZES, **experts, **changes}))


def deepseek_v3(**changes: Any) -> nn.Module:
    """Its first block has no experts; the others have routed ones and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    heads = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return _seeded(
        DeepseekV3ForCausalLM, DeepseekV3Config(**{**SIZES, **experts, **heads, **changes})
    )


def glm4_moe(**changes: Any) -> nn.Module:
    """Its first block has no experts; the others have routed ones and a shared one."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    }
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    return _seeded(Glm4MoeForCausalLM, Glm4MoeConfig(**{**SIZES, **experts, **heads, **changes}))


def gpt_oss(**changes: Any) -> nn.Module:
    """Its experts are transposed, interleaved and have biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, **changes}
    return _seeded(GptOssForCausalLM, GptOssConfig(**fields))


def granite_moe(**changes: Any) -> nn.Module:
    """A checkpoint of it has one tensor for all experts of a layer."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    fields = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, **changes}
    return _seeded(GraniteMoeForCausalLM, GraniteMoeConfig(**fields))


def vit(**changes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    return _seeded(ViTModel, ViTConfig(**{**sizes, "image_size": 16, "patch_size": 8, **changes}))


def falcon(**changes: Any) -> nn.Module:
    """Its layers multiply by `weight.T` instead of calling `linear`."""
    from transformers import FalconConfig, FalconForCausalLM

    fields = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    return _seeded(FalconForCausalLM, FalconConfig(**{**fields, **changes}))


def mamba(**changes: Any) -> nn.Module:
    """It scans under `vmap`. Its `dt_proj` is never called: only its weight is used."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 32, "state_size": 8, "time_step_rank": 4, "vocab_size": 96}
    fields = {**sizes, "num_hidden_layers": 2, **changes}
    return _seeded(MambaForCausalLM, MambaConfig(**fields))


WITH_EXPERTS: dict[str, Callable[..., nn.Module]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
}

FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
    "vit": vit,
    "falcon": falcon,
}


def batch(model: nn.Module, index: int = 0, rows: int = 2, tokens: int = 6) -> dict[str, Any]:
    """Inputs for any of the families."""
    generator = torch.Generator().manual_seed(index)
    if type(model).__name__.startswith("ViT"):
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    ids = torch.randint(0, 96, (rows, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _seeded(cls: type[nn.Module], config: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(config).eval()
