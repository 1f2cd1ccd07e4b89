# Owner(s): ["oncall: distributed"]
"""Several bases in one clone: each has a tree of its own, with the branch's files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import test_fully_shard_setup_faults as faults

from fsdp_build.utils import disk_with, make_wheel, OURS, REPOSITORY

from tools import apply_to_checkout, record_base_digests
from tools.setup_helpers import (
    cli,
    editable,
    environment,
    inplace,
    mirror,
    releases,
    tree,
)
from tools.setup_helpers.assemble import LABEL
from tools.setup_helpers.report import Progress, SetupError
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.tools


DEFAULT, *OTHERS = (release.version for release in releases.RELEASES)
ALL = (DEFAULT, *OTHERS)
OTHER = OTHERS[-1]
OUR_TEST = "test/test_ours.py"
OUR_SCRIPT = "tools/run"
THEIRS = "torch/distributed/fsdp/theirs.py"
FUNCTIONAL = "torch/nn/functional.py"
NEW = "torch/nn/more/new.py"
NEEDED = ["filelock", 'optree; extra == "optree"']


class BasesTestCase(faults.FaultTestCase):
    """A clone, and a wheel of each release.  Environments are stand-ins."""

    def setUp(self) -> None:
        super().setUp()
        self.put(OUR_TEST, "import ours\n")
        self.put(OUR_SCRIPT, "#!/bin/sh\n")
        (self.root / OUR_SCRIPT).chmod(0o755)
        self.git("add", "--all")
        self.commit()
        # What the commands need the room for is tested apart
        self.wheels = {version: self.make_wheel_of(version) for version in ALL}
        self.tree = self.at(OTHER)

    def make_wheel_of(self, version: str, **kwargs: str) -> Path:
        files = {THEIRS: f"origin = '{version}'\n"}
        return make_wheel(
            self.scratch, version=f"{version}+fake", files=files, **kwargs
        )

    def at(self, version: str) -> Path:
        """Returns where the tree of a base is."""
        return self.root if version == DEFAULT else self.root / "build" / version

    def under(self, version: str, *command: str, given: Path | str = ""):
        """Returns exit status, stdout and stderr of a command with ``BASE=``."""
        self.pip.served = self.wheels.get(version, self.wheel)
        variables = {releases.VARIABLE: version, "TORCH_BASE_WHEEL": str(given)}
        with mock.patch.dict(os.environ, variables):
            return self.run_command(*command)

    def set_up_base(self, version: str = OTHER) -> str:
        status, stdout, stderr = self.under(version, "setup")
        self.assertEqual((status, stderr), (0, ""))
        return stdout

    def links_of_ours(self) -> set[str]:
        """Returns which links in the other base's tree lead to files of the clone."""
        linked = (self.tree / path for path in ("torch", "torchgen", "functorch"))
        return {
            path.relative_to(self.tree).as_posix()
            for top in linked
            for path in top.rglob("*")
            if path.is_symlink() and not tree.is_base_link(path, self.tree)
        }

    def read(self, path: str) -> str | None:
        """Returns a file of the other base's tree, if it has it."""
        return (self.tree / path).read_text() if (self.tree / path).exists() else None


