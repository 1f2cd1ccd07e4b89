"""Entry point: checks the Python version before importing anything newer.

This file alone keeps to syntax that any Python 3 can parse, so that an old
interpreter gets one clear line instead of a SyntaxError.
"""

import sys


MINIMUM = (3, 10)


def version_error(version, executable):
    """Returns the line that turns down ``version``, or None where it will do."""
    if tuple(version[:2]) >= MINIMUM:
        return None
    return (
        "error: Python {}.{} or newer is needed, and {} is {}.{}; "
        "choose another one with PYTHON3=PATH"
    ).format(*MINIMUM, executable, *version[:2])


if __name__ == "__main__":
    problem = version_error(sys.version_info, sys.executable)
    if problem:
        sys.stderr.write(problem + "\n")
        sys.exit(1)
    try:
        from tools.setup_helpers.cli import main
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted before anything was done\n")
        sys.exit(130)
    sys.exit(main(sys.argv[1:]))
