"""
A wheel of a few files, shaped as the release's, and a repository that has one file of
ours.

Nothing here needs the network: pip is a stand-in, and the environments that are
made hold no pip.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

from fsdp_build import REPOSITORY

from tools.setup_helpers import cli, environment
from tools.setup_helpers.build import Build
from tools.setup_helpers.releases import DEFAULT, Release, RELEASES, VARIABLE
from tools.setup_helpers.report import Progress
from torch.testing._internal.common_utils import TestCase


OURS = "torch/distributed/fsdp/ours.py"
# Each with what it stands for, in the order in which pip is handed them.
REQUIREMENTS = {
    "requirements-examples.txt": "tqdm\n",
    "requirements.txt": "pytest\n",
    "requirements-models.txt": "transformers\n",
    "requirements-clients.txt": "torchtitan\n",
}
# Of each release but for its number: what it requires, and what set-up adds
NEEDED = ["filelock", 'optree; extra == "optree"']
*OUR_LISTS, MODELS, CLIENTS = REQUIREMENTS
VERSIONS = [release.version for release in RELEASES]
RELEASE_FILES = {
    "functorch/__init__.py": "",
    "torch/__init__.py": "from torch.version import __version__\n",
    "torch/bin/tool": "#!/bin/sh\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/fsdp/__init__.py": "",
    "torch/distributed/fsdp/ours.py": "origin = 'release'\n",
    "torch/distributed/fsdp/theirs.py": "origin = 'release'\n",
    "torch/distributed/run.py": "def main():\n    print('running')\n",
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "origin = 'release'\n",
    "torchgen/__init__.py": "",
}


def make_wheel(
    folder: Path,
    *,
    project: str = "torch",
    version: str = f"{DEFAULT.version}+fake",
    tag: str = "py3-none-any",
    files: dict[str, str] | None = None,
) -> Path:
    """Writes a wheel of a few files, shaped as a release's."""
    dist_info = f"{project}-{version}.dist-info"
    contents = {
        **RELEASE_FILES,
        "torch/version.py": f"__version__ = '{version}'\n",
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\n"
        f"Version: {version}\nRequires-Dist: filelock\n"
        'Requires-Dist: optree; extra == "optree"\n',
        f"{dist_info}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
        f"{dist_info}/entry_points.txt": "[console_scripts]\n"
        "torchrun = torch.distributed.run:main\n",
        **(files or {}),
    }
    record = "".join(
        f"{name},sha256={digest_of(text)},{len(text)}\n"
        for name, text in contents.items()
    )
    contents[f"{dist_info}/RECORD"] = record + f"{dist_info}/RECORD,,\n"
    path = folder / f"{project}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            info = zipfile.ZipInfo(name)
            mode = 0o755 if name.startswith("torch/bin/") else 0o644
            info.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(info, text)
    return path


def digest_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class FakePip:
    """Stands in for pip: serves one wheel, and notes what it is asked for."""

    def __init__(self, served: Path) -> None:
        self.served = served
        self.downloads: list[str] = []
        self.installs: list[list[str]] = []
        self.fails_with: BaseException | None = None

    def download(self, requirement: str, folder: Path) -> None:
        self.downloads.append(requirement)
        shutil.copy(self.served, folder)

    def install(self, requirements: list[str], *files: Path) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.installs.append([*requirements, *(file.name for file in files)])


def disk_with(free: int) -> contextlib.AbstractContextManager:
    """Lets the disk have ``free`` bytes, whatever it has."""
    return mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=free))


def make_bare_venv(_: Path | str, module: str, *arguments: str) -> None:
    """Stands in for the modules that make an environment."""
    folder = Path(arguments[-1])
    version = f"python3.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages").mkdir(parents=True, exist_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "bin" / "python").symlink_to(sys.executable)


