# Owner(s): ["oncall: distributed"]
"""The in-place build, on a small wheel and repository made up for each test."""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import importlib.util
import io
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from fsdp_build import REPOSITORY
from fsdp_build.utils import (
    BuildTestCase,
    CLIENTS,
    DEFAULT,
    disk_with,
    make_wheel,
    MODELS,
    NEEDED,
    OUR_LISTS,
    OURS,
    RELEASE_FILES,
    REQUIREMENTS,
    VERSIONS,
)

from tools.setup_helpers import __main__ as entry
from tools.setup_helpers import editable, environment, wheel
from tools.setup_helpers.releases import known, VARIABLE
from tools.setup_helpers.report import Progress, SetupError
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.tools


OTHER = VERSIONS[-1]
FUNCTIONAL = "torch/nn/functional.py"
THEIRS = "torch/distributed/fsdp/theirs.py"
# What is a link in the tree, and of the release
LINKS = {
    "functorch",
    "torch/__init__.py",
    "torch/bin",
    "torch/distributed/__init__.py",
    "torch/distributed/fsdp/__init__.py",
    THEIRS,
    "torch/distributed/run.py",
    "torch/nn",
    "torch/version.py",
    "torchgen",
}
WHICH = "import torch.distributed.fsdp.ours as o; print(o.origin, o.__file__)"
FORKED = f"""
import multiprocessing
def main():
    {WHICH}
if __name__ == "__main__":
    child = multiprocessing.get_context("forkserver").Process(target=main)
    child.start()
    child.join()
"""


