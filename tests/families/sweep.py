"""Check every causal language model that transformers has, shrunk by a rule: `make sweep`.

Each runs in a process of its own. A model is right if its statistics are those of eager observers,
its quantized graph computes what compressed-tensors does, and its checkpoint loads back.
"""

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


def check(name: str) -> tuple[str, str]:
    """Return the outcome for a type; runs in a process of its own."""
    import torch
    import transformers
    from outcomes import outcome_of

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return outcome_of(name)


def sweep(names: list[str], processes: int) -> Counter[str]:
    """Check models in processes of their own, and print each outcome."""
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=None) as pool:
        futures = {pool.submit(check, name): name for name in names}
        for future in as_completed(futures):
            error = future.exception()
            outcome, words = ("crashed", str(error)) if error else future.result()
            counts[outcome] += 1
            if outcome != "right" or words:
                print(f"{outcome:10}{futures[future]}: {words}", flush=True)
    return counts


def main() -> None:
    from outcomes import OUTCOMES
    from shrinking import names

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    began = time.perf_counter()
    counts = sweep(given.names or names(), given.processes)
    built = sum(counts.values()) - counts["not built"]
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    print(f"{counts['right'] / built:.1%} of {built} right, {time.perf_counter() - began:.0f} s")
    if counts["wrong"] or counts["crashed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
