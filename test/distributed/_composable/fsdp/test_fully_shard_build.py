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
import threading
import time
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from fsdp_build.utils import (
    BASE_FILES,
    BuildTestCase,
    disk_with,
    make_wheel,
    OURS,
    REPOSITORY,
    REQUIREMENTS,
)

from tools.setup_helpers import __main__ as entry
from tools.setup_helpers import environment, inplace, wheel
from tools.setup_helpers.report import Progress, SetupError
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.tools


LINKS = {
    "functorch",
    "torch-2.13.0+fake.dist-info",
    "torch/__init__.py",
    "torch/bin",
    "torch/distributed/__init__.py",
    "torch/distributed/fsdp/__init__.py",
    "torch/distributed/fsdp/theirs.py",
    "torch/distributed/run.py",
    "torch/nn",
    "torch/version.py",
    "torchgen",
}
# What the base requires.
NEEDED = ["filelock", 'optree; extra == "optree"']
# What set-up installs besides; the models' and the clients' where they are wanted.
*OUR_LISTS, MODELS, CLIENTS = REQUIREMENTS
# A set-up that dies on the `count`-th call of `name`, as if it were killed.
KILLED_SETUP = """
import os, pkgutil, sys
from functools import partial
from pathlib import Path
from unittest import mock
from tools.setup_helpers import cli, inplace

root, given, name, count = sys.argv[1:]
real, calls = pkgutil.resolve_name(name), []

def dying(*arguments, **named):
    calls.append(arguments)
    if len(calls) == int(count):
        os._exit(9)
    return real(*arguments, **named)

class NoPip:
    def __init__(self, *_): pass
    def install(self, *_): pass

os.environ["TORCH_BASE_WHEEL"] = given
build = partial(inplace.InPlaceBuild, Path(root), make_pip=NoPip, venv_has_pip=False)
with mock.patch(name, dying):
    sys.exit(cli.main(["setup"], build))
"""


