import os

import hypothesis
import torch

# One example per law compiles or searches for a while; time is judged by the benchmarks, not here.
hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
# The same examples on every run: a change is not held up by an old bug found by chance.
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=60, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# Two processes share two cores, so each has one.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
