"""Find the range in which a value is quantized.

`RangeSearch` shrinks the observed range step by step and keeps, for each group, the candidate with
the smallest error. `RangeSearch.specification` defines the result, with the arithmetic of
compressed-tensors, one candidate at a time. Three faster forms find the same:

- In a traced graph, all candidates are one expression (`candidates`), without branches on data.
- Large weights run the same expression as a kernel, compiled once per format (`kernels`).
- A whole activation is counted once into bins that bound all errors (`estimates`). Candidates that
  the bounds do not settle are computed as defined.

`ClipSearch` judges thresholds from a histogram of all batches instead (`clipping`).
"""

__all__: list[str] = []