class TestSideBySide(BasesTestCase):
    def imported(self, version: str) -> str:
        root, self.root = self.root, self.at(version)
        try:
            return self.run_python(
                "import torch\n"
                "from torch.distributed.fsdp import ours, theirs\n"
                "print(torch.__version__, ours.origin, theirs.origin)"
            )
        finally:
            self.root = root

    def test_each_imports_its_own_release_and_our_files(self):
        with mock.patch.object(environment, "_make_venv", faults.REAL_MAKE_VENV):
            for version in ALL:
                self.set_up_base(version)
        for version in ALL:
            self.assertEqual(self.imported(version), f"{version}+fake ours {version}")
        self.assertEqual(self.pip.downloads, [f"torch=={v}" for v in ALL])
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_one_does_not_disturb_another(self):
        """Whichever comes first, and whether one of them is new."""
        for version in reversed(ALL):
            self.set_up_base(version)
        before = self.state()
        for version in (*ALL, *ALL[1:]):
            self.assertIn("up to date", self.set_up_base(version))
        self.assertEqual(self.state(), before)
        self.assertEqual(len(self.pip.downloads), len(ALL))
        names = ["requirements-examples.txt", "requirements.txt"]
        self.assertEqual(self.pip.installs, [[*NEEDED, *names]] * len(ALL))

    def test_another_alone_leaves_the_clone_as_it_was(self):
        self.set_up_base()
        self.assertEqual(self.links(), set())
        self.assertEqual(self.untracked(), "!! build/\n")
        self.assertFalse((self.root / ".venv").exists())
        where = self.under(OTHER, "tree")[1].strip()
        self.assertEqual(where, str(self.tree))

    def test_default_may_be_named(self):
        self.set_up_base(DEFAULT)
        self.assertIn("up to date", self.run_command("setup")[1])
        self.assertEqual(self.under(DEFAULT, "tree")[1], f"{self.root}\n")

    def test_models_go_into_its_own_environment(self):
        self.set_up_base()
        self.assertEqual(self.under(OTHER, "setup", "--models")[0], 0)
        names = ["requirements-examples.txt", "requirements.txt"]
        models = [*NEEDED, *names, "requirements-models.txt"]
        self.assertEqual(self.pip.installs, [[*NEEDED, *names], models])
        self.put("requirements-models.txt", "peft\n")
        self.assertEqual(self.under(OTHER, "setup", "--models")[0], 0)
        self.assertEqual(self.pip.installs[2:], [models])

    def test_command_in_a_tree_means_its_base(self):
        self.set_up_base()
        here = mirror.build_of(self.build(), releases.find_release(OTHER))
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            self.assertEqual(cli.main(["setup"], lambda _: here), 0)
            self.assertEqual(cli.main(["tree"], lambda _: here), 0)
        self.assertIn(str(self.tree), stdout.getvalue())
        self.assertFalse((self.root / "build/base").exists())
        with mock.patch.object(cli, "ROOT", self.tree):
            found = cli.build_here(Progress(quiet=True))
        self.assertEqual((found.root, found.release.version), (self.tree, OTHER))

    def test_who_waits_for_a_tree_that_goes_makes_it_anew(self):
        """As the first set-up of a base does, when it fails."""
        self.tree.mkdir(parents=True)
        waits = threading.Semaphore(0)
        progress = Progress(quiet=True)
        progress.phase = lambda text: waits.release() if "waiting" in text else None
        other = mirror.build_of(self.build(progress), releases.find_release(OTHER))
        self.pip.served = self.wheels[OTHER]
        second = threading.Thread(target=other.set_up, args=(None,))
        with contextlib.ExitStack() as third:
            with inplace.locked(self.tree, Progress(quiet=True)):
                second.start()
                self.assertTrue(waits.acquire(timeout=60))
                self.tree.rmdir()
                # A third one is there before it.
                third.enter_context(inplace.locked(self.tree, Progress(quiet=True)))
            self.assertTrue(waits.acquire(timeout=60), "it took a lock on nothing")
            self.assertEqual([*self.tree.iterdir()], [])
        second.join(300)
        self.assertFalse(second.is_alive())
        self.assertIn(", up to date", self.set_up_base())

    def test_base_of_an_earlier_default_is_replaced(self):
        self.set_up_base(DEFAULT)
        later = releases.find_release(OTHER)
        build = self.build()
        build.release = later
        self.pip.served = self.wheels[OTHER]
        self.assertTrue(build.set_up(None))
        version = (self.root / "torch/version.py").read_text()
        self.assertIn(OTHER, version)
        self.assertNotIn(f"torch-{DEFAULT}+fake.dist-info", self.links())


