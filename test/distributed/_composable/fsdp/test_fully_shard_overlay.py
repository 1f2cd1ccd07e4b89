# Owner(s): ["oncall: distributed"]
"""``tools/overlay.py`` over a small torch, stopped at each step, and over a checkout."""

import csv
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsdp_helpers.build import REPOSITORY
from fsdp_helpers.build import utils as small
from fsdp_helpers.common.utils import RELEASE_ROOT

from tools import overlay
from tools.releases import DEFAULT, known, ToolError, tracked_files
from torch.testing._internal.common_utils import parametrize, run_tests
from torch.version import __version__ as TORCH


pytestmark = pytest.mark.tools


OURS = [*small.REPLACED, *small.ADDED]
# How a child ends
DONE, FAILED, DONE_ALL_THE_SAME, KILLED = range(4)


class SiteTestCase(small.ScratchTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.root, self.site = self.scratch / "clone", self.scratch / "site-packages"
        self.dist_info = small.make_site(self.site)
        for number, path in enumerate(sorted(self.site.rglob("*.py"))):
            os.utime(path, ns=(0, 10**18 + number))
        (self.site / small.REPLACED[0]).chmod(0o640)
        small.make_clone(self.root)
        self.overlay = overlay.Overlay(self.site, self.root)
        self.release = self.state()

    def state(self) -> dict[str, Any]:
        """Returns all of the site: content, mode and time of each file."""
        state: dict[str, Any] = {}
        for path in sorted(self.site.rglob("*")):
            if path.is_symlink():
                state[self.name_of(path)] = os.readlink(path)
            elif path.is_file():
                status = path.lstat()
                of = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
                state[self.name_of(path)] = of
        return state

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.site).as_posix()

    def seen(self) -> dict[str, bytes]:
        """Returns what an import of torch, and pip, would read now."""
        return {
            name: path.read_bytes()
            for path in self.site.rglob("*")
            if path.is_file()
            and not (name := self.name_of(path)).startswith(overlay.FOLDER)
            and not name.endswith(".partial")
        }

    def assert_laid(self) -> None:
        """The branch is seen, and RECORD is true of it: a row for each file."""
        expected = {name: of[0] for name, of in self.release.items()}
        expected |= {path: (self.root / path).read_bytes() for path in OURS}
        seen, name = self.seen(), f"{self.dist_info.name}/RECORD"
        rows = {row[0]: row[1:] for row in csv.reader(seen.pop(name).decode().split())}
        expected.pop(name)
        self.assertEqual(seen, expected)
        for path, (digest, nbytes) in rows.items():
            if digest:
                data = (self.site / path).read_bytes()
                found = [f"sha256={small.encoded(data)}", str(len(data))]
                self.assertEqual([digest, nbytes], found, path)
        self.assertEqual({*rows}, {*self.state()})

    def assert_refused(self, text: str, act: Callable[[], object]) -> None:
        before = self.state()
        with self.assertRaisesRegex(ToolError, text):
            act()
        self.assertEqual(self.state(), before)


class TestOverlay(SiteTestCase):
    def test_lays_and_gives_back_every_byte(self):
        # Environments may share files by hard links
        shared = self.site.with_name("cache")
        shutil.copytree(self.site, shared, copy_function=os.link)
        before = {path: path.read_bytes() for path in shared.rglob("*.py")}
        self.assertIn("no overlay", self.overlay.status())
        for _ in range(2):
            self.assertIn("the branch, as it is in", self.overlay.lay())
            self.assert_laid()
        small.write(self.root, {small.REPLACED[0]: "newer"})
        self.assertIn("as it is not in", self.overlay.status())
        self.overlay.lay()
        self.assert_laid()
        for _ in range(2):
            self.assertIn("no overlay", self.overlay.undo())
            self.assertEqual(self.state(), self.release)
        self.assertEqual({path: path.read_bytes() for path in before}, before)

    def test_records_what_is_the_releases(self):
        small.write(self.site, {small.BESIDE: "another", small.OTHER: "known now"})
        self.assert_refused(f"{small.BESIDE} is not the release's", self.overlay.lay)
        overlay.record(self.site, self.root)
        digests = json.loads((self.root / overlay.DIGESTS).read_text())[DEFAULT]
        self.assertEqual({*digests}, {*small.REPLACED, small.BESIDE, small.OTHER})
        self.overlay.lay()
        record = partial(overlay.record, self.site, self.root)
        self.assert_refused("--undo first", record)
        self.overlay.undo()  # and where the same files are no overlay, as in `.venv`
        small.write(self.site, {p: (self.root / p).read_text() for p in OURS})
        self.assert_refused("the release's own", record)


