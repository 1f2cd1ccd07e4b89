"""What tests of the build and of the tools share; and the tools can be imported."""

import sys
from pathlib import Path


REPOSITORY = Path(__file__).absolute().parents[6]
# Only pytest has the clone's root on the path
sys.path.append(str(REPOSITORY))