@instantiate_parametrized_tests
class TestRefusals(BasesTestCase):
    @parametrize("command", ["setup", "wheel", "fork", "clean", "tree"])
    @parametrize("version", ["2.12.0", "2.14", "../..", "2.15.0 "])
    def test_unknown_base(self, command: str, version: str):
        arguments = [command, FUNCTIONAL] if command == "fork" else [command]
        result = self.under(version, *arguments)
        self.assert_one_error(result, "is no release that this branch is for: these")
        for release in ALL:
            self.assertIn(release, result[2])
        self.assert_untouched()

    def test_wheel_of_another_release(self):
        """The line says how to take it, if it can be taken."""
        for given, hint in (
            (self.wheels[OTHER], f"the base is torch {DEFAULT}: take BASE={OTHER}"),
            (make_wheel(self.scratch, version="2.12.0"), releases.known()),
        ):
            for command in ("setup", "wheel"):
                result = self.under(DEFAULT, command, given=given)
                self.assert_one_error(result, hint)
        result = self.under(OTHER, "setup", given=self.wheels[DEFAULT])
        self.assert_one_error(result, f"the base is torch {OTHER}: take BASE={DEFAULT}")
        self.assert_untouched()
        self.assertFalse((self.root / "build").exists())

    def test_no_room_is_told_before_anything_is_fetched(self):
        with disk_with(5_000_000_000):
            result = self.under(OTHER, "setup")
        self.assert_one_error(result, "no space left on the disk: torch 2.15.0 with")
        self.assertIn("needs 6,600 MB, 5,000 MB are free; a build for CPUs", result[2])
        self.assertEqual(self.pip.downloads, [])
        self.assert_untouched()
        self.assertFalse((self.root / "build").exists())

    def test_no_room_for_what_a_build_for_cuda_requires(self):
        name = f"torch-{OTHER}+cu.dist-info/METADATA"
        metadata = f"Name: torch\nVersion: {OTHER}\nRequires-Dist: nvidia-nccl-cu13\n"
        cuda = make_wheel(self.scratch, version=f"{OTHER}+cu", files={name: metadata})
        with disk_with(4_000_000_000):
            result = self.under(OTHER, "setup", given=cuda)
            self.assert_one_error(result, "what torch requires needs 4,900 MB")
            self.assertEqual(self.pip.installs, [])
            self.assert_untouched()
            # One for CPUs brings none of it.
            given = self.wheels[OTHER]
            self.assertEqual(self.under(OTHER, "setup", given=given)[0], 0)

    def test_size_is_said_before(self):
        stdout = self.set_up_base()
        self.assertIn(
            f"fetching torch=={OTHER} with pip: 539 MB, and about 6,600 MB on the disk",
            stdout,
        )

    def test_failed_set_up_leaves_nothing(self):
        self.set_up_base(DEFAULT)
        before = self.state()
        self.pip.fails_with = SetupError("pip cannot install the requirements: no")
        self.assert_one_error(self.under(OTHER, "setup"), "pip cannot install")
        self.assertFalse(self.tree.exists())
        self.assertEqual(self.state(), before)

    def test_failed_change_puts_the_earlier_base_back(self):
        self.set_up_base()
        before = self.links_of_ours()
        self.put(NEW, "origin = 'ours'\n")
        other = make_wheel(
            self.scratch,
            version=f"{OTHER}+b",
            files={f"torch-{OTHER}+b.dist-info/METADATA": "Name: torch\n"
                   f"Version: {OTHER}+b\nRequires-Dist: more\n"},
        )  # fmt: skip
        self.pip.fails_with = SetupError("no")
        self.assert_one_error(self.under(OTHER, "setup", given=other), "no")
        self.pip.fails_with = None
        self.assertIn("+fake", self.read("torch/version.py"))
        self.assertEqual(self.read(FUNCTIONAL), "origin = 'base'\n")
        self.assertEqual(self.links_of_ours(), before | {NEW})


