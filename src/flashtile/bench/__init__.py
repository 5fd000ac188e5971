"""The benchmark: ours and its peers on the same inputs, side by side in one run. docs/bench.md says how it measures."""
