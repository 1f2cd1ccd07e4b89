# Owner(s): ["oncall: distributed"]
"""
Set-up under faults: a wheel that is cut off or altered, a disk that fills up or
cannot be written to, no network, processes that are killed, odd paths.

Faults of the disk come from an audit hook, which Python calls before each step: in
a fork of this process, as a hook stays. The environments are stand-ins, so that
hundreds of set-ups take seconds.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import (
    BuildTestCase,
    make_wheel,
    OURS,
    RELEASE_FILES,
    REQUIREMENTS,
    VERSIONS,
)

from tools.setup_helpers import environment, wheel
from tools.setup_helpers.assemble import assemble_wheel
from tools.setup_helpers.releases import DEFAULT
from tools.setup_helpers.report import Progress, SetupError
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.tools


REAL_MAKE_VENV = environment._make_venv
FUNCTIONAL = "torch/nn/functional.py"
# Of the audit events that write: which argument is the path
WRITES = {
    "open": 0,
    "os.chmod": 0,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.rmdir": 0,
    "os.symlink": 1,
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Parts of a set-up in a process of its own, see `TestTogether`
SET_UP = """
import signal, sys
from functools import partial
from pathlib import Path
from tools.setup_helpers import build, cli, environment

# A shell has what runs in its background ignore interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
root, python = map(Path, sys.argv[1:])
pip = lambda _, progress: environment.Pip(python, progress)
make = partial(build.Build, root, make_pip=pip, venv_has_pip=False)
sys.exit(cli.main(["setup"], make))
"""


class Hook:
    """Calls ``act`` with the number, event and path of each step that writes."""

    def __init__(self, root: Path, act: Callable[[int, str, str], None]) -> None:
        self.root = str(root)
        self.act = act
        self.count = 0

    def __call__(self, event: str, arguments: tuple) -> None:
        if event not in WRITES or (event == "open" and not arguments[2] & WRITING):
            return
        path = arguments[WRITES[event]]
        if isinstance(path, int):
            return
        # `rmtree` names what it removes from within a folder.
        path = os.path.abspath(os.path.join(self.root, os.fsdecode(path)))
        if path.startswith(self.root):
            self.count += 1
            self.act(self.count, event, path)


def die_at(step: int) -> Callable[[int, str, str], None]:
    def act(count: int, event: str, path: str) -> None:
        if count == step:
            os._exit(9)

    return act


def refuse_writing(count: int, event: str, path: str) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


def fill_up_at(step: int) -> Callable[[int, str, str], None]:
    """Lets nothing be written from a step on, until a folder is removed."""
    freed = False

    def act(count: int, event: str, path: str) -> None:
        nonlocal freed
        freed |= count > step and event == "os.rmdir"
        takes_space = event not in ("os.remove", "os.rename", "os.rmdir")
        if count >= step and takes_space and not freed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    return act


class FaultTestCase(BuildTestCase):
    def run_under(self, act: Callable[[int, str, str], None], *command: str):
        """Returns a command's status, stdout, stderr and number of steps.

        None where it died.
        """
        out = self.scratch / "outcome"
        out.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                hook = Hook(self.root, act)
                sys.addaudithook(hook)
                result = self.run_command(*command, given=self.wheel)
                out.write_bytes(pickle.dumps((*result, hook.count)))
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        return pickle.loads(out.read_bytes()) if out.exists() else None

    def points(self, *command: str, every: int) -> Iterator[int]:
        """Yields some of a command's steps, and undoes what it did."""
        steps = self.run_under(lambda *_: None, *command)[-1]
        self.assertGreater(steps, every)
        yield from range(1, steps + 1, every)

    def start_anew(self) -> None:
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assert_untouched()

    def assert_finishes(self) -> None:
        """What a fault left is no obstacle, and is not taken for a whole."""
        self.assertTrue(self.set_up(self.wheel))
        self.assert_whole()

    def assert_whole(self) -> None:
        for name, text in RELEASE_FILES.items():
            self.assertEqual((self.home / "base" / name).read_text(), text)
        self.assertTrue((self.home / ".venv/bin/torchrun").exists())
        self.assertEqual(self.links_to_ours(), {OURS})
        self.assertEqual(
            (self.branch / "torchgen").resolve(), self.home / "base/torchgen"
        )
        self.assertEqual(self.git("status", "--porcelain"), "")
        self.assertEqual(self.leftovers(), [])
        self.assertFalse(self.set_up(self.wheel))