@instantiate_parametrized_tests
class TestTree(BuildTestCase):
    """The same for each release, the default one among them."""

    def of_release(self, *paths: str) -> dict[str, str]:
        return {path: f"build/{self.version}/base/{path}" for path in paths}

    @parametrize("version", VERSIONS)
    def test_links_to_the_release_and_to_ours(self, version: str):
        self.choose(version)
        self.set_up()
        dist_info = f"torch-{version}+fake.dist-info"
        self.assertEqual(
            self.links(), self.of_release(*LINKS, dist_info) | {OURS: OURS}
        )
        # Nothing but what git ignores as a whole is in the clone
        ignored = "!! .venv\n" * (version == DEFAULT.version) + "!! build/\n"
        self.assertEqual(self.untracked(), ignored)
        self.assertEqual([*(self.root / "torch").rglob("*.py")], [self.root / OURS])

    def test_default_has_short_names(self):
        self.set_up()
        for name, place in ((".venv", ".venv"), ("build/base", "base")):
            self.assertEqual((self.root / name).resolve(), self.home / place)
        before = self.state()
        self.choose(OTHER)
        self.set_up()
        self.assertEqual(self.state() | before, self.state())

    def test_release_is_pristine_and_read_only(self):
        self.set_up()
        unpacked = self.root / "build/base"
        for name, text in RELEASE_FILES.items():
            mode = stat.S_IMODE((unpacked / name).stat().st_mode)
            self.assertEqual((unpacked / name).read_text(), text)
            self.assertFalse(mode & 0o222, name)
            self.assertEqual(bool(mode & 0o100), name == "torch/bin/tool")

    def test_second_run_changes_nothing(self):
        for version in VERSIONS:
            self.choose(version)
            self.assertTrue(self.set_up())
        before = self.state()
        for version in VERSIONS:
            self.choose(version)
            self.assertIn("up to date", self.run_command("setup")[1])
        self.assertEqual(self.state(), before)
        self.assertEqual(self.pip.downloads, [f"torch=={v}" for v in VERSIONS])
        self.assertEqual(self.pip.installs, [[*NEEDED, *OUR_LISTS]] * len(VERSIONS))

    def test_edits_count_at_once_and_new_files_at_the_next_set_up(self):
        self.set_up()
        self.put(OURS, "origin = 'edited'\n")
        self.assertEqual((self.branch / OURS).read_text(), "origin = 'edited'\n")
        self.assertFalse(self.set_up())
        added = {FUNCTIONAL, "torch/nn/more/new.py", "torch/new.py", "torch/version.py"}
        for path in added:
            self.put(path, "origin = 'new'\n")
        self.assertTrue(self.set_up())
        self.assertEqual(self.links_to_ours(), {OURS, *added})
        rest = self.of_release("torch/nn/__init__.py")
        self.assertEqual(self.links() | rest, self.links())
        text = (self.root / "build/base" / FUNCTIONAL).read_text()
        self.assertEqual(text, "origin = 'release'\n")
        self.git("add", "--all")
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual({*staged}, {OURS, *added})
        self.assertFalse(self.set_up())

    def test_files_that_go(self):
        self.test_edits_count_at_once_and_new_files_at_the_next_set_up()
        self.git("rm", "--quiet", "-f", OURS, FUNCTIONAL)
        shutil.rmtree(self.root / "torch/nn/more")
        self.set_up()
        self.assertEqual(self.links_to_ours(), {"torch/new.py", "torch/version.py"})
        gone = self.of_release("torch/nn", "torch/distributed")
        self.assertEqual(self.links() | gone, self.links())

    def test_bytecode_is_nobodys(self):
        self.set_up()
        for place in (self.root, self.branch):
            cache = place / "torch/distributed/__pycache__"
            cache.mkdir()
            (cache / "a.pyc").touch()
        (self.home / "base/torch/nn/__pycache__").mkdir()
        (self.home / "base/torch/nn/__pycache__/a.pyc").touch()
        self.assertFalse(self.set_up())

    def test_lost_links_are_laid_again(self):
        self.set_up()
        before = self.links()
        (self.branch / "torch/version.py").unlink()
        (self.branch / "torchgen").unlink()
        (self.branch / "torchgen").symlink_to("../base/functorch")
        self.assertTrue(self.set_up())
        self.assertEqual(self.links(), before)

    @parametrize("command", ["setup", "clean"])
    @parametrize("path", [OURS, "torch/distributed/new.py", "torch/nn/new.py"])
    def test_file_written_in_the_tree_is_not_lost(self, command: str, path: str):
        """In a link's place, in a folder of the tree, in one that is the release's."""
        self.set_up()
        (self.branch / path).unlink(missing_ok=True)
        (self.branch / path).write_text("mine\n")
        before = self.state()
        self.assert_one_error(self.run_command(command), f"{path} is no")
        self.assertEqual(self.state(), before)
        self.assertEqual((self.branch / path).read_text(), "mine\n")
        self.put(path, "mine\n")
        (self.branch / path).unlink()
        self.assertEqual(self.run_command(command)[0], 0)
        self.assertEqual((self.root / path).read_text(), "mine\n")

    def test_without_git(self):
        shutil.rmtree(self.root / ".git")
        self.set_up()
        self.assertEqual(self.links_to_ours(), {OURS})

    def test_clone_that_would_hide_the_release(self):
        """As those do that an earlier set-up laid links into."""
        self.put("torch/__init__.py", "")
        result = self.run_command("setup")
        self.assert_one_error(result, "torch/__init__.py is there, and would hide")
        self.assertFalse((self.root / "build").exists())


@instantiate_parametrized_tests
class TestImports(BuildTestCase):
    """The clone's `torch/` is no package: it hides nothing, whatever runs there."""

    venv_is_real = True

    def setUp(self) -> None:
        super().setUp()
        for name in [name for name in os.environ if name.startswith("PYTHON")]:
            del os.environ[name]

    @parametrize("version", (DEFAULT.version, OTHER))
    def test_environment_imports_the_tree(self, version: str):
        self.choose(version)
        self.set_up()
        code = f"""{WHICH}
from importlib.metadata import version
import torch
from torch.distributed.fsdp import theirs
print(torch.__version__, version('torch'), theirs.origin)"""
        number = f"{version}+fake"
        self.assertEqual(
            self.run_python("-c", code).split(),
            ["ours", str(self.branch / OURS), number, number, "release"],
        )
        torchrun = self.home / ".venv/bin/torchrun"
        self.assertEqual(subprocess.check_output([torchrun], text=True), "running\n")

    @parametrize(
        "arguments",
        [("-c", WHICH), ("script.py",), ("-m", "script"), ("forked.py",)],
        name_fn=lambda arguments: "_".join(arguments).strip("-").replace(".", "_")[:9],
    )
    def test_from_the_root_of_the_clone(self, arguments: tuple[str, ...]):
        self.set_up()
        self.put("script.py", WHICH)
        self.put("forked.py", FORKED)
        self.assertEqual(
            self.run_python(*arguments, cwd=self.root),
            f"ours {self.branch / OURS}",
        )
        # And the release, as the README has it
        env = os.environ | {"PYTHONPATH": "build/base"}
        self.assertEqual(
            self.run_python(*arguments, cwd=self.root, env=env),
            f"release {self.root / 'build/base' / OURS}",
        )

    def test_from_the_root_of_the_clone_by_pytest(self):
        """Which puts that folder on the path, as `python -m` does."""
        self.set_up()
        self.put("conftest.py", "")
        test = f"def test_it():\n    {WHICH}\n    assert o.origin == 'ours'\n"
        self.put("test_it.py", test)
        command = [sys.executable, "-B", "-m", "pytest", "-q"]
        for tree, expected in ((self.branch, 0), (self.home / "base", 1)):
            env = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(command, cwd=self.root, env=env, capture_output=True)
            self.assertEqual(done.returncode, expected, done.stdout)


