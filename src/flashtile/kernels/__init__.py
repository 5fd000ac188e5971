"""The kernels that there are, what they take and how they are launched: attention knowledge, no compiler knowledge."""