@instantiate_parametrized_tests
class TestWheel(FaultTestCase):
    """Each fault is told in one line that names the wheel, or does no harm."""

    def setUp(self) -> None:
        super().setUp()
        self.whole = self.wheel.read_bytes()
        self.bad = self.scratch / "bad.whl"

    def contents_of_bad(self, data: bytes) -> dict[str, str] | None:
        """Returns what set-up unpacks of a wheel, or None where it is refused."""
        self.bad.write_bytes(data)
        folder = self.scratch / "unpacked"
        shutil.rmtree(folder, ignore_errors=True)
        progress = Progress(quiet=True)
        try:
            inspected = wheel.inspect_wheel(self.bad, DEFAULT)
            wheel.unpack_wheel(inspected, folder, progress)
        except SetupError as error:
            self.assertTrue(str(error).startswith(str(self.bad)), error)
            return None
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(p.relative_to(folder)): p.read_text() for p in files}

    def refuses_to_assemble(self) -> bool:
        """Whether `make wheel` refuses the bad wheel, too."""
        try:
            inspected = wheel.inspect_wheel(self.bad, DEFAULT)
            folder = self.scratch / "dist"
            progress = Progress(quiet=True)
            assemble_wheel(inspected, self.root, set(), folder, progress, None)
        except SetupError as error:
            self.assertTrue(str(error).startswith(str(self.bad)), error)
            return True
        return False

    def test_cut_off_anywhere(self):
        for nbytes in [*range(0, len(self.whole), 11), len(self.whole) - 1]:
            self.assertIsNone(self.contents_of_bad(self.whole[:nbytes]), nbytes)
            self.assertTrue(self.refuses_to_assemble(), nbytes)

    @parametrize("flip", [1, 255])
    def test_flipped_byte(self, flip: int):
        """In an entry, and in what the directory says of the first entry."""
        right = self.contents_of_bad(self.whole)
        self.assertIsNotNone(right)
        directory = self.whole.index(b"PK\1\2")
        second = self.whole.index(b"PK\1\2", directory + 1)
        refused = 0
        for at in [*range(120), *range(directory, second), *range(-22, 0)]:
            data = bytearray(self.whole)
            data[at] ^= flip
            contents = self.contents_of_bad(bytes(data))
            self.assertIn(contents, (None, right), at)
            refused += contents is None and self.refuses_to_assemble()
        self.assertGreater(refused, 60)

    @parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_directory_names_another_compression(self, method: int):
        """Each decompressor has an error of its own for what it cannot read."""
        data = bytearray(self.whole)
        first = data.index(b"PK\1\2")  # of a file without content
        data[data.index(b"PK\1\2", first + 1) + 10] = method
        self.assertIsNone(self.contents_of_bad(bytes(data)))

    def altered(self, name: str) -> Path:
        """Writes a wheel whose checksums fit, and whose RECORD does not."""
        with (
            zipfile.ZipFile(self.wheel) as old,
            zipfile.ZipFile(self.bad, "w") as new,
        ):
            for info in old.infolist():
                data = old.read(info)
                # Of the same size: RECORD's digest alone tells.
                changed = data.replace(b"release", b"altered")
                new.writestr(info, changed if info.filename == name else data)
        return self.bad

    def test_altered_with_fitting_checksums(self):
        bad = self.altered(FUNCTIONAL)
        text = f"was altered: {FUNCTIONAL} is not as in its RECORD; remove it"
        self.assert_one_error(self.run_command("setup", given=bad), text)
        self.assert_untouched()
        # Of one whose RECORD is that of the release in place, set-up takes nothing
        self.set_up(self.wheel)
        self.assertFalse(self.set_up(bad))
        self.assert_one_error(self.run_command("wheel", given=bad), text)
        self.assertEqual([*self.root.glob("build/dist/*")], [])

    @parametrize("kind", ["jws", "p7s", "other"])
    def test_only_signatures_of_record_are_not_listed_there(self, kind: str):
        """In its folder: a file elsewhere whose path holds that name is compared."""
        dist_info = f"torch-{self.version}+fake.dist-info"
        names = (f"{dist_info}/RECORD.{kind}", f"torch/{dist_info}/RECORD.{kind}")
        for name, is_taken in zip(names, (kind != "other", False)):
            shutil.copy(self.wheel, self.bad)
            with zipfile.ZipFile(self.bad, "a") as archive:
                archive.writestr(name, "")
            contents = self.contents_of_bad(self.bad.read_bytes())
            self.assertEqual(contents is not None, is_taken, name)
        listed = make_wheel(self.scratch, files={names[1]: "release"})
        self.wheel = listed.rename(self.scratch / "listed.whl")
        text = f"was altered: {names[1]} is not as in its RECORD"
        self.assert_one_error(
            self.run_command("setup", given=self.altered(names[1])), text
        )

    def test_fetched_wheel_that_was_damaged_since(self):
        """Nobody named that one: the line tells to remove it, and that helps."""
        self.set_up()
        (held,) = (self.home / "wheel").iterdir()
        shutil.copy(self.altered(FUNCTIONAL), held)
        shutil.rmtree(self.home / "base")
        result = self.run_command("setup")
        self.assert_one_error(result, f"{held} was altered")
        self.assertIn("remove it and fetch it anew", result[2])
        held.unlink()
        self.assertTrue(self.set_up())
        self.assertEqual(len(self.pip.downloads), 2)
        self.assert_whole()


