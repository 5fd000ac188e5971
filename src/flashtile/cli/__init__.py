"""The command line: `flashtile`, also `python -m flashtile`."""
