"""Observers turn observed values into statistics, and statistics into scales."""

import importlib
import pkgutil

from inlay.observers.base import (
    MinMaxTuple,
    Observer,
    QParamsDict,
    default_observer,
    require_finite,
)
from inlay.observers.channels import ChannelRangeObserver
from inlay.observers.helpers import (
    FUSED_LAYER_NAMES,
    flatten_for_calibration,
    fuse_weight_observers,
    fusion_problem,
    has_global_scale,
    lerp,
)
from inlay.observers.hessian import HeldOutHessianObserver, HessianObserver
from inlay.observers.histogram import HistogramObserver
from inlay.observers.imatrix import IMatrixMSEObserver, NVFP4ExpandedIMatrixObserver
from inlay.observers.measuring import MeasuringObserver
from inlay.observers.min_max import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    StaticMinMaxObserver,
)
from inlay.observers.mse import (
    FourOverSixObserver,
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    NVFP4ExpandedMSEObserver,
)
from inlay.observers.sync import sync_observers

__all__ = [
    "FUSED_LAYER_NAMES",
    "ChannelRangeObserver",
    "FourOverSixObserver",
    "HeldOutHessianObserver",
    "HessianObserver",
    "HistogramObserver",
    "IMatrixMSEObserver",
    "MeasuringObserver",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MinMaxTuple",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "QParamsDict",
    "StaticMinMaxObserver",
    "default_observer",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "fusion_problem",
    "has_global_scale",
    "lerp",
    "require_finite",
    "sync_observers",
]

# Every observer of this folder is registered, also those that nobody imports by name.
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