class TestRefusals(SiteTestCase):
    WRONG = {
        "replaced": (small.REPLACED[1], "somebody's", f"{small.REPLACED[1]} is not"),
        "added": (small.ADDED[0], "somebody's", f"{small.ADDED[0]} is n"),
        "missing": (small.BESIDE, None, f"{small.BESIDE} is missing"),
        "link": (small.BESIDE, Path(small.OTHER), f"{small.BESIDE} is a link"),
        "release": (
            "torch/version.py",
            "__version__ = '2.12.0'\n",
            f"2.12.0: the branch fits {DEFAULT}",
        ),
    }

    @parametrize("name", WRONG)
    def test_a_site_that_is_not_the_release(self, name: str):
        path, content, text = self.WRONG[name]
        (self.site / path).unlink(missing_ok=True)
        if isinstance(content, Path):
            (self.site / path).symlink_to(self.site / content)
        elif content is not None:
            small.write(self.site, {path: content})
        self.assert_refused(text, self.overlay.lay)

    @parametrize("is_edited", [False, True])
    def test_a_file_that_was_changed_after_it_was_laid(self, is_edited: bool):
        self.overlay.lay()
        # As some editors do, to replace a link by a file
        place = self.site / small.ADDED[1]
        data = b"edited there" if is_edited else place.read_bytes()
        place.unlink()
        place.write_bytes(data)
        self.assert_refused(small.ADDED[1], self.overlay.undo)
        self.assertIn("changed since", self.overlay.status())


