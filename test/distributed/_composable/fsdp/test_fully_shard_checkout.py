# Owner(s): ["oncall: distributed"]
"""Laying the branch over a source checkout, here a git tree of the release's files."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import (
    BuildTestCase,
    make_wheel,
    OURS,
    RELEASE_FILES,
    VERSIONS,
)
from fsdp_common.utils import RELEASE_ROOT

from tools import apply_to_checkout, record_release_digests
from tools.setup_helpers import wheel
from tools.setup_helpers.releases import DEFAULT, known, RELEASES, VARIABLE
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.tools


TESTS = apply_to_checkout.TESTS
OUR_TEST = f"{TESTS}/test_fully_shard_größe.py"
OUR_NEW_FILE = "torch/distributed/fsdp/new.py"
LAID = [OUR_TEST, OUR_NEW_FILE, OURS]
SIBLING = "torch/distributed/fsdp/theirs.py"


def origin_in(version: str) -> str:
    """Returns what a release has in the place of our file."""
    return f"origin = '{version}'\n"


class CheckoutTestCase(BuildTestCase):
    """Beside the clone, a checkout of the release that it lies over."""

    clone_name = "a clone of größe"

    def setUp(self) -> None:
        super().setUp()
        self.put(OUR_NEW_FILE, "origin = 'ours'\n")
        self.put(OUR_TEST, "import ours\n")
        self.put(f"{TESTS}/test_fully_shard_build.py", "import tools\n")
        self.put("README.md", "")
        self.git("add", "--all")
        self.set_up()
        self.record()
        self.checkout = self.scratch / "a checkout of größe"
        self.make_checkout(DEFAULT.version)

    def make_checkout(self, version: str, **changed: str) -> None:
        """Makes the checkout one of a release; all but what is ``changed`` is alike."""
        files = {
            **RELEASE_FILES,
            "version.txt": f"{version}a0\n",
            f"{TESTS}/theirs.py": "",
        }
        for path, text in (files | changed).items():
            (self.checkout / path).parent.mkdir(parents=True, exist_ok=True)
            (self.checkout / path).write_text(text)
        self.git_there("init", "--quiet")
        self.commit_there(f"v{version}")

    def record(self) -> None:
        """Of each release, which are alike but for one file that ours replace."""
        recorded = {}
        for release in RELEASES:
            of_release = record_release_digests.record(self.root, self.home / "base")
            of_release["commit"] = f"v{release.version}"
            if release != DEFAULT:
                text = origin_in(release.version)
                digest = hashlib.sha256(text.encode()).hexdigest()
                of_release["sha256"][OURS] = digest
            recorded[release.version] = of_release
        self.put(apply_to_checkout.DIGESTS, json.dumps(recorded))

    def git_there(self, *arguments: str) -> str:
        root, self.root = self.root, self.checkout
        try:
            return self.git(*arguments)
        finally:
            self.root = root

    def commit_there(self, tag: str = f"v{DEFAULT.version}") -> None:
        self.git_there("add", "--all")
        self.git_there("commit", "--quiet", "--message", "release")
        self.git_there("tag", "--force", tag)

    def apply(self, *options: str):
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = apply_to_checkout.main([*options, str(self.checkout)], self.root)
        return status, stdout.getvalue(), stderr.getvalue()

    def state_there(self) -> dict[str, str]:
        return {
            path.relative_to(self.checkout).as_posix(): path.read_text()
            for path in self.checkout.rglob("*")
            if path.is_file() and ".git" not in path.parts
        }

    def assert_refused(self, text: str) -> str:
        before = self.state_there()
        for options in ([], ["--check"]):
            status, stdout, stderr = self.apply(*options)
            self.assertEqual((status, stdout), (1, ""))
            self.assertTrue(stderr.startswith("error: "), stderr)
            self.assertIn(text, stderr)
            self.assertEqual(self.state_there(), before)
        return stderr


@instantiate_parametrized_tests
class TestApply(CheckoutTestCase):
    def test_lays_sources_and_tests_at_upstreams_places(self):
        before = self.state_there()
        status, stdout, stderr = self.apply()
        self.assertEqual((status, stderr), (0, ""))
        ours = {path: (self.root / path).read_text() for path in LAID}
        self.assertEqual(self.state_there(), before | ours)
        changed = self.git_there(
            "-c", "core.quotePath=no", "status", "--short", "-uall"
        )
        self.assertEqual(
            sorted(changed.splitlines()),
            sorted([f"?? {OUR_TEST}", f"?? {OUR_NEW_FILE}", f" M {OURS}"]),
        )
        self.assertIn(f"replaced  {OURS}\n", stdout)
        self.assertIn("1 files replaced, 2 added, 0 in place already", stdout)
        self.assertNotIn("note:", stdout)
        self.assertIn(f"cd '{self.checkout}'\n", stdout)
        for command in ("pip install --no-build-isolation -v -e .", "--series"):
            self.assertIn(command, stdout)

    def test_test_of_a_name_that_the_release_has(self):
        (ours,) = apply_to_checkout.LAID_AS
        theirs = self.checkout / ours
        theirs.write_text("a test of theirs\n")
        self.commit_there()
        self.put(ours, "a test of ours\n")
        self.git("add", "--all")
        self.assertEqual(self.apply()[0], 0)
        self.assertEqual(theirs.read_text(), "a test of theirs\n")
        laid = self.checkout / apply_to_checkout.LAID_AS[ours]
        self.assertEqual(laid.read_text(), "a test of ours\n")

    def test_check_only_tells(self):
        before = self.state_there()
        status, stdout, _ = self.apply("--check")
        self.assertEqual(status, 0)
        self.assertEqual(self.state_there(), before)
        for path in LAID:
            self.assertIn(path, stdout)
        self.assertIn("1 files would be replaced, 2 would be added", stdout)
        self.assertNotIn("--series", stdout)

    def test_second_time_changes_nothing(self):
        self.apply()
        before = self.state_there()
        status, stdout, _ = self.apply()
        self.assertEqual((status, self.state_there()), (0, before))
        self.assertIn("0 files replaced, 0 added, 3 in place already", stdout)

    def test_goes_on_where_it_was_cut_off(self):
        replace, done = os.replace, []

        def replace_once(*arguments):
            if done:
                raise OSError(28, "No space left on device")
            done.append(replace(*arguments))

        with mock.patch("os.replace", replace_once):
            status, _, stderr = self.apply()
        self.assertEqual((status, stderr), (1, "error: no space left on the disk\n"))
        self.assertEqual([p for p in self.state_there() if "partial" in p], [])
        self.assertIn("1 in place already", self.apply()[1])

    @parametrize("version", ["2.13.0", "2.13.0a0", "2.13.0rc3", "2.13.0a0+gitcf30153"])
    def test_versions_of_the_release(self, version: str):
        (self.checkout / "version.txt").write_text(version)
        self.assertEqual(self.apply("--check")[0], 0)

    @parametrize("version", [r.version for r in RELEASES if r != DEFAULT])
    def test_other_releases(self, version: str):
        """What is replaced is compared with that release's, and no other one's."""
        self.make_checkout(version)
        self.assert_refused(f"{OURS} is not the release's")
        self.make_checkout(version, **{OURS: origin_in(version)})
        status, stdout, stderr = self.apply()
        self.assertEqual((status, stderr), (0, ""))
        self.assertNotIn("note:", stdout)
        ours = {path: (self.root / path).read_text() for path in LAID}
        self.assertEqual(self.state_there() | ours, self.state_there())

    def test_release_under_the_number_of_another(self):
        other = RELEASES[-1].version
        self.make_checkout(DEFAULT.version, **{OURS: origin_in(other)})
        self.assert_refused(f"{OURS} is not the release's")

    def test_notes_what_may_differ(self):
        (self.checkout / SIBLING).write_text("origin = 'elsewhere'\n")
        self.commit_there()
        self.assertIn(f"note: {SIBLING} is not the release's", self.apply()[1])
        self.git_there("checkout", "--quiet", "--orphan", "other")
        self.git_there("commit", "--quiet", "--message", "other")
        self.assertIn("note: HEAD does not follow", self.apply()[1])


@instantiate_parametrized_tests
class TestRefusals(CheckoutTestCase):
    """Nothing is written where one file is not as it should be."""

    def test_lists_every_file_that_it_cannot_lay(self):
        (self.checkout / OURS).write_text("origin = 'elsewhere'\n")
        (self.checkout / OUR_TEST).write_text("a test of theirs\n")
        self.commit_there()
        lines = self.assert_refused("is left as it is").splitlines()[1:]
        expected = [
            f"  {OUR_TEST} is no file of the release, by {apply_to_checkout.DIGESTS}, "
            "and one of ours here",
            f"  {OURS} is not the release's",
        ]
        self.assertEqual(lines, expected)

    @parametrize("path", [OURS, OUR_NEW_FILE])
    @parametrize("staged", [True, False])
    def test_uncommitted_changes(self, path: str, staged: bool):
        (self.checkout / path).write_text("work\n")
        if staged:
            self.git_there("add", "--all")
        self.assert_refused(f"{path} has changes that are not committed")

    def test_changes_elsewhere_do_not_matter(self):
        (self.checkout / SIBLING).write_text("work\n")
        self.assertEqual(self.apply()[0], 0)

    def test_missing_file(self):
        (self.checkout / OURS).unlink()
        self.assert_refused(f"{OURS} has changes that are not committed")
        self.commit_there()
        self.assert_refused(f"{OURS} is missing, and the release has it")

    def test_links(self):
        folder = self.checkout / TESTS
        folder.rename(self.scratch / "elsewhere")
        folder.symlink_to(self.scratch / "elsewhere")
        self.commit_there()
        self.assert_refused(f"would go through a link, {TESTS}")

    def test_file_in_a_folders_place(self):
        shutil.rmtree(self.checkout / TESTS)
        (self.checkout / TESTS).write_text("")
        self.commit_there()
        self.assert_refused(f"needs a folder where {TESTS} is a file")

    @parametrize("version", ["2.12.0", "2.14.0a0", "2.13.1", "2.13.0.post1", "2.15.00"])
    def test_another_version(self, version: str):
        (self.checkout / "version.txt").write_text(version)
        told = self.assert_refused(f"is PyTorch {version}; this branch is for ")
        self.assertIn(known("or"), told)

    def test_no_source_tree(self):
        (self.checkout / "version.txt").unlink()
        self.assert_refused("is not a PyTorch source tree")
        self.checkout = self.scratch / "none"
        self.assert_refused("there is no folder")

    def test_no_git(self):
        shutil.rmtree(self.checkout / ".git")
        self.assert_refused("is not the top folder of a git checkout")

    def test_draft(self):
        self.put("torch/draft.py", "")
        self.assert_refused("git does not track torch/draft.py")


def words_of(source: Path) -> set[object]:
    """Returns the modules that a file imports, and its constants."""
    words: set[object] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            words |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            words.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Constant):
            words.add(node.value)
    return words


def sources_of(name: str) -> list[Path]:
    """Returns the file of that name beside the tests, or those of the package."""
    folder = REPOSITORY / TESTS
    return [*folder.glob(f"{name}.py"), *folder.glob(f"{name}/*.py")]


WITHOUT_A_NAME = """
import torch, torch.distributed
torch.__version__ = "2.12.0"
del torch.distributed.all_gather_single
import torch.distributed.fsdp
"""


class TestDigests(BuildTestCase):
    """`record_release_digests.py` knows what is set up, and keeps what else is known."""

    def recorded(self, *wheels: Path) -> dict:
        arguments = [str(path) for path in wheels]
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            status = record_release_digests.main(arguments, self.root)
        self.assertEqual(status, 0)
        found = json.loads((self.root / record_release_digests.DIGESTS).read_text())
        lacking = {
            v
            for v in VERSIONS
            if f"nothing is known of {v}: make setup RELEASE={v}" in stdout.getvalue()
        }
        self.assertEqual({*VERSIONS} - lacking, {*found})
        return found

    def set_up_with(self, version: str) -> Path:
        """Sets up a release that has a file of its own; returns its wheel."""
        self.choose(version)
        files = {SIBLING: origin_in(version)}
        self.wheel = make_wheel(self.scratch, version=f"{version}+fake", files=files)
        self.set_up(self.wheel)
        return self.wheel

    def test_each_release_in_place_or_by_its_wheel(self):
        (self.root / "tools").mkdir()
        wheels, found = [], {}
        for number, version in enumerate(VERSIONS, 1):
            wheels.append(self.set_up_with(version))
            found = self.recorded()
            self.assertEqual([*found], VERSIONS[:number])
            told = found[version]["sha256"]
            self.assertEqual(
                told[SIBLING], apply_to_checkout.sha256(self.home / "base" / SIBLING)
            )
            self.assertNotIn("torch/nn/functional.py", told)
        # Of what is no longer set up, it is kept
        del os.environ[VARIABLE]
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assertEqual(self.recorded(), found)
        (self.root / record_release_digests.DIGESTS).unlink()
        self.assertEqual(self.recorded(*reversed(wheels)), found)

    def test_wheel_of_no_release(self):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            unknown = make_wheel(self.scratch, version="2.12.0")
            status = record_release_digests.main([str(unknown)], self.root)
        self.assertEqual(status, 1)
        self.assertIn(known(), stderr.getvalue())


class TestRepository(TestCase):
    """What is tracked here fits the release, and what is laid needs nothing else."""

    def test_digests_are_those_of_the_release(self):
        if not RELEASE_ROOT.is_dir():
            raise unittest.SkipTest("needs the release")
        tracked = json.loads((REPOSITORY / apply_to_checkout.DIGESTS).read_text())
        version = wheel.unpacked_version(RELEASE_ROOT).partition("+")[0]
        recorded = record_release_digests.record(REPOSITORY, RELEASE_ROOT)
        again = "run python3 tools/record_release_digests.py again"
        self.assertEqual(tracked[version], recorded, again)

    def test_digests_of_every_release_are_there(self):
        tracked = json.loads((REPOSITORY / apply_to_checkout.DIGESTS).read_text())
        self.assertEqual([*tracked], [release.version for release in RELEASES])
        for known_of in tracked.values():
            self.assertRegex(known_of["commit"], "^[0-9a-f]{40}$")
            self.assertGreater(len(known_of["sha256"]), 5)

    def test_versions_are_in_one_file(self):
        """What builds, checks and lays takes them from it."""
        lists = "tools/setup_helpers/releases.py"
        files = ["setup.py", "Makefile", "CMakeLists.txt", ".gitignore"]
        files += [f"tools/{path.name}" for path in (REPOSITORY / "tools").glob("*.py")]
        helpers = (REPOSITORY / "tools/setup_helpers").glob("*.py")
        files += [f"tools/setup_helpers/{path.name}" for path in helpers]
        for file in {*files} - {lists}:
            code = re.sub(r"(?m)#.*$", "", (REPOSITORY / file).read_text())
            for release in RELEASES:
                self.assertNotIn(release.version, code, file)

    def test_torch_of_another_release_is_told_which_fit(self):
        """By what it lacks, so that a release that is made to have it is taken."""
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_A_NAME],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        error = (
            f"ImportError: These files of torch.distributed.fsdp fit PyTorch {known()}. "
            "This is 2.12.0, which lacks torch.distributed.all_gather_single: "
            "install one of those"
        )
        self.assertEqual(done.stderr.count("Traceback"), 1, done.stderr)
        self.assertEqual(done.stderr.splitlines()[-1], error)

    def test_what_stays_here_is_here(self):
        for name in apply_to_checkout.STAY_HERE:
            self.assertTrue(sources_of(name), name)

    def test_laid_tests_need_nothing_that_stays_here(self):
        stay = apply_to_checkout.STAY_HERE
        for path, source in apply_to_checkout.files_to_lay(REPOSITORY).items():
            words = words_of(source)
            for word in ("tools", "docs", "benchmarks", "examples", *stay):
                self.assertNotIn(word, words, f"{path} needs {word}: see STAYS_OF")

    def test_what_stays_here_needs_what_is_only_here(self):
        """Each for the reason that it is listed for, so tests of features travel."""
        needs = {
            "build": {"tools", "fsdp_build"},
            "tools": {"tools"},
            "benchmarks": {"benchmarks"},
            "examples": {"examples", "fsdp_clients"},
            "pages": {"docs", "tools"},
        }
        self.assertEqual([*needs], [*apply_to_checkout.STAYS_OF])
        for kind, names in apply_to_checkout.STAYS_OF.items():
            for name in names:
                words = set().union(*map(words_of, sources_of(name)))
                self.assertTrue(words & needs[kind], f"{name} is no test of {kind}")

    def test_contributing_tells_what_stays_here(self):
        text = " ".join((REPOSITORY / "CONTRIBUTING.md").read_text().split())
        (told,) = re.findall(r"Tests of what is only here \((.+?)\) stay here", text)
        self.assertEqual(told.split(", "), [*apply_to_checkout.STAYS_OF])

    def test_runs_as_a_script(self):
        command = [
            sys.executable,
            "-B",
            "tools/apply_to_checkout.py",
            "--check",
            "none",
        ]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, f"error: there is no folder {REPOSITORY}/none\n")


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