class TestClean(BuildTestCase):
    def test_leaves_the_clone_as_it_was(self):
        before = self.state()
        for version in VERSIONS:
            self.choose(version)
            self.set_up()
        for cache in ("test/__pycache__/a.pyc", ".hypothesis/a", "a.egg-info/a"):
            self.put(cache, "")
        self.put("build/train/loss.png", "")
        del os.environ[VARIABLE]
        self.assertEqual(self.run_command("clean")[::2], (0, ""))
        self.assert_untouched()
        self.assertEqual(self.state(), before)

    def test_removes_the_release_that_is_named(self):
        for named in VERSIONS:
            for version in VERSIONS:
                self.choose(version)
                self.set_up()
            self.choose(named)
            self.assertEqual(self.run_command("clean")[::2], (0, ""))
            self.assertFalse(self.home.exists())
            is_there = os.path.lexists(self.root / ".venv")
            self.assertEqual(is_there, named != DEFAULT.version)
            before = self.state()
            for version in {*VERSIONS} - {named}:
                self.choose(version)
                self.assertIn(", up to date", self.run_command("setup")[1])
            self.assertEqual(self.state(), before)

    def test_does_nothing_to_a_clean_clone(self):
        before = self.state()
        for version in ("", *VERSIONS):
            os.environ[VARIABLE] = version
            self.assertEqual(self.run_command("clean")[0], 0)
        self.assertEqual(self.state(), before)


