"""
What upstream's developers type, by `make`: `python setup.py develop` builds in place as
`make setup` does, `python setup.py bdist_wheel` writes the wheel as `make wheel` does.
"""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent))

from tools.build import main


COMMANDS = {("develop",): ["setup", "dev"], ("bdist_wheel",): ["wheel"]}

if __name__ == "__main__":
    arguments = COMMANDS.get(tuple(sys.argv[1:]))
    sys.exit(
        main(arguments)
        if arguments
        else "error: pip cannot install files over torch: `make setup` builds in place, "
        "`make wheel` writes a wheel, and `python3 tools/overlay.py` lays the branch over "
        "the torch that is installed"
    )