class TestOurFiles(BasesTestCase):
    """Each set-up brings what the clone has into the tree, and no more."""

    def test_sources_are_links_and_others_are_copies(self):
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS})
        self.assertEqual((self.tree / OURS).resolve(), self.root / OURS)
        self.assertFalse(os.path.isabs(os.readlink(self.tree / OURS)))
        for path in (OUR_TEST, OUR_SCRIPT, "requirements.txt", ".gitignore"):
            copy = self.tree / path
            self.assertFalse(copy.is_symlink())
            self.assertEqual(copy.resolve(), copy)
            self.assertEqual(copy.read_bytes(), (self.root / path).read_bytes())
            self.assertFalse(copy.stat().st_mode & 0o222, path)
        self.assertTrue(os.access(self.tree / OUR_SCRIPT, os.X_OK))
        self.assertEqual(
            (self.tree / THEIRS).resolve(), self.tree / "build/base" / THEIRS
        )

    def test_edits(self):
        self.set_up_base()
        self.put(OURS, "origin = 'edited'\n")
        self.put(OUR_TEST, "import edited\n")
        self.assertEqual(self.read(OURS), "origin = 'edited'\n")
        (self.root / OUR_SCRIPT).chmod(0o644)
        self.assertIn("2 brought up to date", self.set_up_base())
        self.assertEqual(self.read(OUR_TEST), "import edited\n")
        self.assertFalse(os.access(self.tree / OUR_SCRIPT, os.X_OK))
        self.assertIn(", up to date", self.set_up_base())

    def test_additions(self):
        """In folders of ours, and in those that were links into the base."""
        self.set_up_base()
        added = {NEW, FUNCTIONAL, "torch/distributed/fsdp/new.py", "torch/new.py"}
        for path in (*added, "test/more/test_new.py"):
            self.put(path, "origin = 'new'\n")
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS, *added})
        for path in (*added, "test/more/test_new.py"):
            self.assertEqual(self.read(path), "origin = 'new'\n")
        self.assertEqual(self.read("torch/nn/__init__.py"), "")
        base = self.tree / "build/base"
        self.assertEqual((base / FUNCTIONAL).read_text(), "origin = 'base'\n")
        self.assertFalse((base / NEW).exists())

    def test_removals(self):
        self.test_additions()
        self.git("add", "--all")
        self.git("rm", "--quiet", "-rf", OURS, "test", FUNCTIONAL, "torch/nn/more")
        self.git("rm", "--quiet", "--cached", "torch/new.py")
        (self.root / "torch/new.py").unlink()
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {"torch/distributed/fsdp/new.py"})
        self.assertFalse((self.tree / "test").exists())
        self.assertEqual(self.read(OURS), "origin = 'base'\n")
        self.assertTrue((self.tree / "torch/nn").is_symlink())
        self.assertIn(", up to date", self.set_up_base())

    def test_another_branch(self):
        self.set_up_base()
        self.git("checkout", "--quiet", "-b", "other")
        self.put(NEW, "origin = 'ours'\n")
        self.git("rm", "--quiet", "-r", "test")
        self.put("test", "no folder\n")
        self.git("add", "--all")
        self.commit()
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS, NEW})
        self.assertEqual(self.read("test"), "no folder\n")
        self.git("checkout", "--quiet", "-")
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS})
        self.assertEqual(self.read(OUR_TEST), "import ours\n")

    def test_what_git_ignores_stays_out(self):
        self.put("test/__pycache__/a.pyc", "")
        self.put(".hypothesis/a", "")
        self.put("notes/mine", "")
        (self.root / ".git/info/exclude").write_text("/notes\n")
        self.set_up_base(DEFAULT)
        self.set_up_base()
        for path in ("test/__pycache__", ".hypothesis", "notes", ".git"):
            self.assertFalse((self.tree / path).exists(), path)

    def test_without_git_all_files_are_ours(self):
        shutil.rmtree(self.root / ".git")
        self.put("test/__pycache__/a.pyc", "")
        self.put("torch_fsdp2.egg-info/PKG-INFO", "")
        self.set_up_base(DEFAULT)
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS})
        self.assertEqual(self.read(OUR_TEST), "import ours\n")
        for path in ("test/__pycache__", "torch_fsdp2.egg-info", ".venv/.venv"):
            self.assertFalse((self.tree / path).exists(), path)
        self.assertIn(", up to date", self.set_up_base())

    def test_tools_in_the_tree_know_what_is_tracked(self):
        self.set_up_base()
        self.put("test/test_draft.py", "")
        self.set_up_base()
        here, there = (
            apply_to_checkout.files_to_lay(r) for r in (self.root, self.tree)
        )
        self.assertEqual([*here], [*there])
        self.assertNotIn("test/test_draft.py", there)
        self.assertEqual(there[OUR_TEST], self.tree / OUR_TEST)
        self.put("torch/draft.py", "")
        self.set_up_base()
        with self.assertRaisesRegex(SetupError, "git does not track torch/draft.py"):
            apply_to_checkout.files_to_lay(self.tree)


