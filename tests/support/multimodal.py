"""Small models that read images, each with a processor that reads them from disk."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import SIZES
from PIL import Image
from tokens import END, PADDING, UNKNOWN, WORDS
from torch import nn
from transformers import ProcessorMixin, Qwen2_5_VLProcessor

TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
VISION = {key: value for key, value in SIZES.items() if key != "vocab_size"}
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE {% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}"
)
IMAGE = WORDS + 3  # the id of the token in whose places images are put


class WithoutVideos(Qwen2_5_VLProcessor):
    """Reading videos needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **_: Any) -> None:
        self.image_token, self.image_token_id = "<image>", IMAGE
        self.video_token, self.video_token_id = "<video>", IMAGE + 1
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = {"<unk>": UNKNOWN, "<end>": END, "<pad>": PADDING, "<image>": IMAGE}
    special |= {"<video>": IMAGE + 1, "<begin>": IMAGE + 2, "<stop>": IMAGE + 3}
    words = {f"w{index}": index for index in range(WORDS)}
    backend = Tokenizer(WordLevel({**words, **special}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<end>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<begin>",
            "eoi_token": "<stop>",
            "video_token": "<video>",
        },
    )


def llava() -> tuple[nn.Module, Any]:
    vision = {**VISION, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE.replace("IMAGE", "<image>"),
    )
    return _seeded(transformers.LlavaForConditionalGeneration, config), processor


def gemma3() -> tuple[nn.Module, Any]:
    config = transformers.Gemma3Config(
        vision_config={
            **VISION,
            "image_size": 16,
            "patch_size": 4,
            "model_type": "siglip_vision_model",
        },
        text_config=TEXT,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=IMAGE + 2,
        eoi_token_index=IMAGE + 3,
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(
        images, tokenizer(), image_seq_length=4, chat_template=_TEMPLATE.replace("IMAGE", "<begin>")
    )
    return _seeded(transformers.Gemma3ForConditionalGeneration, config), processor


def qwen2_5_vl() -> tuple[nn.Module, Any]:
    """Its images have as many tokens as their size gives them."""
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            **patches,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "spatial_merge_size": 2,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "in_channels": 3,
        },
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
    )
    images = transformers.Qwen2VLImageProcessorPil(
        **patches, merge_size=2, min_pixels=64, max_pixels=64 * 64
    )
    marked = _TEMPLATE.replace("IMAGE", "<begin> <image> <stop>")
    processor = WithoutVideos(images, tokenizer(), chat_template=marked)
    return _seeded(transformers.Qwen2_5_VLForConditionalGeneration, config), processor


def whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=20,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=PADDING,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    # A second of sound has a hundred frames. The encoder makes fifty positions of them.
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    model = _seeded(transformers.WhisperForConditionalGeneration, config)
    return model, Recordings(extractor, tokenizer())


class Recordings(transformers.ProcessorMixin):
    """What WhisperProcessor is, with any tokenizer."""

    def __init__(self, feature_extractor: Any, tokenizer: Any) -> None:
        super().__init__(feature_extractor, tokenizer)


def write_recordings(folder: Path) -> list[str]:
    """Write tones of three lengths, as 16 bits, 8 bits, and two channels; return the names."""
    names = []
    for seconds, width, channels in ((0.5, 2, 1), (0.3, 1, 1), (0.8, 2, 2)):
        names.append(f"{seconds}s.wav")
        time = np.arange(int(seconds * 16000)) / 16000
        tone = np.sin(2 * np.pi * 440 * time).repeat(channels)
        data = (tone * 120 + 128).astype(np.uint8) if width == 1 else (tone * 30000).astype("<i2")
        with wave.open(str(folder / names[-1]), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(width)
            file.setframerate(16000)
            file.writeframes(data.tobytes())
    return names


MODELS = {"llava": llava, "gemma3": gemma3, "qwen2_5_vl": qwen2_5_vl}


def write_images(folder: Path) -> list[str]:
    """Write images of four sizes; return the names of the files."""
    rng = np.random.default_rng(0)
    names = []
    for height, width in ((24, 24), (16, 40), (48, 32), (20, 60)):
        names.append(f"{height}x{width}.png")
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def _seeded(cls: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(config).eval()