class TestCutOff(SiteTestCase):
    WRITES = {
        "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod",
        "shutil.copyfile", "shutil.rmtree", "os.utime", "os.truncate",
    }  # fmt: skip

    def stopped_before(self, number: int, act: str, is_killed: bool) -> int:
        """Acts in a child that stops before its ``number``-th write. Returns its status."""
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = number

        def before(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            is_open = event == "open" and isinstance(arguments[1], str)
            if event in self.WRITES or (is_open and arguments[1] not in ("r", "rb")):
                left -= 1
                if left == 0 and is_killed:
                    os._exit(KILLED)
                if left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            sys.addaudithook(before)
            getattr(self.overlay, act)()
        except BaseException:
            os._exit(FAILED)
        os._exit(DONE if left > 0 else DONE_ALL_THE_SAME)

    @parametrize("is_killed", [True, False])
    @parametrize("act", ["lay", "undo"])
    def test_stopped_before_each_write(self, act: str, is_killed: bool) -> None:
        self.overlay.lay()
        forms = [{name: of[0] for name, of in self.release.items()}, self.seen()]
        for number in range(1, 1000):
            if act == "lay":
                self.overlay.undo()
            status = self.stopped_before(number, act, is_killed)
            self.assertIn(self.seen(), forms, f"stopped before write {number}")
            if status in (DONE, DONE_ALL_THE_SAME):
                self.assertEqual(self.seen(), forms[act == "lay"])
            self.assertIn(status, (DONE, KILLED) if is_killed else range(KILLED))
            if self.overlay.current.is_symlink() and self.seen() == forms[0]:
                self.assertIn("an overlay was cut off", self.overlay.status())
            # As the next run of the command begins
            self.overlay.settle()
            self.assertIn(self.seen(), forms, f"stopped before write {number}")
            self.overlay.undo()
            self.assertEqual(self.state(), self.release)
            self.overlay.lay()
            self.assert_laid()
            if status == DONE:
                break
        self.assertGreater(number, 30)


class TestCommand(SiteTestCase):
    """The command, run by a Python whose torch is the small one."""

    def run_tool(self, *arguments: object, status: int = 0) -> str:
        env = {"PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        tool, env = self.root / "tools/overlay.py", os.environ | env
        options = {"status": status, "env": env, "cwd": self.site.parent}
        return small.run(sys.executable, tool, *arguments, **options)

    def test_lay_status_undo(self):
        self.assertIn("no overlay", self.run_tool("--status"))
        self.site.with_name("python").symlink_to(sys.executable)
        self.run_tool("--python", "./python")
        self.assert_laid()
        self.run_tool("--undo")
        self.assertEqual(self.state(), self.release)

    def test_a_folder_for_a_torch_that_is_read_only(self):
        folder = self.site.with_name("to")
        self.run_tool("--to", folder)
        self.assertEqual(self.state(), self.release)
        module = small.ADDED[0].removesuffix(".py").replace("/", ".")
        code = f"import {module} as m, torch; print(m.origin, torch.__version__)"
        env = os.environ | {"PYTHONPATH": str(folder)}
        found = small.run(sys.executable, "-c", code, env=env, cwd="/").strip()
        self.assertEqual(found, f"branch: {small.ADDED[0]} {small.VERSION}")
        self.assertFalse((folder / small.ADDED[0]).is_symlink())
        self.assertIn("is there", self.run_tool("--to", folder, status=1))


RELEASE = TORCH.partition("+")[0]
OWNER = '# Owner(s): ["oncall: distributed"]'
NAMED = (REPOSITORY / "tools/upstream_test_names.txt").read_text()
NAMES = {line for line in NAMED.splitlines() if line.endswith(".py")}


# What October's public state of 2.16 has, as edits of the release's files
LATER = {
    "_extensions_data": ("_fsdp_param", "_extensions_data", "_all_gather_metadata"),
    "init_all_gather_outputs": ("_fsdp_param", "input_numels: ", "numels: "),
    "_all_gather_layout": ("_fully_shard", "gather_comm = ", "gather_layout = "),
    "PrepareReduceScatterInputsFn": (
        "_fully_shard",
        "import functools\n",
        "import functools\nfrom ._fsdp_collectives import (\n"
        "    _default_reduce_scatter_input_fn,\n    PrepareReduceScatterInputsFn,\n)\n",
    ),
}


class TestAnotherRelease(small.ScratchTestCase):
    """The branch beside files of a release that it was not written for."""

    def import_beside(self, path: str, old: str, new: str, status: int) -> str:
        text = (RELEASE_ROOT / path).read_text()
        self.assertIn(old, text)
        small.write(self.scratch / "edited", {path: text.replace(old, new)})
        own = [*tracked_files(REPOSITORY, "torch"), path]
        targets = overlay.torch_links(RELEASE_ROOT, REPOSITORY, own)
        targets[path] = str(self.scratch / "edited" / path)
        overlay.lay_links(self.scratch / "tree", targets)
        env = os.environ | {"PYTHONPATH": str(self.scratch / "tree")}
        command = "import torch.distributed.fsdp; print(torch.__version__)"
        return small.run(sys.executable, "-c", command, status=status, env=env)

    @parametrize("name", LATER)
    def test_what_is_gone_or_new_is_an_import_error(self, name: str):
        file, old, new = LATER[name]
        said = self.import_beside(f"{small.PACKAGE}/{file}.py", old, new, status=1)
        fits = f"{known('or')}.*tools/overlay.py --undo"
        self.assertRegex(said, f"ImportError: torch {re.escape(TORCH)}.*{name}.*{fits}")

    def test_a_patch_release_with_the_same_files_is_imported(self):
        said = self.import_beside("torch/version.py", TORCH, "2.15.9", status=0)
        self.assertIn("2.15.9", said)


class TestCheckout(small.ScratchTestCase):
    """Our files over a tree with all of upstream's test names."""

    def setUp(self) -> None:
        super().setUp()
        self.checkout = self.scratch / "pytorch"
        if not RELEASE_ROOT.is_dir():
            self.skipTest("needs the release's own files")
        digests = json.loads((REPOSITORY / overlay.DIGESTS).read_text())[RELEASE]
        files = {path: (RELEASE_ROOT / path).read_text() for path in digests}
        files |= dict.fromkeys((f"{overlay.TESTS}/{name}" for name in NAMES), "theirs")
        files |= {"version.txt": f"{RELEASE}a0\n", ".gitignore": "build\n"}
        small.write(self.checkout, files)
        small.commit_all(self.checkout)

    def test_one_commit_of_our_files_that_replaces_no_test_of_upstreams(self):
        tool = ("python3", REPOSITORY / "tools/overlay.py", self.checkout)
        ours = overlay.files_to_lay()
        start = small.git(self.checkout, "rev-parse", "HEAD")
        self.assertIn(f"one commit on {overlay.COMMIT_BRANCH}", small.run(*tool))
        below = small.git(self.checkout, "rev-parse", f"{overlay.COMMIT_BRANCH}~")
        self.assertEqual(below, start)
        self.assertEqual(small.git(self.checkout, "status", "--porcelain"), "")
        changed = small.git(self.checkout, "diff", "--name-only", "HEAD~").splitlines()
        self.assertEqual({*changed}, {*ours})
        for path, source in ours.items():
            self.assertTrue((self.checkout / path).read_bytes() == source.read_bytes())
        for name in NAMES:
            text = (self.checkout / overlay.TESTS / name).read_text()
            self.assertEqual(text, "theirs")
        self.assertIn("files are there", small.run(*tool))

    def test_checkout_that_is_not_as_released_is_refused(self):
        def assert_refused(text: str) -> None:
            state = ("status", "--porcelain", "--branch")
            before = small.git(self.checkout, *state)
            with self.assertRaisesRegex(ToolError, text):
                overlay.commit_branch(self.checkout)
            self.assertEqual(small.git(self.checkout, *state), before)

        theirs = "torch/distributed/fsdp/__init__.py"
        ours = f"{overlay.TESTS}/test_fully_shard_hsdp.py"
        small.write(self.checkout, {theirs: "", ours: ""})
        assert_refused(f"not committed:(.|\n)*{ours}")
        small.commit_all(self.checkout)  # as a vendor does
        assert_refused(f"{ours} is no file(.|\n)*{theirs} is not the release's")
        (self.checkout / "version.txt").unlink()
        assert_refused("is not a PyTorch source tree")

    def test_names_owners_and_what_stays_here(self):
        """No test lacks a helper there."""
        for path, source in overlay.files_to_lay().items():
            text = source.read_text()
            if "/test_" in path:
                self.assertTrue(text.startswith(OWNER), path)
            self.assertNotRegex(text, "fsdp_helpers\\W(build|clients)|from tools", path)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