@instantiate_parametrized_tests
class TestWrittenInTheTree(BasesTestCase):
    """What somebody writes in a base's tree is not lost, nor taken for the clone's."""

    def write(self, path: str, text: str = "mine\n") -> None:
        place = self.tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_text(text)

    @parametrize("with_default", [False, True])
    @parametrize("command", ["setup", "clean"])
    def test_new_file_in_the_bases_folders_goes_home(self, with_default, command):
        if with_default:
            self.set_up_base(DEFAULT)
        self.set_up_base()
        before = self.links()
        # One in a folder that is a link, so that it lies in the base.
        for path in (NEW, "torch/new.py"):
            self.write(path)
        result = self.under(OTHER, command)
        self.assertEqual((result[0], result[2]), (0, ""))
        for path in (NEW, "torch/new.py"):
            self.assertEqual((self.root / path).read_text(), "mine\n")
            self.assertFalse((self.tree / "build/base" / path).exists())
        if command == "setup":
            self.assertEqual(self.links_of_ours(), {OURS, NEW, "torch/new.py"})
        kept = before - {"torch/nn"}
        self.assertTrue(kept <= self.links())
        self.git("add", "--all")
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual({*staged}, {NEW, "torch/new.py"})

    @parametrize("path", [OURS, OUR_TEST, "test/test_new.py"])
    def test_changed_file_is_told(self, path: str):
        self.set_up_base()
        self.write(path)
        if path == "test/test_new.py":
            # Nobody's, until the clone has one of that name.
            self.assertIn(", up to date", self.set_up_base())
            self.put(path, "")
        result = self.under(OTHER, "setup")
        where = f"build/{OTHER}/{path}"
        self.assert_one_error(result, f"{where} was changed, and is made anew from")
        self.assertEqual(self.read(path), "mine\n")
        (self.tree / path).unlink()
        self.set_up_base()
        self.assertEqual(self.read(path), (self.root / path).read_text())

    def test_refusal_leaves_a_tree_that_works(self):
        """Links that made way for a new file of ours are laid around it."""
        self.set_up_base()
        self.put(NEW, "origin = 'ours'\n")
        self.write(OUR_TEST)
        self.assert_one_error(self.under(OTHER, "setup"), "was changed")
        self.assertEqual(self.read(FUNCTIONAL), "origin = 'base'\n")
        self.assertEqual(self.links_of_ours(), {OURS, NEW})

    def test_same_change_in_both_places(self):
        """As an editor makes it that replaces a link."""
        self.set_up_base()
        for path in (OURS, OUR_TEST):
            self.put(path, "mine\n")
            self.write(path)
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS})
        self.assertIn(", up to date", self.set_up_base())

    def test_edited_copy_of_a_file_that_is_gone(self):
        self.set_up_base()
        self.write(OUR_TEST)
        self.git("rm", "--quiet", OUR_TEST)
        self.assert_one_error(self.under(OTHER, "setup"), "was changed")
        self.assertEqual(self.read(OUR_TEST), "mine\n")

    def test_output_is_left_alone(self):
        self.set_up_base()
        for path in ("build/train/loss.png", ".hypothesis/a", "test/out.txt"):
            self.write(path)
        self.assertIn(", up to date", self.set_up_base())
        self.assertEqual(self.read("test/out.txt"), "mine\n")


@instantiate_parametrized_tests
class TestFork(BasesTestCase):
    @parametrize("with_default", [False, True])
    def test_takes_that_bases_file(self, with_default: bool):
        if with_default:
            self.set_up_base(DEFAULT)
        self.set_up_base()
        status, stdout, stderr = self.under(OTHER, "fork", THEIRS)
        self.assertEqual((status, stderr), (0, ""))
        self.assertIn(f"{THEIRS} is ours now: a copy of the base's", stdout)
        self.assertEqual((self.root / THEIRS).read_text(), f"origin = '{OTHER}'\n")
        self.assertFalse((self.root / THEIRS).is_symlink())
        self.assertEqual(self.links_of_ours(), {OURS, THEIRS})
        staged = self.git("diff", "--cached", "--name-only").split()
        self.assertEqual(staged, [THEIRS])

    def test_refuses_what_is_ours(self):
        self.set_up_base()
        self.assert_one_error(self.under(OTHER, "fork", OURS), "is ours already")
        self.assertEqual(self.links_of_ours(), {OURS})


