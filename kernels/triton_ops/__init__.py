"""The GPU kernels, in Triton.

A file holds one op: contract in the docstring, kernel, launcher. A launcher checks every tensor
before it launches (`checks.py`), takes its tile sizes explicitly, and goes through
`launch.launch`, so that the audit can record what would be launched on tensors without memory and
compile exactly that. Importing a file needs neither a GPU nor Triton; launching needs both, or
Triton's interpreter on a CPU (TRITON_INTERPRET=1, set before the first import, which
tests/conftest.py does).
"""
