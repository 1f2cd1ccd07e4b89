# Owner(s): ["oncall: distributed"]
"""The stack of commits for upstream: each trains and passes the tests that it brings.

``make stack`` runs all of them, with ``QUICK=1`` one of each kind, and ``make test`` one
of each kind that the first brings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_test_utils import BASE_ROOT, BYTECODE_CACHE, on_first_rank, REPO_ROOT

from tools import apply_to_checkout, stack
from tools.setup_helpers import links, wheel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# "all", "quick" or none
STACK_RUN = os.environ.get("FSDP_STACK")
NUMBERS = [*range(len(stack.STACK))]


def git(checkout: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")
    command = ["git", *identity, "-C", str(checkout), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_checkout(checkout: Path) -> None:
    """
    Makes a git tree that is shaped like upstream's, of the release, and can be run: its
    files in the folder that the branch changes, and links to all others.
    """
    released = [*(BASE_ROOT / stack.SOURCES).glob("*.py")]
    own = {f"{stack.SOURCES}/{path.name}" for path in released}
    for link in links.plan_links(REPO_ROOT, own):
        (checkout / link).parent.mkdir(parents=True, exist_ok=True)
        (checkout / link).symlink_to(BASE_ROOT / link)
    (checkout / stack.SOURCES).mkdir()
    for path in released:
        shutil.copyfile(path, checkout / stack.SOURCES / path.name)
    version = wheel.unpacked_version(BASE_ROOT).partition("+")[0]
    (checkout / "version.txt").write_text(f"{version}a0\n")
    # Where tests look for the release
    (checkout / "build").symlink_to(REPO_ROOT / "build")
    git(checkout, "init", "--quiet")
    git(checkout, "config", "user.name", "Tester")
    git(checkout, "config", "user.email", "tester@example.com")
    git(checkout, "add", "version.txt", *sorted(own))
    git(checkout, "commit", "--quiet", "--message", "release")


@on_first_rank
class TestTable(TestCase):
    def test_every_file_to_lay_is_in_one_commit(self):
        files = apply_to_checkout.files_to_lay(REPO_ROOT).values()
        paths = [path.relative_to(REPO_ROOT).as_posix() for path in files]
        lacking = [path for path in paths if stack.commit_of(path) is None]
        self.assertEqual(lacking, [])
        named = [
            *(f"{stack.SOURCES}/{name}.py" for c in stack.STACK for name in c.sources),
            *(f"{stack.TESTS}/{name}.py" for c in stack.STACK for name in c.tests),
        ]
        self.assertEqual(sorted([*named, stack.INIT]), sorted(paths))

    def test_package_grows_with_the_stack(self):
        package = (REPO_ROOT / stack.INIT).read_text()
        grown = [stack.without_later(package, number) for number in NUMBERS]
        self.assertEqual(grown[-1], package)
        for less, more in zip(grown, grown[1:]):
            self.assertLess({*less.splitlines()}, {*more.splitlines(), ""} | {*more})
        self.assertNotIn("doors.", grown[0])
        self.assertIn("fully_shard,", grown[0])

    def test_messages_say_why_what_and_how_it_was_tested(self):
        for commit in stack.STACK:
            title, _, body = commit.message().partition("\n\n")
            self.assertRegex(title, r"^\[FSDP2\] [A-Z].{,60}$")
            self.assertIn("Test plan:", body)
            for line in commit.message().splitlines():
                self.assertLessEqual(len(line), 88, line)


@on_first_rank
@instantiate_parametrized_tests
class TestStack(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.checkout = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        make_checkout(cls.checkout)
        cls.status = apply_to_checkout.main(["--stack", str(cls.checkout)])
        log = git(cls.checkout, "log", "--reverse", "--format=%H %s")
        cls.commits = [line.split(" ", 1) for line in log.splitlines()][1:]

    def test_ends_as_the_branch(self):
        self.assertEqual(self.status, 0)
        titles = [title for _, title in self.commits]
        self.assertEqual(titles, [commit.title for commit in stack.STACK])
        git(self.checkout, "checkout", "--quiet", self.commits[-1][0])
        for path, source in apply_to_checkout.files_to_lay(REPO_ROOT).items():
            self.assertEqual((self.checkout / path).read_text(), source.read_text())

    @parametrize("number", NUMBERS if STACK_RUN else NUMBERS[:1])
    def test_passes_what_it_brings(self, number):
        git(self.checkout, "checkout", "--quiet", self.commits[number][0])
        tests = [f"{stack.TESTS}/{name}.py" for name in stack.STACK[number].test_files]
        laid = [apply_to_checkout.LAID_AS.get(test, test) for test in tests]
        if not laid:
            laid = ["--version"]  # imports what it would run the tests with
        tier = ("--quick",)
        if STACK_RUN == "all":
            tier = ("--numprocesses=auto", "--dist=loadfile")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", *tier, *laid]
        path = os.pathsep.join([str(self.checkout), str(REPO_ROOT)])
        done = subprocess.run(
            command,
            cwd=self.checkout,
            env={**os.environ, **BYTECODE_CACHE, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    run_tests()