@instantiate_parametrized_tests
class TestInputs(BuildTestCase):
    """What set-up was made from may change between two runs."""

    def test_changed_wheel(self):
        self.set_up(self.wheel)
        before = self.links()
        changed = {"torch/extra.py": "", FUNCTIONAL: "changed\n"}
        version = f"{self.version}+other"
        other = make_wheel(self.scratch, version=version, files=changed)
        self.assertTrue(self.set_up(other))
        text = (self.root / "build/base" / FUNCTIONAL).read_text()
        self.assertEqual(text, "changed\n")
        self.assertEqual(
            self.links().keys() ^ before,
            {f"torch-{v}.dist-info" for v in (version, f"{self.version}+fake")}
            | {"torch/extra.py"},
        )
        self.assertFalse(self.set_up(other))
        self.assertFalse(self.set_up())

    def test_same_wheel_from_elsewhere(self):
        self.set_up()
        copy = shutil.copy(self.wheel, self.scratch / "copy.whl")
        before = (self.home / "base").stat().st_ino
        self.assertFalse(self.set_up(Path(copy)))
        self.assertEqual((self.home / "base").stat().st_ino, before)

    def test_rewritten_wheel_at_the_same_path(self):
        self.set_up(self.wheel)
        make_wheel(self.scratch, files={"torch/extra.py": ""})
        self.assertTrue(self.set_up(self.wheel))
        self.assertIn("torch/extra.py", self.links())

    def test_lost_release_comes_back_without_pip(self):
        self.set_up()
        before = self.links()
        shutil.rmtree(self.home / "base")
        self.assertTrue(self.set_up())
        self.assertEqual(len(self.pip.downloads), 1)
        self.assertEqual(self.links(), before)

    def test_changed_python(self):
        self.set_up()
        stamp = environment.Stamp(self.home / ".venv/setup.json")
        stamp.put("python", {**stamp.get("python"), "abi": "another"})
        self.assertTrue(self.set_up())
        self.assertEqual(len(self.pip.installs), 2)
        with mock.patch.object(wheel, "python_tag", lambda: "cp399-linux-x86_64"):
            self.assertTrue(self.set_up())
            self.assertFalse(self.set_up())

    def test_changed_requirements(self):
        self.set_up()
        for times, name in enumerate(OUR_LISTS, 2):
            self.put(name, "another\n")
            self.assertTrue(self.set_up())
            self.assertEqual(len(self.pip.installs), times)
            self.assertFalse(self.set_up())

    def test_models_are_installed_where_wanted(self):
        """With the other requirements, so that pip resolves all as a whole."""
        self.set_up()
        files = [*OUR_LISTS, MODELS]
        self.assertEqual(self.run_command("setup", "--models")[0], 0)
        self.assertEqual(self.pip.installs[1:], [[*NEEDED, *files]])
        self.run_command("setup", "--models")
        self.put(MODELS, "peft\n")
        self.run_command("setup")
        self.assertEqual(len(self.pip.installs), 2)
        self.run_command("setup", "--models")
        self.assertEqual(self.pip.installs[2:], [[*NEEDED, *files]])
        self.put("requirements.txt", "pytest\ntqdm\n")
        self.run_command("setup", "--models")
        self.assertEqual(
            self.pip.installs[3:], [[*NEEDED, *OUR_LISTS], [*NEEDED, *files]]
        )

    def test_clients_are_installed_over_the_environment(self):
        """Into a folder of their own: what tests run in stays as it is."""
        self.assertEqual(self.run_command("setup", "--clients")[0], 0)
        self.assertEqual(self.pip.installs[-1], [*NEEDED, CLIENTS])
        self.assertEqual(len(self.pip.installs), 3)
        packages = "lib/python3*/site-packages"
        (own,) = self.home.glob(f".venv/{packages}")
        (over,) = self.home.glob(f".venv/clients/{packages}")
        lines = (over / "torch-fsdp2-mixed-dtype.pth").read_text().splitlines()
        self.assertEqual(lines, [str(own), str(self.branch)])
        self.assertFalse(self.build().set_up(None, with_clients=True))
        self.put(CLIENTS, "trl\n")
        self.assertTrue(self.build().set_up(None, with_clients=True))
        self.assertEqual(self.pip.installs[3:], [[*NEEDED, CLIENTS]])
        self.pip.fails_with = KeyboardInterrupt()
        self.put(CLIENTS, "lightning\n")
        self.assertEqual(self.run_command("setup", "--clients")[0], 130)
        self.pip.fails_with = None
        self.assertTrue(self.build().set_up(None, with_clients=True))
        self.assertFalse(self.build().set_up(None, with_models=True))

    @parametrize("name", [*OUR_LISTS, MODELS])
    def test_clients_are_installed_anew_over_what_changed(self, name: str):
        self.build().set_up(None, with_clients=True)
        self.put(name, "another\n")
        # Whichever command brings that
        self.build().set_up(None, with_models=True)
        count = len(self.pip.installs)
        self.assertTrue(self.build().set_up(None, with_clients=True))
        self.assertEqual(self.pip.installs[count:], [[*NEEDED, CLIENTS]])
        self.assertFalse(self.build().set_up(None, with_clients=True))

    def test_interrupted_install_of_models_is_made_up_for(self):
        self.set_up()
        self.pip.fails_with = KeyboardInterrupt()
        self.assertEqual(self.run_command("setup", "--models")[0], 130)
        self.pip.fails_with = None
        # pip may have been taking any package's earlier version out.
        self.assertTrue(self.set_up())
        self.assertTrue(self.build().set_up(None, with_models=True))
        self.assertFalse(self.build().set_up(None, with_models=True))

    def test_moved_tree(self):
        self.set_up()
        moved = self.scratch / "moved"
        self.root.rename(moved)
        self.root = moved
        self.assertTrue(self.set_up())
        self.assertEqual(self.links_to_ours(), {OURS})
        (path_file,) = self.home.glob(".venv/lib/*/site-packages/*.pth")
        self.assertEqual(path_file.read_text(), f"{self.branch}\n")
        self.assertEqual(len(self.pip.downloads), 1)


