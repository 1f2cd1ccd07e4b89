# Owner(s): ["oncall: distributed"]
"""Set-up, wheels and CMake, with pip itself, a small torch and no network."""

import os
import shutil
import sys
import unittest
from pathlib import Path

import pytest

from fsdp_helpers.build import REPOSITORY, utils

from tools.build import LABEL
from tools.releases import DEFAULT, NEWEST
from torch.testing._internal.common_utils import run_tests


pytestmark = [pytest.mark.tools, pytest.mark.timeout(600)]


SHOW = f"import {utils.REPLACED[1][:-3].replace('/', '.')} as m; print(m.origin)"


class BuildTestCase(utils.ScratchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.root = self.scratch / "clone"
        utils.make_clone(self.root)
        for name in ("Makefile", "setup.py"):
            shutil.copy(REPOSITORY / name, self.root)
        groups = "".join(f"{name} = [\n]\n" for name in ("train", "models", "clients"))
        utils.write(self.root, {"requirements.txt": "", "pyproject.toml": groups})
        self.wheel = utils.make_wheel(self.scratch)
        inherited = ("TORCH_", "PIP_")  # as continuous integration sets constraints
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
        self.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.scratch.as_uri()}
        self.env |= {"PYTHON3": sys.executable, "PIP_CONFIG_FILE": os.devnull}

    def make(self, *arguments: object, status: int = 0) -> str:
        env = self.env
        return utils.run("make", "-C", self.root, *arguments, status=status, env=env)

    def shown(self, python: str | Path = ".venv/bin/python", path: str = "") -> str:
        """Returns whose file an environment of the clone imports."""
        env = {k: v for k, v in self.env.items() if k != "PYTHONPATH"}
        env |= {"PYTHONPATH": path} if path else {}
        found = utils.run(self.root / python, "-c", SHOW, cwd=self.root, env=env)
        return found.partition(":")[0]


class TestSetUp(BuildTestCase):
    def test_imports_the_branch_and_with_a_path_the_release(self):
        self.assertIn("imports the branch", self.make("setup"))
        self.assertEqual(self.shown(), "branch")
        self.assertEqual(self.shown(path="build/base"), "release")
        self.assertEqual(self.shown(path=str(self.root / "build/base")), "release")
        utils.write(self.root, {utils.REPLACED[1]: "origin = 'edited'\n"})
        self.assertEqual(self.shown().strip(), "edited")
        # A new file at the next set-up, which asks pip for nothing
        new = f"{Path(utils.ADDED[0]).parent}/_fsdp_new.py"
        utils.write(self.root, {new: ""})
        text = utils.run(
            sys.executable, "setup.py", "develop", cwd=self.root, env=self.env
        )
        self.assertEqual(text, "")
        tree = self.root / "build" / DEFAULT / "branch"
        self.assertTrue((tree / new).is_symlink())
        utils.write(tree, {f"{new}x": "somebody's"})
        self.assertIn("move it to its place in the clone", self.make("setup", status=2))
        self.make("clean")
        self.assertFalse((self.root / ".venv").is_symlink())
        self.assertFalse((self.root / "build").exists())

    def test_what_was_cut_off_is_made_anew(self):
        self.make("setup")
        home = self.root / "build" / DEFAULT
        (home / "setup.json").unlink()
        shutil.rmtree(next(home.glob(".venv/lib/*/site-packages/torch/distributed")))
        self.assertIn("imports the branch", self.make("setup"))
        self.assertEqual(self.shown(), "branch")

    def test_groups_are_installed_once_and_stay(self):
        self.assertIn("pip installs", self.make("models"))
        self.assertNotIn("pip installs", self.make("setup"))
        groups = 'train = [\n]\nmodels = [\n    "no-such-package",\n]\n'
        utils.write(self.root, {"pyproject.toml": groups})
        self.assertIn("no-such-package", self.make("setup", status=2))

    def test_clients_over_the_environment(self):
        clients = f"build/{DEFAULT}/.venv/clients"
        setup = (sys.executable, "-B", "-m", "tools.build", "setup", "clients")
        for _ in range(2):
            text = utils.run(*setup, cwd=self.root, env=self.env)
        self.assertEqual(text, "")
        self.assertEqual(self.shown(f"{clients}/bin/python"), "branch")
        self.assertEqual(self.shown(f"{clients}/bin/python", "build/base"), "release")

    def test_a_wheel_from_the_disk(self):
        folder = self.scratch / "elsewhere"
        folder.mkdir()
        wheel = utils.make_wheel(folder, f"{NEWEST}+local")
        text = self.make("setup", f"TORCH_WHEEL={wheel}", status=2)
        self.assertIn("conflicting dependencies", text)
        named = (f"TORCH_WHEEL={wheel}", f"RELEASE={NEWEST}")
        self.make("setup", *named)
        # It stays until another is named
        self.assertNotIn("pip", self.make("setup", f"RELEASE={NEWEST}"))
        self.assertEqual(self.shown(f"build/{NEWEST}/.venv/bin/python"), "branch")
        self.assertFalse((self.root / ".venv").exists())


class TestWheel(BuildTestCase):
    def setUp(self) -> None:
        super().setUp()
        # With the `wheel` of these tests
        (self.root / "build/wheel").mkdir(parents=True)
        (self.root / "build/wheel/.venv").symlink_to(sys.prefix)

    def test_installed_elsewhere(self):
        version = f"{utils.VERSION}.{LABEL}"
        self.make("wheel")
        found = next((self.root / "build/dist").glob("*.whl"))
        self.assertEqual(found.name, f"torch-{version}-py3-none-any.whl")
        before = found.read_bytes()
        self.make("wheel", f"TORCH_WHEEL={self.wheel}")
        self.assertEqual(found.read_bytes(), before)
        venv = self.scratch / "venv"
        utils.run(sys.executable, "-m", "venv", venv)
        torch = (f"torch=={DEFAULT}", found)
        utils.run(venv / "bin/python", "-m", "pip", "install", *torch, env=self.env)
        self.assertEqual(self.shown(venv / "bin/python"), "branch")
        code = "import torch, importlib.metadata as m; "
        code += "print(torch.__version__, m.version('torch'))"
        text = utils.run(venv / "bin/python", "-c", code, cwd="/")
        self.assertEqual(text.split(), [version] * 2)

    def test_vendors_changes_are_not_dropped(self):
        site = self.scratch / "vendor"
        utils.make_site(site, utils.VERSION)
        utils.write(site, {utils.BESIDE: "a vendor's"})
        utils.run(sys.executable, "-m", "wheel", "pack", "--dest", self.scratch, site)
        text = self.make("wheel", f"TORCH_WHEEL={self.wheel}", status=2)
        self.assertIn(f"{utils.BESIDE} is not the release's", text)
        text = self.make("wheel", "TORCH_WHEEL=", f"RELEASE={NEWEST}", status=2)
        self.assertIn(f"torch=={NEWEST}", text)


class TestCMake(utils.ScratchTestCase):
    @unittest.skipUnless(shutil.which("cmake"), "needs CMake: pip install cmake")
    def test_says_where_the_build_is(self):
        text = utils.run("cmake", "-S", REPOSITORY, "-B", self.scratch)
        self.assertIn(f"{REPOSITORY}/.venv/bin/python", " ".join(text.split()))


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