@instantiate_parametrized_tests
class TestLinks(BuildTestCase):
    def test_lays_links_around_our_files(self):
        self.set_up()
        self.assertEqual(self.links(), LINKS)
        for link in LINKS:
            target = (self.root / link).resolve(strict=True)
            self.assertEqual(target, self.root / "build/base" / link)
            self.assertFalse(os.path.isabs(os.readlink(self.root / link)))

    def test_environment_imports_the_tree(self):
        self.set_up()
        imported = self.run_python(
            "from importlib.metadata import version\n"
            "import torch\n"
            "from torch.distributed.fsdp import ours, theirs\n"
            "print(torch.__version__, version('torch'), ours.origin, theirs.origin)"
        )
        self.assertEqual(imported, "2.13.0+fake 2.13.0+fake ours base")
        torchrun = self.root / ".venv/bin/torchrun"
        self.assertEqual(subprocess.check_output([torchrun], text=True), "running\n")

    def test_base_is_pristine_and_read_only(self):
        self.set_up()
        base = self.root / "build/base"
        for name, text in BASE_FILES.items():
            mode = stat.S_IMODE((base / name).stat().st_mode)
            self.assertEqual((base / name).read_text(), text)
            self.assertFalse(mode & 0o222, name)
            self.assertEqual(bool(mode & 0o100), name == "torch/bin/tool")

    def test_second_run_changes_nothing(self):
        self.assertTrue(self.set_up())
        before = self.state()
        began_s = time.process_time()
        self.assertFalse(self.set_up())
        self.assertLess(time.process_time() - began_s, 3)
        self.assertEqual(self.state(), before)
        self.assertEqual(self.pip.downloads, ["torch==2.13.0"])
        self.assertEqual(self.pip.installs, [[*NEEDED, *OUR_LISTS]])

    def test_lost_links_are_laid_again(self):
        self.set_up()
        (self.root / "torch/version.py").unlink()
        (self.root / "torchgen").unlink()
        (self.root / "torchgen").symlink_to("build/base/functorch")
        self.assertTrue(self.set_up())
        self.assertEqual(self.links(), LINKS)
        self.assertEqual(os.readlink(self.root / "torchgen"), "build/base/torchgen")

    def test_checked_out_file_in_a_linked_folder_becomes_ours(self):
        self.git("checkout", "--quiet", "-b", "other")
        self.put("torch/nn/new.py", "origin = 'ours'\n")
        self.put("torch/version.py", "__version__ = 'ours'\n")
        self.git("add", "--all")
        self.commit()
        self.git("checkout", "--quiet", "-")
        self.set_up()
        self.assertIn("torch/nn", self.links())

        self.git("checkout", "--quiet", "other")
        self.set_up()
        ours_now = LINKS - {"torch/nn", "torch/version.py"}
        in_nn = {"torch/nn/__init__.py", "torch/nn/functional.py"}
        self.assertEqual(self.links(), ours_now | in_nn)
        self.assertEqual(self.untracked().count("??"), 0)

        self.git("checkout", "--quiet", "-")
        self.set_up()
        self.assertEqual(self.links(), LINKS)

    def test_file_in_the_index_alone_is_written_out(self):
        self.set_up()
        self.put("elsewhere", "origin = 'ours'\n")
        blob = self.git("hash-object", "-w", "elsewhere").strip()
        for path in ("torch/nn/new.py", "torch/version.py"):
            self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
        self.set_up()
        for path in ("torch/nn/new.py", "torch/version.py"):
            self.assertFalse((self.root / path).is_symlink())
            self.assertEqual((self.root / path).read_text(), "origin = 'ours'\n")
            self.assertFalse((self.root / "build/base/torch/nn/new.py").exists())
        self.assertIn("torch/nn/functional.py", self.links())

    def test_untracked_file_in_a_links_place_is_kept(self):
        self.set_up()
        (self.root / "torch/version.py").unlink()
        self.put("torch/version.py", "mine\n")
        self.set_up()
        self.assertEqual((self.root / "torch/version.py").read_text(), "mine\n")
        self.git("add", "torch/version.py")
        (self.root / "torch/version.py").unlink()
        self.git("rm", "--quiet", "--cached", "torch/version.py")
        self.set_up()
        self.assertEqual(self.links(), LINKS)

    @parametrize("command", ["setup", "clean"])
    def test_new_file_in_a_linked_folder_is_kept(self, command: str):
        self.set_up()
        for path in ("torch/nn/new.py", "torch/nn/more/new.py"):
            (self.root / path).parent.mkdir(exist_ok=True)
            (self.root / path).write_text("mine\n")
        self.assertEqual(self.run_command(command)[0], 0)
        self.git("add", "--all")
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual(staged, ["torch/nn/more/new.py", "torch/nn/new.py"])
        self.assertEqual((self.root / "torch/nn/new.py").read_text(), "mine\n")
        self.assertFalse((self.root / "build/base/torch/nn/new.py").exists())

    def test_git_adds_no_base_file(self):
        self.set_up()
        self.assertEqual(self.git("status", "--porcelain"), "")
        self.put("torch/new.py", "")
        self.put("torch/distributed/fsdp/new.py", "")
        self.git("add", "--all")
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual(staged, ["torch/distributed/fsdp/new.py", "torch/new.py"])

    def test_without_git_the_regular_files_are_ours(self):
        shutil.rmtree(self.root / ".git")
        self.set_up()
        self.assertEqual(self.links(), LINKS)
        self.put("torch/new.py", "")
        self.assertFalse(self.set_up())


