"""xformers.version: the version whose interface this is."""

__version__ = "0.0.35"