@instantiate_parametrized_tests
class TestErrors(BuildTestCase):
    """One line each, exit status 1, and the tree as it was."""

    def bad_wheel(self, kind: str) -> Path:
        folder = self.scratch / "bad"
        folder.mkdir()
        make = functools.partial(make_wheel, folder)
        if kind == "missing":
            return folder / "missing.whl"
        if kind == "version":
            return make(version="2.12.0+fake")
        if kind == "project":
            return make(project="torchvision", version="2.13.0")
        if kind == "python":
            return make(tag="cp27-cp27mu-manylinux_2_28_x86_64")
        if kind == "outside":
            return make(files={"../outside.py": ""})
        path = make(files={"torch/extra.py": ""})
        whole = path.read_bytes()
        if kind == "unlisted":
            lacking = make_wheel(self.scratch, version="2.13.0+short")
            with zipfile.ZipFile(lacking, "a") as archive:
                archive.writestr("torch/extra.py", "")
            return lacking
        if kind == "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        elif kind == "damaged":
            # A byte of the first file's data, behind the header and the name.
            at = whole.index(b"torch/__init__.py") + len("torch/__init__.py") + 3
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("notes.txt", "no wheel")
        return path

    @parametrize(
        "kind,text",
        [
            ("missing", "there is no wheel at"),
            ("version", "holds torch 2.12.0+fake; the release is torch 2.13.0"),
            ("project", "holds torchvision 2.13.0; the release is torch 2.13.0"),
            ("python", "is for cp27-cp27mu-manylinux_2_28_x86_64"),
            ("outside", "lies outside"),
            ("unlisted", "does not hold what its RECORD lists: torch/extra.py"),
            ("truncated", "is damaged"),
            ("damaged", "is damaged"),
            ("no wheel", "lacks a dist-info folder"),
        ],
    )
    def test_bad_wheel(self, kind: str, text: str):
        bad = self.bad_wheel(kind)
        self.assert_one_error(self.run_command("setup", given=bad), text)
        self.assert_untouched()
        # The same over a build that is there: it goes on working.
        self.set_up(self.wheel)
        before = self.state()
        self.assert_one_error(self.run_command("setup", given=bad), text)
        self.assertEqual(self.state(), before)
        self.assertFalse(self.set_up())

    def test_wheel_of_another_version_from_pip(self):
        self.pip.served = make_wheel(self.scratch, version="2.12.0")
        self.assert_one_error(self.run_command("setup"), "holds torch 2.12.0")
        self.assert_untouched()

    def test_no_space_before_unpacking(self):
        with disk_with(10):
            result = self.run_command("setup", given=self.wheel)
        self.assert_one_error(result, "no space left on the disk: the release needs")
        self.assert_untouched()

    @parametrize("version,least", [(DEFAULT.version, "1,500"), (OTHER, "6,600")])
    def test_no_space_before_fetching(self, version: str, least: str):
        self.choose(version)
        with disk_with(1_000_000_000):
            result = self.run_command("setup")
        what = f"no space left on the disk: torch {version} with what it requires needs"
        self.assert_one_error(result, f"{what} {least} MB, 1,000 MB are free; a build")
        self.assertIn(f"and {least} MB on the disk", result[1])
        self.assertEqual(self.pip.downloads, [])
        self.assert_untouched()

    @parametrize("version", VERSIONS)
    def test_no_space_for_what_a_build_for_cuda_requires(self, version: str):
        """Whichever release pip finds such a build of."""
        self.choose(version)
        name = f"torch-{version}+cu.dist-info/METADATA"
        metadata = f"Name: torch\nVersion: {version}\nRequires-Dist: nvidia-nccl-cu13\n"
        cuda = make_wheel(self.scratch, version=f"{version}+cu", files={name: metadata})
        with disk_with(4_000_000_000):
            result = self.run_command("setup", given=cuda)
            self.assert_one_error(result, "what torch requires needs 4,900 MB")
            self.assertEqual(self.pip.installs, [])
            self.assert_untouched()
            # One for CPUs brings none of it.
            self.assertEqual(self.run_command("setup", given=self.wheel)[0], 0)

    @parametrize(
        "where",
        [
            "tools.setup_helpers.wheel._unpack_member",
            "tools.setup_helpers.tree.Path.symlink_to",
            "tools.setup_helpers.environment._write_if_changed",
        ],
    )
    def test_no_space_on_the_way(self, where: str):
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch(where, side_effect=full):
            result = self.run_command("setup")
        self.assert_one_error(result, "no space left on the disk")
        self.assert_untouched()

    @parametrize("version", (DEFAULT.version, OTHER))
    def test_failed_install_puts_the_earlier_release_back(self, version: str):
        self.choose(version)
        self.pip.fails_with = SetupError("pip cannot install the requirements: no")
        self.assert_one_error(self.run_command("setup"), "pip cannot install")
        self.assert_untouched()
        self.pip.fails_with = None
        self.set_up()
        before = self.links()
        self.put("torch/nn/new.py", "")
        name = f"torch-{version}+other.dist-info/METADATA"
        more = f"Name: torch\nVersion: {version}+other\nRequires-Dist: more\n"
        other = make_wheel(self.scratch, version=f"{version}+other", files={name: more})
        self.pip.fails_with = SetupError("no")
        self.assert_one_error(self.run_command("setup", given=other), "no")
        self.assertEqual(self.links(), before)
        self.assertIn("+fake", (self.branch / "torch/version.py").read_text())

    @parametrize("version", ["2.12.0", "2.14", "../..", "2.15.0 "])
    @parametrize("command", ["setup", "wheel", "clean"])
    def test_unknown_release(self, command: str, version: str):
        os.environ[VARIABLE] = version
        result = self.run_command(command)
        self.assert_one_error(result, "is no release that this branch is for: these")
        self.assertIn(known(), result[2])
        self.assert_untouched()

    def test_wheel_of_another_release(self):
        """The line says how to take it, if it can be taken."""
        other = make_wheel(self.scratch, version=f"{OTHER}+fake")
        for given, hint in (
            (other, f"the release is torch {self.version}: take RELEASE={OTHER}"),
            (make_wheel(self.scratch, version="2.12.0"), known()),
        ):
            for command in ("setup", "wheel"):
                result = self.run_command(command, given=given)
                self.assert_one_error(result, hint)
        self.assert_untouched()

    @parametrize("module", ["venv", "ensurepip"])
    def test_missing_module(self, module: str):
        self.venv_has_pip = True
        find = importlib.util.find_spec
        with mock.patch(
            "importlib.util.find_spec", lambda name: name != module and find(name)
        ):
            result = self.run_command("setup")
        self.assert_one_error(result, f"this Python has no {module} module")
        self.assert_untouched()

    @parametrize("is_link", [False, True])
    def test_foreign_environment_is_not_replaced(self, is_link: bool):
        if is_link:
            (self.root / ".venv").symlink_to(self.scratch)
        self.put(".venv/mine", "")
        self.assert_one_error(self.run_command("setup"), ".venv was not made by")
        self.assertFalse((self.root / "build").exists())
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assertTrue((self.root / ".venv/mine").exists())
        # Another release has no use for that name
        self.choose(OTHER)
        self.assertTrue(self.set_up())

    def test_old_python_gets_one_line(self):
        self.assertIsNone(entry.version_error((3, 10, 0), "python3"))
        self.assertEqual(
            entry.version_error((3, 9, 18), "/usr/bin/python3"),
            "error: Python 3.10 or newer is needed, and /usr/bin/python3 is 3.9; "
            "choose another one with PYTHON3=PATH",
        )
        source = Path(entry.__file__).read_text()
        ast.parse(source, feature_version=(3, 4))

    @parametrize(
        "said,shown",
        [
            ("ERROR: Could not find a version\nERROR: No matching distribution found "
             "for torch==2.13.0", "No matching distribution found"),
            ("WARNING: Retrying (Retry(total=0))\nERROR: No matching distribution",
             "the package index cannot be reached"),
            ("Traceback\nOSError: [Errno 28] No space left on device",
             "No space left on device"),
        ],
    )  # fmt: skip
    def test_pip_error_is_passed_on(self, said: str, shown: str):
        python = self.scratch / "python"
        python.write_text(f"#!/bin/sh\necho 'Collecting'\necho '{said}' >&2\nexit 1\n")
        python.chmod(0o755)
        pip = environment.Pip(python, Progress(quiet=True))
        with self.assertRaisesRegex(SetupError, shown):
            pip.download("torch==2.13.0", self.scratch)
        with self.assertRaisesRegex(SetupError, shown):
            pip.install([], self.root / "requirements.txt")


