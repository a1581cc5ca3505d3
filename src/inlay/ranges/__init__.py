"""Find ranges: searches over candidates, histograms, and the arithmetic behind them."""

__all__: list[str] = []
