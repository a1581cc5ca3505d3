"""Quantize a model by llm-compressor, calibrated by Inlay: one import and one argument.

python examples/inside_llmcompressor.py ./SmolLM2 --out SmolLM2-W8A8
python examples/inside_llmcompressor.py ./SmolLM2 --out SmolLM2-W8A8 --pipeline basic
"""

import argparse
import time
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

import inlay.llmcompressor  # noqa: F401 - registers the pipeline, and Inlay's observers

PROSE = Path(__file__).parent / "prose.txt"


def recipe(observer: str) -> QuantizationModifier:
    """Weights and inputs in int8, with static scales."""
    weights = {"num_bits": 8, "strategy": "channel"}
    inputs = {"num_bits": 8, "strategy": "tensor", "symmetric": False, "observer": observer}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return QuantizationModifier(config_groups={"int8": scheme}, ignore=["lm_head"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder")
    parser.add_argument("--text", type=Path, default=PROSE, help="a text a line")
    parser.add_argument("--observer", default="histogram", help="Inlay's or llm-compressor's")
    parser.add_argument("--pipeline", default="inlay")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = arguments.text.read_text().splitlines()
    tokens = [tokenizer(text, truncation=True, max_length=256) for text in texts]
    start = time.perf_counter()
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(arguments.model),
        processor=tokenizer,
        dataset=Dataset.from_list([dict(one) for one in tokens]),
        num_calibration_samples=len(texts),
        max_seq_length=256,
        recipe=recipe(arguments.observer),
        pipeline=arguments.pipeline,
        output_dir=str(arguments.out),
    )
    print(f"{arguments.out} is written, after {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
