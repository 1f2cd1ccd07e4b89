"""
What Python runs at its start where this folder is on its path, as the tests put it.

An import of torch makes objects in great number, and all of them stay. Python looks for
garbage among them time and again, and once more at the end: a third of what a process
takes that only imports torch and its compiler.
"""

import atexit
import gc


gc.set_threshold(10_000, 20, 100)
atexit.register(gc.freeze)
