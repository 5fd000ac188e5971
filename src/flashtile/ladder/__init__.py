"""The ladder: attention rebuilt step by step, one teaching kernel in one file for each step, and what checks and measures them."""
