"""The ladder: attention optimised step by step, one self-contained kernel per step, checked and measured."""