@instantiate_parametrized_tests
class TestFork(BuildTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.set_up()

    def test_copies_a_base_file_and_adds_it(self):
        status, stdout, _ = self.run_command("fork", "torch/nn/functional.py")
        self.assertEqual((status, stdout.count("\n")), (0, 2), stdout)
        forked = self.root / "torch/nn/functional.py"
        self.assertFalse(forked.is_symlink())
        forked.write_text(forked.read_text() + "more = 1\n")
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual(staged, ["torch/nn/functional.py"])
        self.assertFalse(self.set_up())
        self.assertEqual(
            (self.root / "build/base/torch/nn/functional.py").read_text(),
            BASE_FILES["torch/nn/functional.py"],
        )

    def test_starts_a_new_file_in_a_linked_folder(self):
        self.run_command("fork", "torch/nn/new.py")
        self.assertEqual((self.root / "torch/nn/new.py").read_text(), "")
        self.assertFalse((self.root / "build/base/torch/nn/new.py").exists())

    @parametrize(
        "path,text",
        [
            (OURS, "is ours already"),
            ("torch/nn", "is a folder"),
            ("docs/new.md", "not in a folder of the base"),
            ("../torch/new.py", "not in a folder of the base"),
        ],
    )
    def test_refuses(self, path: str, text: str):
        before = self.state()
        self.assert_one_error(self.run_command("fork", path), text)
        self.assertEqual(self.state(), before)


class TestClean(BuildTestCase):
    def test_leaves_the_clone_as_it_was(self):
        exclude = self.root / ".git/info/exclude"
        exclude.write_text("# mine\n/notes")
        before = self.state()
        self.set_up()
        for cache in ("test/__pycache__/a.pyc", ".hypothesis/a", ".pytest_cache/a"):
            self.put(cache, "")
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assertEqual(self.untracked(), "")
        self.assertEqual(exclude.read_text().rstrip("\n"), "# mine\n/notes")
        after = self.state()
        del before[str(exclude)], after[str(exclude)]
        self.assertEqual(after, before)

    def test_does_nothing_to_a_clean_clone(self):
        before = self.state()
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assertEqual(self.state(), before)

    def test_keeps_what_is_not_ours(self):
        self.set_up()
        shutil.rmtree(self.root / ".venv")
        self.put(".venv/mine", "")
        self.put("torch/new.py", "")
        self.run_command("clean")
        self.assertTrue((self.root / ".venv/mine").exists())
        self.assertTrue((self.root / "torch/new.py").exists())
        self.assertEqual(self.links(), set())


class TestInputs(BuildTestCase):
    """What set-up was made from may change between two runs."""

    def test_changed_wheel(self):
        self.set_up(self.wheel)
        changed = {"torch/extra.py": "", "torch/nn/functional.py": "changed\n"}
        other = make_wheel(self.scratch, version="2.13.0+other", files=changed)
        self.assertTrue(self.set_up(other))
        base = self.root / "build/base"
        self.assertEqual((base / "torch/nn/functional.py").read_text(), "changed\n")
        renamed = {"torch-2.13.0+other.dist-info", "torch/extra.py"}
        gone = {"torch-2.13.0+fake.dist-info"}
        self.assertEqual(self.links(), LINKS - gone | renamed)
        self.assertFalse(self.set_up(other))
        self.assertFalse(self.set_up())

    def test_same_wheel_from_elsewhere(self):
        self.set_up()
        copy = shutil.copy(self.wheel, self.scratch / "copy.whl")
        before = (self.root / "build/base/torch").stat().st_ino
        self.assertFalse(self.set_up(Path(copy)))
        self.assertEqual((self.root / "build/base/torch").stat().st_ino, before)

    def test_rewritten_wheel_at_the_same_path(self):
        self.set_up(self.wheel)
        make_wheel(self.scratch, files={"torch/extra.py": ""})
        self.assertTrue(self.set_up(self.wheel))
        self.assertIn("torch/extra.py", self.links())

    def test_lost_base_comes_back_without_pip(self):
        self.set_up()
        shutil.rmtree(self.root / "build/base")
        self.assertTrue(self.set_up())
        self.assertEqual(len(self.pip.downloads), 1)
        self.assertEqual(self.links(), LINKS)

    def test_changed_python(self):
        self.set_up()
        stamp = environment.Stamp(self.root / ".venv/setup.json")
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
        (own,) = self.root.glob(f".venv/{packages}")
        (over,) = self.root.glob(f"build/clients/{packages}")
        lines = (over / "torch-fsdp2-mixed-dtype.pth").read_text().splitlines()
        self.assertEqual(lines, [str(own), str(self.root)])
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
        where = self.run_python("import torch; print(torch.__file__)")
        self.assertEqual(where, str(moved / "torch/__init__.py"))
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
            ("version", "holds torch 2.12.0+fake; the base is torch 2.13.0"),
            ("project", "holds torchvision 2.13.0; the base is torch 2.13.0"),
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
            result = self.run_command("setup")
        self.assert_one_error(result, "no space left on the disk: the base needs")
        self.assert_untouched()

    @parametrize(
        "where",
        [
            "tools.setup_helpers.wheel._unpack_member",
            "tools.setup_helpers.links.os.symlink",
            "tools.setup_helpers.environment._write_if_changed",
        ],
    )
    def test_no_space_on_the_way(self, where: str):
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch(where, side_effect=full):
            result = self.run_command("setup")
        self.assert_one_error(result, "no space left on the disk")
        self.assert_untouched()

    def test_failed_install_puts_the_earlier_base_back(self):
        self.pip.fails_with = SetupError("pip cannot install the requirements: no")
        self.assert_one_error(self.run_command("setup"), "pip cannot install")
        self.assert_untouched()
        self.pip.fails_with = None
        self.set_up()
        links = {link: os.readlink(self.root / link) for link in self.links()}
        other = make_wheel(
            self.scratch,
            version="2.13.0+other",
            files={"torch-2.13.0+other.dist-info/METADATA": "Name: torch\n"
                   "Version: 2.13.0+other\nRequires-Dist: more\n"},
        )  # fmt: skip
        self.pip.fails_with = SetupError("no")
        self.assert_one_error(self.run_command("setup", given=other), "no")
        after = {link: os.readlink(self.root / link) for link in self.links()}
        self.assertEqual(after, links)
        version = self.run_python("import torch; print(torch.__version__)")
        self.assertEqual(version, "2.13.0+fake")

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

    def test_foreign_environment_is_not_replaced(self):
        self.put(".venv/mine", "")
        self.assert_one_error(self.run_command("setup"), ".venv was not made by")
        self.assertTrue((self.root / ".venv/mine").exists())
        self.assertFalse((self.root / "build").exists())

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
class TestInterruption(BuildTestCase):
    @parametrize(
        "name,count",
        [
            ("tools.setup_helpers.environment.Environment._identity", 1),
            ("tools.setup_helpers.wheel._unpack_member", 4),
            ("tools.setup_helpers.inplace.os.rename", 1),
            ("tools.setup_helpers.links.os.symlink", 3),
            ("tools.setup_helpers.environment._write_if_changed", 2),
            ("tools.setup_helpers.environment.Environment.install", 1),
        ],
    )
    def test_killed_run_is_finished(self, name: str, count: int):
        arguments = [str(self.root), str(self.wheel), name, str(count)]
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_SETUP, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            check=False,
        )
        self.assertEqual(killed.returncode, 9, killed.stderr)
        self.assertEqual(self.git("status", "--porcelain"), "")
        self.assertTrue(self.set_up(self.wheel))
        self.assertEqual(self.links(), LINKS)
        self.assertEqual(len(self.pip.installs), 1)
        self.assertFalse((self.root / "build/.staging").exists())
        self.assertFalse(self.set_up(self.wheel))
        self.run_python("import torch")
        self.run_command("clean")
        self.assert_untouched()

    def test_cancelled_run_keeps_finished_steps(self):
        self.pip.fails_with = KeyboardInterrupt()
        status, _, stderr = self.run_command("setup")
        self.assertEqual((status, stderr.count("\n")), (130, 1))
        self.pip.fails_with = None
        self.assertTrue(self.set_up())
        self.assertEqual(len(self.pip.downloads), 1)
        self.assertFalse(self.set_up())

    def test_two_at_once_take_turns(self):
        second = threading.Thread(target=self.set_up)
        with inplace.locked(self.root, Progress(quiet=True)):
            second.start()
            second.join(0.3)
            self.assertTrue(second.is_alive())
            self.assertFalse((self.root / "build").exists())
        second.join(300)
        self.assertFalse(second.is_alive())
        self.assertFalse(self.set_up())