class TestClean(BasesTestCase):
    def test_removes_all(self):
        exclude = (self.root / ".git/info/exclude").read_text()
        for version in ALL:
            self.set_up_base(version)
        self.assertEqual(self.run_command("clean")[::2], (0, ""))
        self.assertEqual(self.untracked(), "")
        self.assertFalse((self.root / "build").exists())
        self.assertEqual((self.root / ".git/info/exclude").read_text(), exclude)

    def test_removes_the_one_that_is_named(self):
        for named in ALL:
            for version in ALL:
                self.set_up_base(version)
            self.assertEqual(self.under(named, "clean")[::2], (0, ""))
            self.assertFalse((self.at(named) / ".venv").exists())
            self.assertFalse((self.at(named) / "build/base").exists())
            before = self.state()
            for version in {*ALL} - {named}:
                self.assertIn(", up to date", self.set_up_base(version))
            self.assertEqual(self.state(), before)
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_does_nothing_where_there_is_none(self):
        before = self.state()
        self.assertEqual(self.under(OTHER, "clean")[::2], (0, ""))
        self.assertEqual(self.state(), before)
        self.assertFalse((self.root / "build").exists())

    def test_refuses_to_drop_what_differs(self):
        self.set_up_base()
        (self.tree / OURS).unlink()
        (self.tree / OURS).write_text("mine\n")
        self.assert_one_error(self.run_command("clean"), "was changed")
        self.assertEqual((self.tree / OURS).read_text(), "mine\n")


class TestKilled(BasesTestCase):
    """At any step; the next run makes up for it, and the default's tree is as it was."""

    def kill(self, step: int, command: str) -> None:
        self.wheel = self.wheels[OTHER]
        with mock.patch.dict(os.environ, {releases.VARIABLE: OTHER}):
            self.run_under(faults.die_at(step), command)

    def steps_of(self, command: str) -> int:
        self.wheel = self.wheels[OTHER]
        with mock.patch.dict(os.environ, {releases.VARIABLE: OTHER}):
            return self.run_under(lambda *_: None, command)[-1]

    def assert_set_up(self) -> None:
        self.set_up_base()
        self.assertEqual(self.links_of_ours(), {OURS})
        for path in (OUR_TEST, OUR_SCRIPT):
            self.assertEqual(self.read(path), (self.root / path).read_text())
        self.assertEqual((self.tree / "torchgen").resolve().name, "torchgen")
        self.assertTrue((self.tree / ".venv/bin/torchrun").exists())
        self.assertEqual(self.leftovers(), [])
        self.assertIn(", up to date", self.set_up_base())
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_set_up_and_clean(self):
        self.set_up_base(DEFAULT)
        before = {link: os.readlink(self.root / link) for link in self.links()}
        for command, every in (("setup", 9), ("clean", 13)):
            if command == "clean":
                self.set_up_base()
            steps = self.steps_of(command)
            self.assertGreater(steps, 60)
            for step in range(1, steps, every):
                if command == "setup":
                    self.assertEqual(self.under(OTHER, "clean")[0], 0)
                self.kill(step, command)
                self.assert_set_up()
        after = {link: os.readlink(self.root / link) for link in self.links()}
        self.assertEqual(after, before)

    def test_refresh_of_copies(self):
        """Copies of before and of now are both known, whichever were reached."""
        self.set_up_base()
        self.put("tools/new", "new\n")
        for number, step in enumerate(range(1, 16)):
            for path in (OUR_TEST, "requirements.txt"):
                self.put(path, f"# {number}\n")
            self.kill(step, "setup")
            self.put(OUR_TEST, f"# {number} and on\n")
            self.assertEqual(self.under(OTHER, "setup")[::2], (0, ""))
            self.assertEqual(self.read(OUR_TEST), f"# {number} and on\n")