@instantiate_parametrized_tests
class TestDisk(FaultTestCase):
    def test_full_at_any_step(self):
        for step in self.points("setup", every=4):
            self.start_anew()
            result = self.run_under(fill_up_at(step), "setup")
            if result[0] == 0:  # there were removals alone to come
                break
            self.assert_one_error(result[:3], "no space left on the disk")
            self.assert_untouched()
            self.assertEqual(self.leftovers(), [])
        self.assertGreater(step, 50)
        self.start_anew()
        self.assert_finishes()

    def test_full_while_another_wheel_comes_in(self):
        """The earlier release goes on working."""
        first, self.wheel = self.wheel, make_wheel(self.scratch, version="2.13.0+b")
        self.set_up(first)
        for step in self.points("setup", every=7):
            self.set_up(first)
            result = self.run_under(fill_up_at(step), "setup")
            if result[0] == 0:
                break
            self.assert_one_error(result[:3], "no space left on the disk")
            self.assertFalse(self.set_up())
            version = (self.branch / "torch/version.py").read_text()
            self.assertIn("+fake", version)

    def test_full_while_the_branchs_wheel_is_written(self):
        self.set_up(self.wheel)
        for step in list(self.points("wheel", every=1)):
            shutil.rmtree(self.root / "build/dist", ignore_errors=True)
            result = self.run_under(fill_up_at(step), "wheel")
            if result[0] == 0:
                break
            self.assert_one_error(result[:3], "no space left on the disk")
            self.assertEqual(list(self.root.glob("build/dist/*")), [])
            self.assert_whole()
        self.assertEqual(self.run_command("wheel", given=self.wheel)[0], 0)

    def test_limit_on_the_size_of_files(self):
        big = make_wheel(self.scratch, files={"torch/big.py": "x = 1\n" * 50_000})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            result = self.run_command("setup", given=big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assert_one_error(result, "File too large; raise the limit")
        self.assert_untouched()

    def test_venv_says_why_it_failed(self):
        python = self.scratch / "python"
        python.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space' >&2\nexit 1")
        python.chmod(0o755)
        mock.patch.stopall()
        with self.assertRaisesRegex(SetupError, r"cannot make .venv: .*No space"):
            REAL_MAKE_VENV(python, "ensurepip")

    @parametrize("command", ["setup", "wheel"])
    def test_read_only_clone(self, command: str):
        result = self.run_under(refuse_writing, command)
        self.assert_one_error(result[:3], f"Read-only file system: {self.root}")
        self.assertIn("work in a clone of your own", result[2])
        self.assert_untouched()
        self.assert_finishes()

    def test_read_only_clone_that_is_set_up(self):
        """It goes on working: nothing is written that is there already."""
        self.build().set_up(self.wheel, with_models=True)
        before = self.state()
        result = self.run_under(refuse_writing, "setup", "--models")
        status, stdout, stderr, _ = result
        self.assertEqual((status, stderr), (0, ""))
        self.assertIn("up to date", stdout)
        for command in ("wheel", "clean"):
            result = self.run_under(refuse_writing, command)
            self.assert_one_error(result[:3], "Read-only file system")
        self.assertEqual(self.state(), before)


@instantiate_parametrized_tests
class TestKilled(FaultTestCase):
    """At any step: the next run makes up for it, and other releases are as they were."""

    @parametrize("version", (DEFAULT.version, VERSIONS[-1]))
    def test_set_up_at_any_step(self, version: str):
        before = None
        if version != DEFAULT.version:
            self.set_up()
            before = self.links()
        self.choose(version)
        for step in self.points("setup", every=4):
            self.assertEqual(self.run_command("clean")[0], 0)
            self.assertIsNone(self.run_under(die_at(step), "setup"))
            self.set_up(self.wheel)
            self.assert_whole()
        if before is not None:
            self.version = DEFAULT.version
            self.assertEqual(self.links(), before)

    def test_clean_at_any_step(self):
        """What is half gone is not taken for a release or an environment."""
        self.set_up(self.wheel)
        for step in self.points("clean", every=4):
            self.set_up(self.wheel)
            self.assertIsNone(self.run_under(die_at(step), "clean"))
            self.set_up(self.wheel)
            self.assert_whole()
            self.assertIsNone(self.run_under(die_at(step), "clean"))
            self.start_anew()

    def test_new_links_at_any_step(self):
        self.set_up(self.wheel)
        new = self.root / "torch/nn/new.py"
        self.put("torch/nn/new.py", "")
        for step in self.points("setup", every=1):
            new.unlink()
            self.set_up(self.wheel)
            self.put("torch/nn/new.py", "")
            self.assertIsNone(self.run_under(die_at(step), "setup"))
            self.set_up(self.wheel)
            self.assertEqual(self.links_to_ours(), {OURS, "torch/nn/new.py"})
            self.assertEqual(self.leftovers(), [])


class TestTogether(BuildTestCase):
    """Real processes, whose pip waits until it is told to go on."""

    def setUp(self) -> None:
        super().setUp()
        self.started, self.go = self.scratch / "started", self.scratch / "go"
        python = self.scratch / "pip"
        python.write_text(
            f"#!/bin/sh\necho $$ >>'{self.started}'\n"
            f"until [ -e '{self.go}' ]; do sleep 0.02; done\n"
        )
        python.chmod(0o755)
        os.environ["TORCH_WHEEL"] = str(self.wheel)
        self.command = [sys.executable, "-c", SET_UP, str(self.root), str(python)]

    def start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self.command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def wait_for_pip(self) -> None:
        deadline_s = time.monotonic() + 300
        while not self.started.exists():
            self.assertLess(time.monotonic(), deadline_s)
            time.sleep(0.02)

    def is_locked(self) -> bool:
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def test_three_at_once(self):
        self.go.touch()
        outputs = [process.communicate() for process in [self.start() for _ in "123"]]
        self.assertEqual([stderr for _, stderr in outputs], [""] * 3)
        unpacked = ["unpacking" in stdout for stdout, _ in outputs]
        self.assertEqual(sum(unpacked), 1)
        self.assertEqual(len(self.started.read_text().split()), 1)
        self.assertFalse(self.set_up())

    def test_pip_of_a_killed_set_up_is_waited_for(self):
        """It still writes into .venv: the next set-up must not meet it there."""
        for number in (signal.SIGKILL, signal.SIGINT):
            first = self.start()
            self.wait_for_pip()
            first.send_signal(number)
            first.wait(300)
            self.assertTrue(self.is_locked())
            second = threading.Thread(target=self.set_up)
            second.start()
            self.go.touch()
            second.join(300)
            self.assertFalse(second.is_alive())
            self.assertFalse(self.is_locked())
            self.assertFalse(self.set_up())
            self.assertEqual(self.run_command("clean")[0], 0)
            self.started.unlink()
            self.go.unlink()


@instantiate_parametrized_tests
@unittest.skipUnless([*importlib.metadata.distributions(name="pip")], "takes pip")
class TestNetwork(BuildTestCase):
    def setUp(self) -> None:
        super().setUp()
        for name in [n for n in os.environ if n.upper().startswith("PIP_")]:
            del os.environ[name]
        os.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
        self.real_pip = environment.Pip(Path(sys.executable), Progress(quiet=True))

    @parametrize(
        "settings,is_unreachable",
        [
            ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, True),
            ({"PIP_PROXY": "http://127.0.0.1:9"}, True),
            ({"PIP_NO_INDEX": "1"}, False),
        ],
        name_fn=lambda settings, _: [*settings][0].lower(),
    )  # fmt: skip
    def test_pip_reaches_no_index(self, settings: dict, is_unreachable: bool):
        os.environ |= settings
        said = r"No matching distribution found for torch==2\.13\.0"
        if is_unreachable:
            said += r" \(the package index cannot be reached\)"
        with self.assertRaisesRegex(SetupError, said + "; TORCH_WHEEL=PATH"):
            self.real_pip.download("torch==2.13.0", self.scratch)

    @parametrize("with_models", [False, True])
    def test_requirements_cannot_be_had(self, with_models: bool):
        if with_models:
            self.set_up()
        before = self.root.exists() and self.untracked()
        os.environ["PIP_NO_INDEX"] = "1"
        for name in REQUIREMENTS:
            self.put(name, "a-package-that-is-not-there\n")
        fake, self.pip = self.pip, self.real_pip
        models = ["--models"] if with_models else []
        result = self.run_command("setup", *models, given=self.wheel)
        text = "pip cannot install the requirements: No matching distribution found"
        self.assert_one_error(result, text)
        self.assertIn("PIP_FIND_LINKS", result[2])
        self.git("checkout", "--quiet", ".")
        self.assertEqual(self.untracked(), before)
        self.pip = fake
        self.assertTrue(self.build().set_up(self.wheel, with_models=with_models))
        self.assertFalse(self.build().set_up(self.wheel, with_models=with_models))