@instantiate_parametrized_tests
class TestEditable(BuildTestCase):
    @parametrize("version", (DEFAULT.version, OTHER))
    def test_lays_the_tree_and_tells_requirements(self, version: str):
        self.choose(version)
        os.environ["TORCH_WHEEL"] = str(self.wheel)
        with contextlib.redirect_stdout(io.StringIO()):
            metadata = editable.build_in_place(self.root)
        self.assertEqual(metadata.requirements, NEEDED)
        expected = {
            "examples": ["tqdm", "transformers"],
            "dev": ["tqdm", "pytest", "transformers"],
            "clients": ["torchtitan"],
        }
        self.assertEqual(metadata.extras, expected)
        self.assertEqual(metadata.scripts, ["torchrun = torch.distributed.run:main"])
        self.assertEqual(metadata.version, version)
        self.assertEqual(self.root / metadata.folder, self.branch)
        self.assertEqual(self.links_to_ours(), {OURS})
        self.assertFalse((self.home / ".venv").exists())
        self.assertFalse((self.root / ".venv").exists())
        is_short = (self.root / "build/base").exists()
        self.assertEqual(is_short, version == DEFAULT.version)

    def told(self, *command: str) -> None:
        """Has setup.py of the clone tell what pip asks it, by pip's command."""
        shutil.copytree(REPOSITORY / "tools", self.root / "tools", dirs_exist_ok=True)
        shutil.copy(REPOSITORY / "setup.py", self.root)
        os.environ["TORCH_WHEEL"] = str(self.wheel)
        command = [sys.executable, "-B", "setup.py", "--quiet", *command]
        subprocess.run(command, cwd=self.root, check=True, capture_output=True)
        self.assertFalse(self.build()._ensure_branch(), "it writes into the tree")

    def test_pip_installs_what_the_release_requires_and_extras_bring_the_rest(self):
        """In the very words that pip gets, by the command that it runs."""
        self.told("dist_info")
        (told,) = self.root.glob("torch_fsdp2*.dist-info")
        fields = wheel.parse_fields((told / "METADATA").read_bytes())
        asked = [Requirement(line) for line in fields.get_all("Requires-Dist")]
        by_extra = {
            extra: {r.name for r in asked if r.marker and f'"{extra}"' in str(r.marker)}
            for extra in ("examples", "dev", "clients", "optree")
        }
        self.assertEqual({r.name for r in asked if not r.marker}, {"filelock"})
        expected = {
            "examples": {"tqdm", "transformers"},
            "dev": {"tqdm", "pytest", "transformers"},
            "clients": {"torchtitan"},
            "optree": {"optree"},
        }
        self.assertEqual(by_extra, expected)
        self.assertEqual({*fields.get_all("Provides-Extra")} - {*expected}, set())

    def test_pip_puts_that_tree_on_the_path(self):
        for version in (DEFAULT.version, OTHER):
            self.choose(version)
            out = self.scratch / "out" / version
            out.mkdir(parents=True)
            self.told("editable_wheel", "--dist-dir", str(out))
            (written,) = out.glob("*.whl")
            self.assertIn(f"-{version}-", written.name)
            with zipfile.ZipFile(written) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith(".pth"))
                folder = archive.read(name).decode().strip()
            self.assertEqual(Path(folder).resolve(), self.branch)

    def test_each_range_is_in_one_file(self):
        """And in no other place: what one of them drops is gone everywhere."""
        files = {path.name for path in REPOSITORY.glob("requirements*.txt")}
        self.assertEqual(files, {*REQUIREMENTS})
        self.assertEqual(
            files, {f for names in editable.EXTRAS.values() for f in names}
        )
        extras = editable.extras_of(REPOSITORY)
        names = [Requirement(line).name for line in extras["dev"]]
        self.assertEqual(len(names), len({*names}))
        self.assertEqual({*extras["examples"]} - {*extras["dev"]}, set())
        for name in ("setup.py", "pyproject.toml", "Makefile"):
            text = (REPOSITORY / name).read_text()
            written = [line for line in extras["dev"] if line in text]
            self.assertEqual(written, [], name)

    def test_refuses_where_another_torch_is_installed(self):
        with mock.patch.object(editable, "installed_torch", lambda: "2.9.0"):
            with self.assertRaisesRegex(SystemExit, "torch 2.9.0 is installed"):
                editable.build_in_place(self.root)
        self.assert_untouched()

    def test_unknown_release_is_one_line(self):
        os.environ[VARIABLE] = "2.12.0"
        with self.assertRaisesRegex(SystemExit, "error: RELEASE=2.12.0 is no release"):
            editable.build_in_place(self.root)
        self.assert_untouched()

    def test_isolated_build_is_told_of(self):
        os.environ[VARIABLE] = "2.12.0"
        with mock.patch("importlib.util.find_spec", lambda name: None):
            with self.assertRaisesRegex(SystemExit, "pip install --no-build-isolation"):
                editable.build_in_place(self.root)