@instantiate_parametrized_tests
class TestWheel(BasesTestCase):
    @parametrize("version", ALL)
    def test_of_the_base_in_place(self, version: str):
        self.set_up_base(version)
        status, stdout, stderr = self.under(version, "wheel")
        self.assertEqual((status, stderr), (0, ""))
        name = f"build/dist/torch-{version}+fake.{LABEL}-py3-none-any.whl"
        self.assertIn(f"{name}: ", stdout)
        self.assert_holds_ours(self.root / name, version)

    @parametrize("version", ALL)
    def test_of_one_that_is_named(self, version: str):
        """Which takes no base in place."""
        tag = "cp399-cp399-manylinux_2_28_x86_64"
        given = self.make_wheel_of(version, tag=tag)
        self.assertEqual(self.under(version, "wheel", given=given)[::2], (0, ""))
        (path,) = self.root.glob("build/dist/*")
        self.assert_holds_ours(path, version)
        self.assertEqual([p.name for p in (self.root / "build").iterdir()], ["dist"])

    def assert_holds_ours(self, path: Path, version: str) -> None:
        with zipfile.ZipFile(path) as archive:
            held = {name: archive.read(name).decode() for name in archive.namelist()}
            self.assertEqual(archive.getinfo(OURS).external_attr >> 16, 0o100644)
        self.assertEqual(held[OURS], "origin = 'ours'\n")
        self.assertEqual(held[THEIRS], f"origin = '{version}'\n")
        self.assertEqual([n for n in held if n.startswith(("test/", "tools/"))], [])
        dist_info = f"torch-{version}+fake.{LABEL}.dist-info"
        self.assertIn(
            f"Version: {version}+fake.{LABEL}\n", held[f"{dist_info}/METADATA"]
        )

    def test_draft_is_not_left_out_silently(self):
        self.set_up_base()
        self.put("torch/draft.py", "")
        result = self.under(OTHER, "wheel")
        self.assert_one_error(result, "git does not track torch/draft.py")


class TestEditable(BasesTestCase):
    def test_tree_of_the_named_base(self):
        os.environ[releases.VARIABLE] = OTHER
        os.environ["TORCH_BASE_WHEEL"] = str(self.wheels[OTHER])
        with contextlib.redirect_stdout(io.StringIO()):
            metadata = editable.build_in_place(self.root)
        self.assertEqual(metadata.version, OTHER)
        self.assertEqual(self.root / metadata.folder, self.tree)
        self.assertEqual(metadata.requirements, NEEDED)
        self.assertEqual(self.links_of_ours(), {OURS})
        self.assertEqual(self.read(OUR_TEST), "import ours\n")
        self.assertFalse((self.tree / ".venv").exists())
        self.assertEqual(self.links(), set())

    def test_unknown_base_is_one_line(self):
        os.environ[releases.VARIABLE] = "2.12.0"
        with self.assertRaisesRegex(SystemExit, "error: BASE=2.12.0 is no release"):
            editable.build_in_place(self.root)
        self.assert_untouched()

    def test_pip_puts_that_tree_on_the_path(self):
        """By the command that pip runs."""
        shutil.rmtree(self.root / "tools")
        shutil.copytree(REPOSITORY / "tools", self.root / "tools")
        shutil.copy(REPOSITORY / "setup.py", self.root)
        out = self.scratch / "out"
        command = [sys.executable, "-B", "setup.py", "--quiet", "editable_wheel"]
        for version in (DEFAULT, OTHER):
            os.environ[releases.VARIABLE] = version
            os.environ["TORCH_BASE_WHEEL"] = str(self.wheels[version])
            (out / version).mkdir(parents=True)
            options = ["--dist-dir", str(out / version)]
            done = subprocess.run(
                [*command, *options], cwd=self.root, capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            (written,) = (out / version).glob("*.whl")
            self.assertIn(f"-{version}-", written.name)
            with zipfile.ZipFile(written) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith(".pth"))
                folder = archive.read(name).decode().strip()
            self.assertEqual(Path(folder).resolve(), self.at(version))


