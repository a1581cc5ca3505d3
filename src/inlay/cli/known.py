"""The presets and observers that there are, in words, known without importing the library.

compressed-tensors imports transformers, and observers import torch: seconds, for lists that do not
change. So they are cached here, and a test holds them equal to the registries. The registries are
asked where they may differ: for a version of compressed-tensors or a file of observers that is not
listed here, and once they are loaded, since anybody may have added to them.
"""

import re
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

from inlay.report.numbers import MISSING

__all__ = [
    "COMPILERS",
    "OBSERVERS",
    "PRESETS",
    "Row",
    "compiler_names",
    "needs_data",
    "observer_names",
    "observer_rows",
    "observers_in_registry",
    "preset_names",
    "preset_rows",
    "presets_in_registry",
    "use_of_data",
]

Row = tuple[str, ...]

_TOKEN = "per token, symmetric, dynamic"
_G16, _G32, _G128 = (f"in groups of {size}" for size in (16, 32, 128))
_NVFP4 = f"float4 {_G16} under a global scale, symmetric"
_MXFP4, _MXFP6, _MXFP8 = (f"float{bits} {_G32}, symmetric" for bits in (4, 6, 8))
_FP8_BY_G128 = f"float8 {_G128}, symmetric, dynamic"
_CHANNEL = "int8 per channel, symmetric"

# Name, weights, input activations.
_PRESETS: tuple[Row, ...] = (
    ("FP8", "float8 per tensor, symmetric", "float8 per tensor, symmetric, static"),
    ("FP8_BLOCK", "float8 in blocks of 128 by 128, symmetric", _FP8_BY_G128),
    ("FP8_DYNAMIC", "float8 per channel, symmetric", f"float8 {_TOKEN}"),
    ("INT8", _CHANNEL, f"int8 {_TOKEN}"),
    ("MXFP4", _MXFP4, f"{_MXFP4}, dynamic"),
    ("MXFP4A16", _MXFP4, MISSING),
    ("MXFP8", _MXFP8, f"{_MXFP8}, dynamic"),
    ("MXFP8A16", _MXFP8, MISSING),
    ("NVFP4", _NVFP4, f"{_NVFP4}, dynamic in each group"),
    ("NVFP4A16", _NVFP4, MISSING),
    ("UNQUANTIZED", MISSING, MISSING),
    ("W2A16", f"int2 {_G128}, symmetric", MISSING),
    ("W2A4", f"int2 {_G128}, symmetric", f"int4 {_TOKEN}"),
    ("W2A8", f"int2 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W3A16", f"int3 {_G128}, symmetric", MISSING),
    ("W3A4", f"int3 {_G128}, symmetric", f"int4 {_TOKEN}"),
    ("W3A8", f"int3 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W4A16", f"int4 {_G128}, symmetric", MISSING),
    ("W4A16_ASYM", f"int4 {_G128}, asymmetric", MISSING),
    ("W4A4", f"int4 {_G128}, symmetric", f"int4 {_TOKEN}"),
    ("W4A8", f"int4 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W4AFP8", f"int4 {_G128}, symmetric", f"float8 {_TOKEN}"),
    ("W5A16", f"int5 {_G128}, symmetric", MISSING),
    ("W5A8", f"int5 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W6A16", f"int6 {_G128}, symmetric", MISSING),
    ("W6A8", f"int6 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W7A16", f"int7 {_G128}, symmetric", MISSING),
    ("W7A8", f"int7 {_G128}, symmetric", f"int8 {_TOKEN}"),
    ("W8A16", f"int8 {_G128}, symmetric", MISSING),
    ("W8A8", _CHANNEL, f"int8 {_TOKEN}"),
    ("W8A8_STATIC", _CHANNEL, "int8 per tensor, asymmetric, static"),
)
_ADDED_IN_0_20: tuple[Row, ...] = (
    ("MXFP4XFP8", _MXFP4, _FP8_BY_G128),
    ("MXFP6A16", _MXFP6, MISSING),
    ("MXFP6A8", _MXFP6, f"{_MXFP8}, dynamic"),
)

# By the version of compressed-tensors.
PRESETS: dict[str, tuple[Row, ...]] = {
    "0.19.0": _PRESETS,
    "0.20.0": tuple(sorted(_PRESETS + _ADDED_IN_0_20)),
}

_OBSERVERS_FOLDER = Path(__file__).parent.parent / "observers"
_SEARCH = "maxshrink=0.2, patience=5, grid=100.0, norm=2.4, expand=1.0"
_EXPANDED = "maxshrink=0.5555555555555556, patience=1000, grid=200.0, norm=2.4, expand=1.8"
_EXPANDED_RANGE = (
    "The range with the smallest error among 1.8 to 0.8 times the observed one, for FP4."
)

