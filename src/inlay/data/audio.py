"""Recordings in rows: read from WAV files, or from what datasets decoded."""

import importlib
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from inlay.errors import ConfigurationError

__all__ = ["waveform"]

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of samples, in bytes


def waveform(raw: Any, folder: Path | None, place: str, rate: int) -> torch.Tensor:
    """Return a recording as samples between -1 and 1, of one channel.

    :param raw: a path, or a mapping with `array` and `sampling_rate` as datasets give it
    :param folder: paths are relative to it
    :param rate: samples per second that the model expects
    """
    if isinstance(raw, Mapping) and raw.get("array") is not None:
        found, own = torch.as_tensor(raw["array"], dtype=torch.float32), raw["sampling_rate"]
    else:
        path = raw.get("path") if isinstance(raw, Mapping) else raw
        if not isinstance(path, str):
            raise ConfigurationError(f"{place}: audio is a {type(raw).__name__}, not a path")
        found, own = _read(Path(path) if folder is None else folder / path, place)
    if own != rate:
        raise ConfigurationError(
            f"{place}: the recording has {own:,} samples per second, and the model expects "
            f"{rate:,}; resample it, such as with ffmpeg -i IN -ar {rate} OUT"
        )
    return found


def _read(path: Path, place: str) -> tuple[torch.Tensor, int]:
    if path.suffix.lower() != ".wav":
        return _read_by_library(path, place)
    try:
        with wave.open(str(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data, rate = bytearray(file.readframes(file.getnframes())), file.getframerate()
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigurationError(f"{place}: cannot read {path}: {error}") from error
    if width not in _WIDTHS or not data:
        raise ConfigurationError(
            f"{place}: {path} has {len(data):,} bytes in samples of {width} bytes; use 16 bits"
        )
    samples = torch.frombuffer(data, dtype=_WIDTHS[width]).float()
    if width == 1:  # which has no sign
        samples -= 128
    return samples.reshape(-1, channels).mean(1) / 2 ** (8 * width - 1), rate


def _read_by_library(path: Path, place: str) -> tuple[torch.Tensor, int]:
    try:
        soundfile: Any = importlib.import_module("soundfile")
    except ImportError as error:
        raise ConfigurationError(
            f"{place}: {path.suffix or path.name} needs soundfile: pip install soundfile; or "
            "convert it to .wav"
        ) from error
    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"{place}: cannot read {path}: {error}") from error
    return torch.from_numpy(samples).mean(1), rate
