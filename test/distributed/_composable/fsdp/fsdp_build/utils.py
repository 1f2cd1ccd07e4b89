"""
What the tests of the build and of the tools share: a wheel of a few files, shaped
as the base's, and a repository that has one file of ours.

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
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

from tools.setup_helpers import cli, inplace
from tools.setup_helpers.report import Progress
from torch.testing._internal.common_utils import TestCase


REPOSITORY = Path(cli.__file__).parents[2]
OURS = "torch/distributed/fsdp/ours.py"
# Each with what it stands for, in the order in which pip is handed them.
REQUIREMENTS = {
    "requirements-examples.txt": "tqdm\n",
    "requirements.txt": "pytest\n",
    "requirements-models.txt": "transformers\n",
    "requirements-clients.txt": "torchtitan\n",
}
BASE_FILES = {
    "functorch/__init__.py": "",
    "torch/__init__.py": "from torch.version import __version__\n",
    "torch/bin/tool": "#!/bin/sh\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/fsdp/__init__.py": "",
    "torch/distributed/fsdp/ours.py": "origin = 'base'\n",
    "torch/distributed/fsdp/theirs.py": "origin = 'base'\n",
    "torch/distributed/run.py": "def main():\n    print('running')\n",
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "origin = 'base'\n",
    "torchgen/__init__.py": "",
}


def make_wheel(
    folder: Path,
    *,
    project: str = "torch",
    version: str = "2.13.0+fake",
    tag: str = "py3-none-any",
    files: dict[str, str] | None = None,
) -> Path:
    """Writes a wheel of a few files, shaped as the base's."""
    dist_info = f"{project}-{version}.dist-info"
    contents = {
        **BASE_FILES,
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


class BuildTestCase(TestCase):
    """A repository with one file of ours, a wheel, and a stand-in for pip."""

    venv_has_pip = False
    clone_name = "clone"

    def setUp(self) -> None:
        super().setUp()
        scratch = self.enterContextOf(tempfile.TemporaryDirectory())
        self.scratch = Path(scratch).resolve()
        self.enterContextOf(mock.patch.dict(os.environ))
        self.enterContextOf(disk_with(1_000_000_000_000))
        for name in [n for n in os.environ if n.startswith(("GIT_", "TORCH_BASE"))]:
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

    def build(self, progress: Progress | None = None) -> inplace.InPlaceBuild:
        return inplace.InPlaceBuild(
            self.root,
            progress or Progress(quiet=True),
            make_pip=lambda python, progress: self.pip,
            venv_has_pip=self.venv_has_pip,
        )

    def set_up(self, given: Path | None = None) -> bool:
        return self.build().set_up(given)

    def run_command(self, *arguments: str, given: Path | None = None):
        """Returns exit status, stdout and stderr of a command of the tool."""
        if given:
            os.environ["TORCH_BASE_WHEEL"] = str(given)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = cli.main(list(arguments), self.build)
        return status, stdout.getvalue(), stderr.getvalue()

    def links(self) -> set[str]:
        found = set()
        for parent, folders, files in os.walk(self.root):
            for name in folders + files:
                path = Path(parent, name)
                if path.is_symlink():
                    found.add(path.relative_to(self.root).as_posix())
            folders[:] = [f for f in folders if f not in (".git", ".venv", "build")]
        return found

    def state(self) -> dict[str, object]:
        """Returns what there is on the disk, to tell whether it changed."""
        paths = [p for p in self.root.rglob("*") if "__pycache__" not in p.parts]
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino)
            for path in paths
            if path.name == "exclude" or not (path.is_dir() or ".git" in path.parts)
        }

    def untracked(self) -> str:
        return self.git("status", "--porcelain", "--ignored")

    def run_python(self, code: str) -> str:
        python = self.root / ".venv" / "bin" / "python"
        return subprocess.run(
            [python, "-B", "-c", code],
            cwd=self.scratch,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def assert_one_error(self, result, text: str) -> None:
        status, _, stderr = result
        self.assertEqual(status, 1)
        self.assertEqual(stderr.count("\n"), 1, stderr)
        self.assertTrue(stderr.startswith("error: "), stderr)
        self.assertIn(text, stderr)

    def assert_untouched(self) -> None:
        self.assertEqual(self.untracked(), "")
        exclude = (self.root / ".git/info/exclude").read_text()
        self.assertNotIn("in-place build", exclude)
