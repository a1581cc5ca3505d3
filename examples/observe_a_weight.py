"""Which scales quantize this weight with the least loss?"""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize

from inlay import Observer

torch.manual_seed(0)
weight = torch.randn(256, 512)
args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
for name in ("memoryless_minmax", "memoryless_mse"):
    observer = Observer.load_from_registry(name, base_name="weight", args=args)
    qparams = observer(weight).get_qparams()
    restored = fake_quantize(weight, qparams["scale"], qparams["zero_point"], args)
    print(f"{name}: error {(restored - weight).norm() / weight.norm():.4f}")
