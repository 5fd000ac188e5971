"""The ways to compute attention, and the choice among them (registry.py)."""
