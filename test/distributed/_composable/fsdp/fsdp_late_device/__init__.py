"""A device that is late, on the CPU. See check.py and docs/late_device.md."""
