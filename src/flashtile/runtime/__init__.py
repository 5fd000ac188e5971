"""Compiler and driver: from CUDA C++ text to a loaded kernel and its launch. Knows nothing of attention."""
