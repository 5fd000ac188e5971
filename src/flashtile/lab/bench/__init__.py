"""The benchmark: our backends and their peers on the same inputs, interleaved in one run. Method: docs/bench.md."""
