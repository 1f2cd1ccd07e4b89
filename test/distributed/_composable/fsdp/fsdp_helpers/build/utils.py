"""A clone of a few files, and a small torch for it."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fsdp_helpers.build import REPOSITORY
from fsdp_helpers.common.utils import ParametrizedTest

from tools.overlay import DIGESTS
from tools.releases import DEFAULT, RELEASES


PACKAGE = "torch/distributed/fsdp/_fully_shard"
REPLACED = [f"{PACKAGE}/__init__.py", f"{PACKAGE}/_fsdp_param_group.py"]
ADDED = [f"{PACKAGE}/_fsdp_layout.py", f"{PACKAGE}/_fsdp_tree.py"]
BESIDE = f"{PACKAGE}/_fsdp_state.py"
OTHER = f"{PACKAGE}/_fully_shard.py"  # not known to the branch
KNOWN = {path: f"origin = 'release: {path}'\n" for path in [*REPLACED, BESIDE]}
VERSION = f"{DEFAULT}+rocm7"  # any build of a release


class ScratchTestCase(ParametrizedTest):
    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name).resolve() / "größe und mehr"
        self.scratch.mkdir()


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def make_clone(root: Path) -> None:
    """Writes files of ours, the digests of those that they replace, and the tools."""
    for name in ("tools", "constraints"):
        shutil.copytree(REPOSITORY / name, root / name)
    write(root, {p: f"origin = 'branch: {p}'\n" for p in [*REPLACED, *ADDED]})
    digests = {p: hashlib.sha256(t.encode()).hexdigest() for p, t in KNOWN.items()}
    write(root, {DIGESTS: json.dumps(dict.fromkeys(RELEASES, digests))})


def make_site(site: Path, version: str = VERSION) -> Path:
    """Writes a torch as it is installed; returns its folder of metadata."""
    dist_info = f"torch-{version}.dist-info"
    files = KNOWN | {
        OTHER: "",
        "torch/__init__.py": "from torch.version import __version__\n",
        "torch/distributed/__init__.py": "",
        "torch/distributed/fsdp/__init__.py": "",
        "torch/version.py": f"__version__ = '{version}'\ndebug = False\n",
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: torch\n"
        f"Version: {version}\n\nVersion: of another line\n",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
        "Tag: py3-none-any\n",
    }
    rows = [f"{p},sha256={encoded(t.encode())},{len(t)}\n" for p, t in files.items()]
    write(
        site, files | {f"{dist_info}/RECORD": f"{''.join(rows)}{dist_info}/RECORD,,\n"}
    )
    return site / dist_info


def encoded(data: bytes) -> str:
    """Returns a digest as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def make_wheel(folder: Path, version: str = VERSION) -> Path:
    make_site(folder / version, version)
    run(sys.executable, "-m", "wheel", "pack", "--dest", folder, folder / version)
    return next(folder.glob(f"torch-{version}-*.whl"))


def run(*command: object, status: int = 0, **options: Any) -> str:
    """Returns what a command prints, which is to end with ``status``."""
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def git(folder: Path, *arguments: object) -> str:
    return run("git", "-C", folder, *arguments)


def commit_all(folder: Path) -> None:
    """Makes a repository of a folder."""
    git(folder, "init", "--quiet")
    git(folder, "config", "user.name", "a")
    git(folder, "config", "user.email", "a@b")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all of it")