class TestMake(BuildTestCase):
    """The Makefile itself, with a stand-in for the Pythons that it calls."""

    def setUp(self) -> None:
        super().setUp()
        self.put("Makefile", (REPOSITORY / "Makefile").read_text())
        said = 'printf "%s|" "$TORCH_RELEASE" "${RELEASE-}" "${MAKEFLAGS-}" "$@"; echo'
        for place in (
            "my python",
            ".venv/bin/python",
            f"build/{OTHER}/.venv/bin/python",
        ):
            self.put(place, f"#!/bin/sh\nprintf '%s|' \"$0\"\n{said}\n")
            (self.root / place).chmod(0o755)
        for name in ("RELEASE", "MAKEFLAGS", "MAKELEVEL"):
            os.environ.pop(name, None)
        self.tool = str(self.root / "my python")
        os.environ["PYTHON3"] = self.tool

    def make(self, *arguments: str) -> list[list[str]]:
        """Returns the words of each command that a target runs."""
        command = ["make", "--silent", *arguments]
        printed = subprocess.check_output(command, cwd=self.root, text=True)
        return [line.rstrip("|").split("|") for line in printed.splitlines()]

    def test_targets_run_in_the_clone_by_the_releases_python(self):
        helpers = ["-B", "-m", "tools.setup_helpers", "setup"]
        for target, words in (
            ("train", ["examples/train_mixed_dtype.py"]),
            ("test", ["-m", "pytest", "--durations=10"]),
            ("bench", ["benchmarks/distributed/fsdp/bench.py"]),
        ):
            for more, python, version in (
                ([], ".venv/bin/python", ""),
                ([f"RELEASE={OTHER}"], f"build/{OTHER}/.venv/bin/python", OTHER),
            ):
                set_up, run = self.make(target, *more)
                expected = [self.tool, version, "", "", *helpers]
                self.assertEqual(set_up[: len(expected)], expected)
                expected = [python, version, "", "", *words]
                self.assertEqual(run[: len(expected)], expected)

    def test_nothing_runs_where_set_up_fails(self):
        self.put("my python", "#!/bin/sh\nexit 1\n")
        for target in ("train", "test", "bench", "clients", "series", "lint"):
            command = ["make", "--silent", target, "RELEASE=none"]
            done = subprocess.run(command, cwd=self.root, capture_output=True)
            self.assertEqual((done.returncode, done.stdout), (2, b""), target)

    def test_series_is_made_on_its_own_release(self):
        self.put("tools/upstream/series.py", f'RELEASE = "{OTHER}"\n')
        for more in ([], [f"RELEASE={DEFAULT.version}"]):
            set_up, run = self.make("series", *more)
            self.assertEqual(set_up[:2], [self.tool, OTHER])
            self.assertEqual(run[:2], [f"build/{OTHER}/.venv/bin/python", OTHER])

    def test_tools_are_told_the_release(self):
        for target in ("setup", "models", "wheel", "clean", "help"):
            *_, last = self.make(target, f"RELEASE={OTHER}")
            self.assertEqual(last[:2], [self.tool, OTHER])
        with mock.patch.dict(os.environ, {"RELEASE": OTHER}):
            self.assertEqual(self.make("setup")[-1][:2], [self.tool, OTHER])

    def test_values_are_passed_on_as_they_are(self):
        odd = "a b'\"`c`; echo d"
        names = ("NPROC", "STEPS", "POLICY", "DEVICE")
        _, run = self.make("train", *(f"{name}={odd}" for name in names))
        words = [word for name in names for word in (f"--{name.lower()}", odd)]
        self.assertEqual(run[4:], ["examples/train_mixed_dtype.py", *words])

    def test_help_names_the_releases(self):
        status, stdout, _ = self.run_command("releases")
        self.assertEqual((status, stdout.count("\n")), (0, 1))
        for version in VERSIONS:
            self.assertIn(version, stdout)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