class TestEditable(BuildTestCase):
    def test_lays_the_base_and_tells_requirements(self):
        from tools.setup_helpers import editable

        os.environ["TORCH_BASE_WHEEL"] = str(self.wheel)
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
        self.assertEqual(self.links(), LINKS)
        self.assertFalse((self.root / ".venv").exists())

    def test_pip_installs_what_the_base_requires_and_extras_bring_the_rest(self):
        """In the very words that pip gets, by the command that it runs."""
        shutil.copytree(REPOSITORY / "tools", self.root / "tools")
        shutil.copy(REPOSITORY / "setup.py", self.root)
        os.environ["TORCH_BASE_WHEEL"] = str(self.wheel)
        command = [sys.executable, "-B", "setup.py", "--quiet", "dist_info"]
        subprocess.run(command, cwd=self.root, check=True, capture_output=True)
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

    def test_each_range_is_in_one_file(self):
        """And in no other place: what one of them drops is gone everywhere."""
        from tools.setup_helpers import editable

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
        from tools.setup_helpers import editable

        with mock.patch.object(editable, "installed_torch", lambda: "2.9.0"):
            with self.assertRaisesRegex(SystemExit, "torch 2.9.0 is installed"):
                editable.build_in_place(self.root)
        self.assert_untouched()


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