class TestDigests(BasesTestCase):
    """`record_base_digests.py` knows what is set up, and keeps what else is known."""

    def recorded(self, *wheels: Path, root: Path | None = None) -> dict:
        arguments = [str(path) for path in wheels]
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            status = record_base_digests.main(arguments, root or self.root)
        self.assertEqual(status, 0)
        text = (self.root / record_base_digests.DIGESTS).read_text()
        lacking = {v for v in ALL if f"nothing is known of {v}" in stdout.getvalue()}
        self.assertEqual({*ALL} - lacking, {*json.loads(text)})
        return json.loads(text)

    def test_each_release(self):
        self.set_up_base(DEFAULT)
        self.assertEqual([*self.recorded()], [DEFAULT])
        self.set_up_base()
        by_release = self.recorded()
        self.assertEqual([*by_release], [DEFAULT, OTHER])
        for version in (DEFAULT, OTHER):
            told = by_release[version]["sha256"][THEIRS]
            base = self.at(version) / "build/base" / THEIRS
            self.assertEqual(told, apply_to_checkout.sha256(base))
        self.assertNotIn(FUNCTIONAL, by_release[OTHER]["sha256"])
        # From the tree it is the clone's file that is written; others are kept.
        self.run_command("clean")
        self.set_up_base()
        self.assertEqual(self.recorded(root=self.tree), by_release)

    def test_of_a_wheel(self):
        self.set_up_base(DEFAULT)
        by_wheel = self.recorded(*(self.wheels[v] for v in reversed(OTHERS)))
        self.assertEqual([*by_wheel], [*ALL])
        for version in OTHERS:
            self.set_up_base(version)
        self.assertEqual(self.recorded(), by_wheel)

    def test_wheel_of_no_release(self):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            unknown = make_wheel(self.scratch, version="2.12.0")
            status = record_base_digests.main([str(unknown)], self.root)
        self.assertEqual(status, 1)
        self.assertIn(releases.known(), stderr.getvalue())


class TestMake(BasesTestCase):
    """The Makefile itself, with a stand-in for the Python that it calls."""

    def setUp(self) -> None:
        super().setUp()
        self.put("Makefile", (REPOSITORY / "Makefile").read_text())
        self.put("build/other tree/empty", "")
        self.other = self.root / "build/other tree"
        said = 'printf "%s " "$PWD" "$TORCH_BASE" "${BASE-}" "${MAKEFLAGS-}" "$*"; echo'
        text = f"#!/bin/sh\ncase $4 in tree) echo '{self.other}';; *) {said};; esac\n"
        for place in (
            "python",
            ".venv/bin/python",
            "build/other tree/.venv/bin/python",
        ):
            self.put(place, text)
            (self.root / place).chmod(0o755)
        for name in ("BASE", "MAKEFLAGS", "MAKELEVEL"):
            os.environ.pop(name, None)
        os.environ["PYTHON3"] = str(self.root / "python")

    def make(self, *arguments: str) -> list[str]:
        command = ["make", "--silent", *arguments]
        printed = subprocess.check_output(command, cwd=self.root, text=True)
        return [" ".join(line.split()) for line in printed.splitlines()]

    def test_targets_run_in_the_bases_tree(self):
        for target, words in (
            ("train", "examples/train_mixed_dtype.py"),
            ("test", "-m pytest --durations=10"),
            ("bench", "benchmarks/distributed/fsdp/bench.py"),
        ):
            set_up, run = self.make(target, f"BASE={OTHER}")
            tool = f"{self.root} {OTHER} -B -m tools.setup_helpers setup"
            self.assertTrue(set_up.startswith(tool), set_up)
            self.assertTrue(run.startswith(f"{self.other} {OTHER} {words}"), run)
            _, run = self.make(target)
            self.assertTrue(run.startswith(f"{self.root} {words}"), run)

    def test_series_is_made_on_its_own_release(self):
        self.put("tools/upstream/series.py", f'RELEASE = "{OTHER}"\n')
        for more in ([], [f"BASE={DEFAULT}"]):
            set_up, run = self.make("series", *more)
            tool = f"{self.root} {OTHER} -B -m tools.setup_helpers setup"
            self.assertTrue(set_up.startswith(tool), set_up)
            self.assertTrue(run.startswith(f"{self.other} {OTHER} -m pytest"), run)

    def test_tools_are_told_the_base(self):
        for target in ("setup", "models", "wheel", "clean", "help"):
            *_, last = self.make(target, f"BASE={OTHER}")
            tool = f"{self.root} {OTHER} -B -m tools.setup_helpers"
            self.assertTrue(last.startswith(tool), last)
        with mock.patch.dict(os.environ, {"BASE": OTHER}):
            self.assertIn(f" {OTHER} -B -m", self.make("setup")[-1])

    def test_help_names_the_releases(self):
        status, stdout, _ = self.run_command("bases")
        self.assertEqual((status, stdout.count("\n")), (0, 1))
        for version in ALL:
            self.assertIn(version, stdout)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