# Name, what it is for, settings with defaults, the range it finds.
OBSERVERS: tuple[Row, ...] = (
    (
        "fouroversix",
        "weights",
        _EXPANDED,
        "Another name of `nvfp4_expanded_mse`, as in llm-compressor.",
    ),
    (
        "histogram",
        "activations",
        "method=mse, percentile=99.99, norm=2.4, grid=128, mantissa_bits=8",
        "The range chosen from a histogram of all observed values, when it is asked for.",
    ),
    (
        "imatrix_mse",
        "weights",
        "maxshrink=0.95, patience=5, grid=20, norm=3.0, expand=1.0, strict=False",
        "The range of a weight with the smallest error, weighted by E[x²] of its input channels.",
    ),
    (
        "local_hessian_mse",
        "weights",
        "maxshrink=0.5, patience=5, grid=20, expand=1.0, strict=False",
        "The range of a weight with the smallest output error, as far as a group alone decides it.",
    ),
    ("memoryless_minmax", "weights", "", "Minimum and maximum of the last observed value."),
    (
        "memoryless_mse",
        "weights",
        _SEARCH,
        "The range with the smallest quantization error on the last observed value.",
    ),
    (
        "minmax",
        "activations",
        "averaging_constant=0.01",
        "Moving average of the minimum and maximum of each observed value.",
    ),
    (
        "mse",
        "activations",
        f"{_SEARCH}, averaging_constant=0.01",
        "Moving average of the best range of each observed value.",
    ),
    (
        "nvfp4_expanded_imatrix",
        "weights",
        "maxshrink=0.5555555555555556, patience=1000, grid=200, norm=2.4, expand=1.8, strict=False",
        "The search of `nvfp4_expanded_mse`, weighted as that of `imatrix_mse`.",
    ),
    ("nvfp4_expanded_mse", "weights", _EXPANDED, _EXPANDED_RANGE),
    ("static_minmax", "activations", "", "Minimum and maximum of all observed values."),
)


# Backends of Dynamo by version of torch, without those that packages add.
COMPILERS: dict[str, tuple[str, ...]] = {
    "2.13.0": (
        "aot_eager",
        "aot_eager_decomp_partition",
        "aot_eager_decomp_partition_crossref",
        "aot_eager_decomp_partition_with_mode",
        "aot_eager_default_partitioner",
        "aot_ts",
        "cudagraphs",
        "eager",
        "eager_debug",
        "eager_noexcept",
        "inductor",
        "invoke_subgraph",
        "openxla",
        "openxla_eval",
        "pre_dispatch_eager",
        "ts",
        "tvm",
    )
}


def compiler_names() -> tuple[str, ...]:
    """List the backends that `--compiler` takes. Asks torch if its version is not listed here."""
    listed = COMPILERS.get(version("torch").partition("+")[0])
    if listed is None or "torch" in sys.modules:
        from torch.compiler import list_backends

        return ("auto", *list_backends(exclude_tags=()))
    added = (each.name for each in entry_points(group="torch_dynamo_backends"))
    return ("auto", *sorted({*listed, *added}))


def needs_data(preset: str) -> bool:
    """Return whether a preset observes inputs, as far as that is known without importing."""
    inputs = {name: words for name, _, words in _written_presets() or ()}
    return _observes(inputs.get(preset.upper(), ""))


def _observes(inputs: str) -> bool:
    return inputs.endswith((", static", "dynamic in each group"))


def use_of_data(row: Row) -> str:
    """Say whether a preset, given as a row, needs calibration data."""
    _, weights, inputs = row
    if _observes(inputs):
        return "needed"
    # Weights of few bits take GPTQ.
    return "better" if re.match(r"(int|float)[2-4]\b", weights) else "not needed"


def preset_rows() -> tuple[Row, ...]:
    """List the presets: name, format of weights, format of input activations."""
    written = _written_presets()
    return presets_in_registry() if written is None else written


def observer_rows() -> tuple[Row, ...]:
    """List the observers: name, what they are for, settings, the range they find."""
    return OBSERVERS if _are_observers_as_written() else observers_in_registry()


def preset_names() -> tuple[str, ...]:
    """List the names of presets as far as they are known without importing; empty if not."""
    return tuple(row[0] for row in _written_presets() or ())


def observer_names() -> tuple[str, ...]:
    """List the names of observers as far as they are known without importing; empty if not."""
    return tuple(row[0] for row in OBSERVERS) if _are_observers_as_written() else ()


def presets_in_registry() -> tuple[Row, ...]:
    """List the presets of compressed-tensors and Inlay's own, which takes seconds to import."""
    from inlay.recipe import Recipe, format_in_words
    from inlay.recipe import preset_names as registered

    rows = []
    for name in registered():
        (group,) = Recipe.from_preset(name).config.config_groups.values()
        parts = {"weight": group.weights, "input": group.input_activations}
        words = (format_in_words(args, of) if args else MISSING for of, args in parts.items())
        rows.append((name, *words))
    return tuple(rows)


def observers_in_registry() -> tuple[Row, ...]:
    """List the registered observers, which takes seconds to import."""
    from inlay.observers import Observer

    rows = []
    # The registry writes hyphens and takes either; everywhere else names have underscores.
    for name in sorted(name.replace("-", "_") for name in Observer.registered_names()):
        cls = Observer.get_value_from_registry(name)
        settings = ", ".join(f"{kwarg.name}={kwarg.default}" for kwarg in cls._kwargs)
        about = (cls.__doc__ or "").strip().partition("\n")[0]
        # An observer that keeps only the last value does not suit values that come in batches.
        of_weights = cls.observes_input or not cls._act_sync_dict
        rows.append((name, "weights" if of_weights else "activations", settings, about))
    return tuple(rows)


def _written_presets() -> tuple[Row, ...] | None:
    is_loaded = "compressed_tensors" in sys.modules
    return None if is_loaded else PRESETS.get(version("compressed-tensors"))


def _are_observers_as_written() -> bool:
    if "inlay.observers" in sys.modules:
        return False
    registered = re.compile(r'^@Observer\.register\("(\w+)"\)', re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in _OBSERVERS_FOLDER.glob("*.py"))
    names = {name for text in texts for name in registered.findall(text)}
    return names == {row[0] for row in OBSERVERS}