class TestOddPath(BuildTestCase):
    venv_is_real = True
    # Composed and decomposed: two names to Linux.
    clone_name = '-a b\' "c" $HOME %d `e` \\ # \u00e9 e\u0301'

    def test_all_commands(self):
        self.assertTrue(self.set_up(self.wheel))
        self.assertFalse(self.set_up(self.wheel))
        where = self.run_python("-c", "import torch; print(torch.__file__)")
        self.assertEqual(where, str(self.branch / "torch/__init__.py"))
        self.assertEqual(self.run_command("wheel", given=self.wheel)[0], 0)
        self.assertEqual(self.run_command("clean")[0], 0)
        self.assert_untouched()

    def test_commands_of_the_release_find_their_python(self):
        """By their path, by a link from elsewhere, and on PATH."""
        self.set_up(self.wheel)
        torchrun = self.root / ".venv/bin/torchrun"
        link = self.scratch / "link"
        link.symlink_to(torchrun)
        os.environ["PATH"] = f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}"
        for command in (str(torchrun), str(link), "torchrun"):
            printed = subprocess.check_output([command], text=True)
            self.assertEqual(printed, "running\n")


@instantiate_parametrized_tests
class TestImpossiblePath(BuildTestCase):
    @parametrize(
        "name,problem",
        [
            ("a:b", "has a ':', which separates the folders of PATH"),
            ("a\nb", "has a line break in it"),
            ("a\udce9", "has bytes that are no UTF-8 in it"),
        ],
        name_fn=lambda name, _: str(ord(name[1])),
    )
    def test_is_refused_before_anything_is_made(self, name: str, problem: str):
        self.root.rename(self.scratch / name)
        self.root = self.scratch / name
        result = self.run_command("setup", given=self.wheel)
        self.assert_one_error(result, problem)
        self.assertIn("move it to another folder", result[2])
        self.assert_untouched()


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
