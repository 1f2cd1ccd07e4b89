"""A device that is late, on the CPU. See check.py and docs/architecture.md."""