class BuildTestCase(TestCase):
    """A repository with one file of ours, a wheel, and stand-ins for pip and venv."""

    venv_is_real = False
    venv_has_pip = False
    clone_name = "clone"
    # Of the release that the test is about
    version = DEFAULT.version

    def setUp(self) -> None:
        super().setUp()
        scratch = self.enterContextOf(tempfile.TemporaryDirectory())
        self.scratch = Path(scratch).resolve()
        self.enterContextOf(mock.patch.dict(os.environ))
        self.enterContextOf(disk_with(1_000_000_000_000))
        if not self.venv_is_real:
            bare = mock.patch.object(environment, "_make_venv", make_bare_venv)
            self.enterContextOf(bare)
        for name in [n for n in os.environ if n.startswith(("GIT_", "TORCH_"))]:
            del os.environ[name]
        self.root = self.scratch / self.clone_name
        self.wheel = make_wheel(self.scratch)
        self.pip = FakePip(self.wheel)
        self.put(OURS, "origin = 'ours'\n")
        for name, text in REQUIREMENTS.items():
            self.put(name, text)
        self.put(".gitignore", (REPOSITORY / ".gitignore").read_text())
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.commit()

    def enterContextOf(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def choose(self, version: str) -> None:
        """Makes the test one of another release, as RELEASE= does."""
        self.version = os.environ[VARIABLE] = version
        self.wheel = make_wheel(self.scratch, version=f"{version}+fake")
        self.pip.served = self.wheel

    @property
    def home(self) -> Path:
        return self.root / "build" / self.version

    @property
    def branch(self) -> Path:
        return self.home / "branch"

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True
        ).stdout

    def commit(self) -> None:
        self.git("commit", "--quiet", "--message", "step")

    def build(
        self, progress: Progress | None = None, release: Release | None = None
    ) -> Build:
        (named,) = (r for r in RELEASES if r.version == self.version)
        return Build(
            self.root,
            progress or Progress(quiet=True),
            release or named,
            make_pip=lambda python, progress: self.pip,
            venv_has_pip=self.venv_has_pip,
        )

    def set_up(self, given: Path | None = None) -> bool:
        return self.build().set_up(given)

    def run_command(self, *arguments: str, given: Path | None = None):
        """Returns exit status, stdout and stderr of a command of the tool."""
        if given:
            os.environ["TORCH_WHEEL"] = str(given)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = cli.main(list(arguments), self.build)
        return status, stdout.getvalue(), stderr.getvalue()

    def links(self) -> dict[str, str]:
        """Returns where each link of the tree leads, as seen from the clone."""
        return {
            path.relative_to(self.branch).as_posix(): os.path.relpath(
                path.resolve(strict=True), self.root
            )
            for path in self.branch.rglob("*")
            if path.is_symlink()
        }

    def links_to_ours(self) -> set[str]:
        return {path for path, target in self.links().items() if path == target}

    def state(self) -> dict[str, object]:
        """Returns what there is on the disk, to tell whether it changed."""
        paths = [p for p in self.root.rglob("*") if "__pycache__" not in p.parts]
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino)
            for path in paths
            if path.is_symlink() or not (path.is_dir() or ".git" in path.parts)
        }

    def untracked(self) -> str:
        return self.git("status", "--porcelain", "--ignored")

    def run_python(self, *arguments: str | Path, **options) -> str:
        command = [self.home / ".venv/bin/python", "-B", *arguments]
        done = subprocess.run(
            command, **({"cwd": self.scratch} | options), capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def assert_one_error(self, result, text: str) -> None:
        status, _, stderr = result
        self.assertEqual(status, 1)
        self.assertEqual(stderr.count("\n"), 1, stderr)
        self.assertTrue(stderr.startswith("error: "), stderr)
        self.assertIn(text, stderr)

    def assert_untouched(self) -> None:
        self.assertEqual(self.untracked(), "")

    def leftovers(self) -> list[str]:
        left = [*self.root.rglob("*.partial"), *self.root.rglob(".staging")]
        return [str(path) for path in left]
