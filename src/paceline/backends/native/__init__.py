"""The native kernels as a backend: how they are packed for and called."""
