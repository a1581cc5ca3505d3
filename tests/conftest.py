import os

# Some virtual machines announce AMX and cannot execute it: a product in bfloat16 would end the
# process with an illegal instruction. oneDNN reads this when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import hypothesis
import torch

# One example per law compiles or searches for a while; time is judged by the benchmarks, not here.
hypothesis.settings.register_profile(
    "same", deadline=None, max_examples=60, derandomize=True, print_blob=True, database=None
)
# For whoever looks for news: other examples on every run, and many more of them.
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("INLAY_EXAMPLES", "same"))

# Two processes share two cores, so each has one.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
