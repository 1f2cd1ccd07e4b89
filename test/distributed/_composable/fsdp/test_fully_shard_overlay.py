# Owner(s): ["oncall: distributed"]
"""Laying the branch over an installed torch, and taking it off, whatever happens meanwhile."""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_build import REPOSITORY
from fsdp_common.utils import LAUNCHED_RANK, RELEASE_ROOT

from tools import overlay
from tools.overlay import FOLDER, Overlay
from tools.setup_helpers.digests import DIGESTS
from tools.setup_helpers.releases import RELEASES
from tools.setup_helpers.report import SetupError
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.tools


PACKAGE = "torch/distributed/fsdp/_fully_shard"
REPLACED = [f"{PACKAGE}/__init__.py", f"{PACKAGE}/_fsdp_param_group.py"]
ADDED = [f"{PACKAGE}/_fsdp_layout.py", f"{PACKAGE}/_fsdp_scaling.py"]
BESIDE = f"{PACKAGE}/_fsdp_state.py"
OTHER = f"{PACKAGE}/_fully_shard.py"  # not known to the branch
VERSION = RELEASES[0].version
# How a child ends
DONE, FAILED, DONE_ALL_THE_SAME, KILLED = range(4)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class SiteTestCase(TestCase):
    """A small torch that is installed, and a clone of a branch for it."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name, "a clone of größe")
        self.site = Path(scratch.name, "site-packages")
        self.dist_info = self.site / f"torch-{VERSION}+cpu.dist-info"
        for path in [*REPLACED, *ADDED]:
            write(self.root / path, f"# ours: {path}\n" * 9)
        files = {path: f"# release: {path}\n" for path in [*REPLACED, BESIDE, OTHER]}
        known = {p: digest(t.encode()) for p, t in files.items() if p != OTHER}
        of_release = {"commit": "v", "sha256": known}
        recorded = {release.version: of_release for release in RELEASES}
        write(self.root / DIGESTS, json.dumps(recorded))
        files["torch/__init__.py"] = ""
        files["torch/version.py"] = f"__version__ = '{VERSION}+cpu'\ndebug = False\n"
        files[f"{self.dist_info.name}/METADATA"] = f"Name: torch\nVersion: {VERSION}\n"
        for number, (path, text) in enumerate(files.items()):
            write(self.site / path, text)
            os.utime(self.site / path, ns=(0, 10**18 + number))
        (self.site / REPLACED[0]).chmod(0o640)
        write(self.dist_info / "RECORD", self.record_of(files))
        self.overlay = Overlay(self.site, self.root)
        self.release = self.state()

    def record_of(self, files: dict[str, str]) -> str:
        lines = []
        for path, text in files.items():
            of = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            lines.append(f"{path},sha256={of.decode().rstrip('=')},{len(text)}\n")
        return "".join(lines) + f"{self.dist_info.name}/RECORD,,\n"

    def state(self, site: Path | None = None) -> dict[str, Any]:
        """Returns all of a site: content, mode and time of each file."""
        site = site or self.site
        state: dict[str, Any] = {}
        for path in sorted(site.rglob("*")):
            name = path.relative_to(site).as_posix()
            if path.is_symlink():
                state[name] = os.readlink(path)
            elif path.is_file():
                status = path.stat()
                state[name] = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
        return state

    def seen(self) -> dict[str, bytes]:
        """Returns what an import of torch, and pip, would read now."""
        seen = {}
        for path in self.site.rglob("*"):
            name = path.relative_to(self.site).as_posix()
            is_kept = name.startswith((FOLDER, f"{FOLDER}.partial"))
            if path.is_file() and not is_kept and not name.endswith(".partial"):
                seen[name] = path.read_bytes()
        return seen

    def expected(self) -> dict[str, bytes]:
        """Returns what is seen once the branch is laid, but for RECORD."""
        seen = {name: of[0] for name, of in self.release.items()}
        seen |= {p: (self.root / p).read_bytes() for p in [*REPLACED, *ADDED]}
        del seen[f"{self.dist_info.name}/RECORD"]
        return seen

    def assert_laid(self) -> None:
        seen = self.seen()
        seen.pop(f"{self.dist_info.name}/RECORD")
        self.assertEqual(seen, self.expected())
        self.assert_record_is_true()

    def assert_record_is_true(self) -> None:
        """Each file has its row, and each row with a digest its file."""
        with (self.dist_info / "RECORD").open(newline="") as file:
            rows = {row[0]: row[1:] for row in csv.reader(file)}
        for path, (of, nbytes) in rows.items():
            data = (self.site / path).read_bytes()
            if of:
                encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
                self.assertEqual(of, f"sha256={encoded.decode().rstrip('=')}", path)
                self.assertEqual(int(nbytes), len(data), path)
        self.assertEqual({*rows}, {*self.state()})

    def assert_refused(self, text: str, act: Callable[[], object]) -> None:
        before = self.state()
        with self.assertRaisesRegex(SetupError, text):
            act()
        self.assertEqual(self.state(), before)


class TestOverlay(SiteTestCase):
    def test_lays_and_gives_back_every_byte(self):
        self.assertIn("the branch, as it is in", self.overlay.lay())
        self.assert_laid()
        self.assertIn("no overlay", self.overlay.undo())
        self.assertEqual(self.state(), self.release)

    def test_files_that_environments_share_by_hard_links(self):
        # What is written into such a file is in the cache, and in other environments
        cache = self.root.parent / "cache"
        shutil.copytree(self.site, cache, copy_function=os.link)
        self.overlay.lay()
        self.assert_laid()
        self.assertEqual(self.state(cache), self.release)
        self.overlay.undo()
        self.assertEqual(self.state(cache), self.release)
        self.assertEqual(self.state(), self.release)

    def test_twice_is_once(self):
        self.overlay.lay()
        laid = self.state()
        self.overlay.lay()
        self.assertEqual(self.state(), laid)
        for _ in range(2):
            self.overlay.undo()
            self.assertEqual(self.state(), self.release)

    def test_another_version_of_the_branch_takes_the_place_of_the_first(self):
        self.overlay.lay()
        (self.root / ADDED[1]).unlink()
        write(self.root / REPLACED[1], "# ours, later\n")
        write(self.root / f"{PACKAGE}/_fsdp_later.py", "# ours, new\n")
        later = Overlay(self.site, self.root)
        self.assertIn("the branch, as it is not in", later.status())
        later.lay()
        self.assertFalse((self.site / ADDED[1]).exists())
        self.assertEqual((self.site / REPLACED[1]).read_text(), "# ours, later\n")
        self.assert_record_is_true()
        later.undo()
        self.assertEqual(self.state(), self.release)

    def test_undo_drops_bytecode_of_what_only_the_branch_has(self):
        self.overlay.lay()
        ours = self.site / f"{PACKAGE}/__pycache__/_fsdp_layout.cpython-311.pyc"
        theirs = self.site / f"{PACKAGE}/__pycache__/_fully_shard.cpython-311.pyc"
        write(ours, "")
        write(theirs, "")
        self.overlay.undo()
        self.assertFalse(ours.exists())
        self.assertTrue(theirs.exists())

    def test_torch_that_was_installed_anew_has_no_overlay(self):
        self.overlay.lay()
        for path in [*REPLACED, f"{self.dist_info.name}/RECORD"]:
            (self.site / path).write_bytes(self.release[path][0])
        for path in ADDED:
            (self.site / path).unlink()
        self.assertIn("no overlay", self.overlay.status())
        self.overlay.undo()
        self.assertEqual(self.seen(), {n: of[0] for n, of in self.release.items()})
        self.overlay.lay()
        self.assert_laid()

    def test_status_writes_nothing(self):
        self.assertIn("no overlay", self.overlay.status())
        self.assertEqual(self.state(), self.release)
        self.overlay.lay()
        laid = self.state()
        self.assertIn(f"torch {VERSION}+cpu in {self.site}", self.overlay.status())
        self.assertEqual(self.state(), laid)

    def test_without_a_record(self):
        (self.dist_info / "RECORD").unlink()
        before = self.state()
        self.overlay.lay()
        self.assertEqual(self.seen().keys(), self.expected().keys())
        self.overlay.undo()
        self.assertEqual(self.state(), before)


@instantiate_parametrized_tests
class TestRefusals(SiteTestCase):
    @parametrize("path", [REPLACED[1], BESIDE, ADDED[0]])
    def test_a_changed_file(self, path: str):
        """One that ours replace, one that they are written for, one in their place."""
        write(self.site / path, "# a vendor's\n")
        self.assert_refused(rf"(?s)  {path} is .*series", self.overlay.lay)

    def test_a_file_that_is_missing(self):
        (self.site / BESIDE).unlink()
        self.assert_refused(f"  {BESIDE} is missing", self.overlay.lay)

    def test_a_link(self):
        elsewhere = self.root / "elsewhere.py"
        shutil.move(self.site / REPLACED[1], elsewhere)
        (self.site / REPLACED[1]).symlink_to(elsewhere)
        self.assert_refused("is a link to", self.overlay.lay)

    def test_files_that_are_not_known_may_be_anything(self):
        write(self.site / OTHER, "# somebody's\n")
        self.overlay.lay()
        self.assertEqual((self.site / OTHER).read_text(), "# somebody's\n")

    @parametrize("version", ["2.12.0", f"{VERSION}a0", f"{VERSION}.dev20261101", "3.0"])
    def test_a_release_that_does_not_fit(self, version: str):
        write(self.site / "torch/version.py", f"__version__ = '{version}+cu130'\n")
        with self.assertRaises(SetupError) as raised:
            Overlay(self.site, self.root).lay()
        text = str(raised.exception)
        self.assertEqual(len(text.splitlines()), 1)
        self.assertIn(f"torch {version}+cu130", text)
        self.assertIn("2.13.0, 2.14.1 and 2.15.0", text)

    @parametrize("release", RELEASES, name_fn=lambda release: release.version[2:4])
    def test_any_build_of_a_release_that_fits(self, release):
        write(self.site / "torch/version.py", f"__version__ = '{release.version}+x'\n")
        Overlay(self.site, self.root).lay()
        self.assertEqual(
            self.seen().keys() - self.expected().keys(),
            {f"{self.dist_info.name}/RECORD"},
        )

    def test_a_file_that_was_changed_after_it_was_laid(self):
        self.overlay.lay()
        write(self.site / REPLACED[1], "# somebody's\n")
        self.assertIn(f"changed since:\n  {REPLACED[1]}", self.overlay.status())
        for act in (self.overlay.undo, self.overlay.lay):
            self.assert_refused(f"(?s)were changed there:.*{REPLACED[1]}", act)

    def test_an_overlay_is_kept_if_its_successor_does_not_fit(self):
        self.overlay.lay()
        write(self.root / REPLACED[1], "# ours, later\n")
        write(self.site / BESIDE, "# a vendor's\n")
        self.assert_refused(f"{BESIDE} is not", Overlay(self.site, self.root).lay)


class TestCutOff(SiteTestCase):
    """Stopped before each change of the file system, one after the other."""

    WRITES = {
        "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod",
        "shutil.copyfile", "shutil.rmtree", "os.utime", "os.truncate",
    }  # fmt: skip

    def stopped_before(self, number: int, act: Callable[[], object], stop: Any) -> int:
        """Acts in a child that stops before its ``number``-th write. Returns its status."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = number

        def before(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            is_open = event == "open" and isinstance(arguments[1], str)
            if event in self.WRITES or (is_open and arguments[1] not in ("r", "rb")):
                left -= 1
                if left == 0:
                    stop()

        try:
            sys.addaudithook(before)
            act()
        except BaseException:
            os._exit(FAILED)
        os._exit(DONE if left > 0 else DONE_ALL_THE_SAME)

    def assert_whole(self, laid: dict[str, bytes], number: int) -> None:
        release = {name: of[0] for name, of in self.release.items()}
        self.assertIn(self.seen(), (release, laid), f"stopped before write {number}")

    def each_stop(self, act: Callable[[], object], before: Callable[[], object], stop):
        """Yields the status of runs of ``act``, each stopped at another place."""
        self.overlay.lay()
        laid = self.seen()
        for number in range(1, 1000):
            self.overlay.undo()
            before()
            status = self.stopped_before(number, act, stop)
            self.assert_whole(laid, number)
            if status == DONE_ALL_THE_SAME:
                self.assertEqual(self.seen(), laid)
            yield status, laid
            # As the next run of the command begins
            self.overlay.settle()
            self.assert_whole(laid, number)
            if status == DONE:
                self.assertGreater(number, 40)
                return

    def test_killed_while_laid(self):
        def kill() -> None:
            os._exit(KILLED)

        for status, laid in self.each_stop(self.overlay.lay, int, kill):
            self.assertIn(status, (DONE, KILLED))
            self.overlay.settle()
            self.overlay.lay()
            self.assertEqual(self.seen(), laid)
            self.assert_record_is_true()
            self.overlay.undo()
            self.assertEqual(self.state(), self.release)

    def test_killed_while_undone(self):
        def kill() -> None:
            os._exit(KILLED)

        for status, _ in self.each_stop(self.overlay.undo, self.overlay.lay, kill):
            self.assertIn(status, (DONE, KILLED))
            self.overlay.settle()
            self.overlay.undo()
            self.assertEqual(self.state(), self.release)

    def test_errors_while_laid_leave_the_release(self):
        """As where the disk is full."""

        def no_space() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        statuses = {
            status for status, _ in self.each_stop(self.overlay.lay, int, no_space)
        }
        self.assertEqual(statuses, {DONE, FAILED, DONE_ALL_THE_SAME})

    def test_what_was_cut_off_is_told(self):
        self.overlay.lay()
        self.overlay.current.symlink_to("branch")
        self.assertIn("the branch; an overlay was cut off", self.overlay.status())


class TestTo(SiteTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = self.root.parent / "a folder"

    def test_a_folder_of_links_and_ours(self):
        self.overlay.lay_to(self.folder)
        self.assertEqual(self.state(), self.release)
        for path in [*REPLACED, *ADDED]:
            self.assertFalse((self.folder / path).is_symlink())
            self.assertEqual(
                (self.folder / path).read_text(), (self.root / path).read_text()
            )
        for path in [BESIDE, OTHER, "torch/version.py", self.dist_info.name]:
            self.assertEqual((self.folder / path).resolve(), self.site / path)
        # Whatever becomes of the clone
        self.assertNotIn(
            str(self.root), "".join(map(str, self.state(self.folder).values()))
        )
        self.assertIn("made by --to", Overlay(self.folder, self.root).status())

    def test_again_is_anew(self):
        self.overlay.lay_to(self.folder)
        write(self.root / REPLACED[0], "# ours, later\n")
        Overlay(self.site, self.root).lay_to(self.folder)
        self.assertEqual((self.folder / REPLACED[0]).read_text(), "# ours, later\n")
        other = Overlay(self.folder, self.root)
        self.assert_refused("made by --to", other.lay)
        self.assert_refused("made by --to", other.undo)

    def test_somebody_elses_folder_stays(self):
        write(self.folder / "theirs", "")
        self.assert_refused(
            "not made by --to", lambda: self.overlay.lay_to(self.folder)
        )
        self.assertTrue((self.folder / "theirs").exists())

    def test_what_was_put_into_it_stays(self):
        self.overlay.lay_to(self.folder)
        write(self.folder / "mixed.py", "")
        said = "mixed.py, which --to did not put there"
        self.assert_refused(said, lambda: self.overlay.lay_to(self.folder))
        self.assert_refused(said, Overlay(self.folder, self.root).remove_folder)
        self.assertTrue((self.folder / "mixed.py").exists())
        (self.folder / "mixed.py").unlink()
        Overlay(self.folder, self.root).remove_folder()
        self.assertFalse(self.folder.exists())

    def test_a_changed_file_is_refused(self):
        write(self.site / REPLACED[0], "# a vendor's\n")
        self.assert_refused("series", lambda: self.overlay.lay_to(self.folder))
        self.assertFalse(self.folder.exists())

    def test_a_torch_that_has_the_branch_needs_none(self):
        self.overlay.lay()
        self.assert_refused(
            "nothing else is needed", lambda: self.overlay.lay_to(self.folder)
        )


@unittest.skipIf(LAUNCHED_RANK is not None, "starts processes of its own")
class TestCommand(TestCase):
    """With this clone and an environment that has the release's own files of FSDP."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = Path(scratch.name)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder], check=True
        )
        self.python = folder / "bin/python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        package = "torch/distributed/fsdp"
        shutil.copytree(
            Path(RELEASE_ROOT) / package,
            self.site / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for path in self.site.rglob("*"):  # set-up unpacks them read-only
            path.chmod(0o755 if path.is_dir() else 0o644)
        for name in ("__init__.py", "version.py"):
            shutil.copy(Path(RELEASE_ROOT, "torch", name), self.site / "torch")
        dist_info = next(Path(RELEASE_ROOT).glob("torch-*.dist-info"))
        shutil.copytree(dist_info, self.site / dist_info.name)
        self.record = self.site / dist_info.name / "RECORD"
        self.record.chmod(0o644)
        rows = [
            line
            for line in self.record.read_text().splitlines(keepends=True)
            if (self.site / line.partition(",")[0]).is_file()
        ]
        self.record.write_text("".join(rows))

    def run_tool(self, *arguments: object, status: int = 0) -> str:
        command = [sys.executable, Path(REPOSITORY, "tools/overlay.py"), *arguments]
        result = subprocess.run(
            [*map(str, command), "--python", str(self.python)],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"]},
        )
        self.assertEqual(result.returncode, status, result.stderr)
        return result.stdout + result.stderr

    def files(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.site).as_posix(): path.read_bytes()
            for path in self.site.rglob("*")
            if path.is_file()
        }

    def test_lay_status_undo(self):
        before = self.files()
        self.assertIn("no overlay", self.run_tool("--status"))
        self.assertIn("the branch, as it is in", self.run_tool())
        ours = {p for p in overlay.Overlay(self.site).ours if p.startswith("torch/")}
        for path in ours:
            expected = Path(REPOSITORY, path).read_bytes()
            self.assertEqual((self.site / path).read_bytes(), expected)
        self.assertIn("the branch, as it is in", self.run_tool("--status"))
        self.assertIn("no overlay", self.run_tool("--undo"))
        self.assertEqual(self.files(), before)

    def test_a_folder_is_made_and_removed(self):
        folder = self.site.parent / "to"
        self.assertIn("made by --to", self.run_tool("--to", folder))
        self.assertIn("removed", self.run_tool("--to", folder, "--undo"))
        self.assertIn("nothing to undo", self.run_tool("--to", folder, "--undo"))

    def test_pip_uninstalls_all_of_it(self):
        self.run_tool()
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        uninstall = subprocess.run(
            [*map(str, pip), "uninstall", "--yes", "torch"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(uninstall.returncode, 0, uninstall.stderr)
        self.assertEqual([name for name in self.files() if "torch" in name], [])

    def test_errors_are_one_line(self):
        shutil.rmtree(self.site / "torch")
        self.assertRegex(self.run_tool(status=1), r"^error: .* has no torch: .*\n$")
        self.python = self.site
        self.assertRegex(self.run_tool(status=1), r"^error: .* name its bin/python\n$")
        self.python = Path("/nowhere/python")
        self.assertRegex(
            self.run_tool(status=1), r"^error: .* no Python that runs.*\n$"
        )


if __name__ == "__main__":
    run_tests()
