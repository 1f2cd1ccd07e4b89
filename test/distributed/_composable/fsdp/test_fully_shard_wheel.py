# Owner(s): ["oncall: distributed"]
"""The branch's wheel: made of small wheels here, each shaped as one of a release's."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import time
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from fsdp_build.utils import (
    BuildTestCase,
    digest_of,
    make_wheel,
    OURS,
    RELEASE_FILES,
    VERSIONS,
)

from tools.setup_helpers.assemble import LABEL
from tools.setup_helpers.digests import DIGESTS
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.tools


OUR_NEW_FILE = "torch/nn/größe.py"
THEIRS = "torch/distributed/fsdp/theirs.py"
FOREIGN_TAG = "cp399-cp399-manylinux_2_28_x86_64"


def infos(path: Path) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info for info in archive.infolist()}


def damage(path: Path) -> None:
    """Changes a byte of an entry that our wheel takes over as it is."""
    info = infos(path)["torch/__init__.py"]
    at = info.header_offset + 30 + len(info.filename) + 3
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])


class WheelTestCase(BuildTestCase):
    clone_name = "a clone of größe"

    def setUp(self) -> None:
        super().setUp()
        self.put(OUR_NEW_FILE, "origin = 'ours'\n")
        self.put("test/test_ours.py", "")
        self.git("add", "--all")

    def assemble(self, given: Path | None = None) -> Path:
        status, stdout, stderr = self.run_command("wheel", given=given)
        self.assertEqual((status, stderr), (0, ""))
        name = stdout.splitlines()[-1].split(": ")[0]
        return self.root / name


@instantiate_parametrized_tests
class TestWheel(WheelTestCase):
    @parametrize(
        "in_metadata,in_module,ours",
        [
            ("2.13.0+cpu", "2.13.0+cpu", f"2.13.0+cpu.{LABEL}"),
            ("2.13.0+cu130", "2.13.0+cu130", f"2.13.0+cu130.{LABEL}"),
            ("2.13.0", "2.13.0", f"2.13.0+{LABEL}"),
            # As PyPI has it, where a version may have no label.
            ("2.13.0", "2.13.0+cu130", f"2.13.0+cu130.{LABEL}"),
        ],
    )
    def test_version_is_one_everywhere(self, in_metadata, in_module, ours):
        module = f"cuda = None\n__version__ = '{in_module}'\ndebug = False\n"
        files = {"torch/version.py": module}
        given = make_wheel(
            self.scratch, version=in_metadata, files=files, tag=FOREIGN_TAG
        )
        path = self.assemble(given)
        self.assertEqual(path.name, f"torch-{ours}-{FOREIGN_TAG}.whl")
        name, version, _, _ = parse_wheel_filename(path.name)
        self.assertEqual((name, str(version)), ("torch", ours))
        for wanted in ("torch==2.13.0", "torch>=2.13,<2.14", f"torch=={in_module}"):
            accepts = Requirement(wanted).specifier.contains(version)
            self.assertEqual(accepts, "+" not in wanted, wanted)

        site = self.scratch / "site"
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
        (found,) = distributions(path=[str(site)])
        self.assertEqual((found.name, found.version), ("torch", ours))
        self.assertIn("filelock", found.requires)
        written = (site / "torch/version.py").read_text()
        self.assertEqual(written, module.replace(in_module, ours))
        (dist_info,) = site.glob("*.dist-info")
        self.assertEqual(dist_info.name, f"torch-{ours}.dist-info")
        self.assertTrue((dist_info / "entry_points.txt").exists())

    def test_holds_the_release_and_our_files(self):
        path = self.assemble(self.wheel)
        expected = {
            **RELEASE_FILES,
            OURS: "origin = 'ours'\n",
            OUR_NEW_FILE: "origin = 'ours'\n",
        }
        with zipfile.ZipFile(path) as archive:
            self.assertIsNone(archive.testzip())
            held = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if ".dist-info/" not in name and name != "torch/version.py"
            }
        self.assertEqual(held, expected)

    def test_record_is_right(self):
        path = self.assemble(self.wheel)
        record_name = f"torch-2.13.0+fake.{LABEL}.dist-info/RECORD"
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            contents = {name: archive.read(name).decode() for name in names}
        self.assertEqual(len(names), len(contents))
        self.assertEqual(names[-1], record_name)
        rows = list(csv.reader(contents[record_name].splitlines()))
        self.assertEqual([row[0] for row in rows], names)
        self.assertEqual(rows.pop(), [record_name, "", ""])
        for name, digest, nbytes in rows:
            text = contents[name]
            self.assertEqual(digest, f"sha256={digest_of(text)}", name)
            self.assertEqual(int(nbytes), len(text.encode()), name)

    def test_dist_info_comes_last(self):
        names = list(infos(self.assemble(self.wheel)))
        first = next(i for i, name in enumerate(names) if ".dist-info/" in name)
        self.assertTrue(all(".dist-info/" in name for name in names[first:]))

    def test_other_entries_are_as_they_were(self):
        path = self.assemble(self.wheel)
        before, after = infos(self.wheel), infos(path)
        changed = {OURS, "torch/version.py"}
        for name, info in before.items():
            if name in changed or name.endswith(("/METADATA", "/RECORD")):
                continue
            renamed = after[name.replace("+fake.", f"+fake.{LABEL}.")]
            for field in ("CRC", "compress_type", "date_time", "external_attr"):
                was, is_now = getattr(info, field), getattr(renamed, field)
                self.assertEqual(is_now, was, f"{name}: {field}")
        self.assertEqual(after["torch/bin/tool"].external_attr >> 16, 0o100755)
        for path in (OURS, OUR_NEW_FILE):
            self.assertEqual(after[path].external_attr >> 16, 0o100644)

    def test_same_input_gives_the_same_bytes(self):
        (self.root / OUR_NEW_FILE).chmod(0o600)
        first = self.assemble(self.wheel).read_bytes()
        (self.root / OUR_NEW_FILE).chmod(0o664)
        for path in (OURS, OUR_NEW_FILE):
            os.utime(self.root / path, (time.time(), 1e9))
        self.assertEqual(self.assemble(self.wheel).read_bytes(), first)

    def test_name_has_every_tag_and_the_build(self):
        tags = "Tag: cp311-cp311-manylinux_2_27_x86_64\n" + f"Tag: {FOREIGN_TAG}\n"
        name = "torch-2.13.0+fake.dist-info/WHEEL"
        given = make_wheel(self.scratch, files={name: f"Build: 1\n{tags}"})
        given = given.rename(self.scratch / "renamed.whl")
        self.assertEqual(
            self.assemble(given).name,
            f"torch-2.13.0+fake.{LABEL}-1-cp311.cp399-cp311.cp399-"
            "manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
        )

    def test_signatures_go(self):
        given = make_wheel(self.scratch)
        with zipfile.ZipFile(given, "a") as archive:
            archive.writestr("torch-2.13.0+fake.dist-info/RECORD.jws", "{}")
        self.assertFalse([n for n in infos(self.assemble(given)) if "jws" in n])

    def test_folders_are_entries_without_a_row(self):
        # The wheels for CUDA have them.
        given = make_wheel(self.scratch)
        with zipfile.ZipFile(given, "a") as archive:
            archive.writestr("torch/nn/", "")
            archive.writestr("torch-2.13.0+fake.dist-info/licenses/", "")
        path = self.assemble(given)
        dist_info = f"torch-2.13.0+fake.{LABEL}.dist-info"
        folders = {name for name in infos(path) if name.endswith("/")}
        self.assertEqual(folders, {"torch/nn/", f"{dist_info}/licenses/"})
        with zipfile.ZipFile(path) as archive:
            record = archive.read(f"{dist_info}/RECORD").decode()
        listed = {row[0] for row in csv.reader(record.splitlines())}
        self.assertEqual(listed, infos(path).keys() - folders)

    def test_takes_the_wheel_of_the_release_in_place(self):
        self.set_up()
        assembled = self.assemble()
        self.assertEqual(assembled.name, f"torch-2.13.0+fake.{LABEL}-py3-none-any.whl")
        # And fetches it again where it is gone.
        for held in (self.home / "wheel").glob("*"):
            held.unlink()
        before = assembled.read_bytes()
        self.assertEqual(self.assemble().read_bytes(), before)
        self.assertEqual(len(self.pip.downloads), 2)
        self.assertFalse(self.set_up())

    def test_a_named_wheel_leaves_the_release_in_place(self):
        self.set_up()
        before = self.links()
        other = make_wheel(self.scratch, version="2.13.0+other", tag=FOREIGN_TAG)
        self.assertIn("+other.", self.assemble(other).name)
        self.assertEqual(self.links(), before)

    @parametrize("version", VERSIONS)
    @parametrize("in_place", [False, True])
    def test_of_each_release(self, version: str, in_place: bool):
        """That is set up, or by its wheel alone."""
        self.choose(version)
        if in_place:
            self.set_up()
        path = self.assemble(None if in_place else self.wheel)
        name = f"torch-{version}+fake.{LABEL}-py3-none-any.whl"
        self.assertEqual(path, self.root / "build/dist" / name)
        made = {path.name for path in (self.root / "build").iterdir()}
        self.assertEqual(made - {"dist", "base"}, {version} if in_place else set())
        with zipfile.ZipFile(path) as archive:
            self.assertEqual(archive.read(OURS), b"origin = 'ours'\n")
            held = archive.namelist()
        self.assertEqual([n for n in held if n.startswith(("test/", "tools/"))], [])

    def test_without_git_the_regular_files_go_in(self):
        (self.root / ".git").rename(self.scratch / "git")
        self.assertIn(OUR_NEW_FILE, infos(self.assemble(self.wheel)))


@instantiate_parametrized_tests
class TestErrors(WheelTestCase):
    def altered(self, kind: str) -> Path:
        folder = self.scratch / "altered"
        folder.mkdir()
        lists_other = {"torch/nn/functional.py": "x = 1\n", OURS: "x = 1\n"}
        path = make_wheel(folder, files=lists_other)
        whole = path.read_bytes()
        if kind == "truncated":
            path.write_bytes(whole[:-40])
        elif kind == "damaged":
            damage(path)
        elif kind == "twice":
            with self.assertWarns(UserWarning), zipfile.ZipFile(path, "a") as archive:
                archive.writestr(OURS, "x = 1\n")
        else:
            record = "torch-2.13.0+fake.dist-info/RECORD"
            rewritten = folder / "rewritten.whl"
            with (
                zipfile.ZipFile(path) as old,
                zipfile.ZipFile(rewritten, "w") as new,
            ):
                for name in old.namelist():
                    same = name == record or name != kind
                    new.writestr(name, old.read(name) if same else "x = 2\n")
            return rewritten
        return path

    @parametrize(
        "kind,text",
        [
            ("truncated", "is damaged"),
            ("damaged", "is damaged"),
            ("twice", "it holds a name twice"),
            (OURS, f"was altered: {OURS} is not as in its RECORD"),
            ("torch/nn/functional.py", "was altered: torch/nn/functional.py is not"),
        ],
    )
    def test_bad_wheel(self, kind: str, text: str):
        result = self.run_command("wheel", given=self.altered(kind))
        self.assert_one_error(result, text)
        self.assertEqual(list(self.root.glob("build/dist/*")), [])

    def record(self, **others: str) -> None:
        """Writes down what files the release has, which ours replace or lie beside."""
        texts = {path: RELEASE_FILES[path] for path in (OURS, THEIRS)} | others
        sha256 = {
            path: hashlib.sha256(text.encode()).hexdigest()
            for path, text in texts.items()
        }
        known = {"2.13.0": {"commit": "", "sha256": sha256}}
        self.put(DIGESTS, json.dumps(known))

    def test_vendors_changes_are_not_dropped(self):
        """Though RECORD fits them."""
        self.record()
        self.assemble(self.wheel)
        changed = {OURS: "origin = 'vendor'\n", OUR_NEW_FILE: "origin = 'vendor'\n"}
        given = make_wheel(self.scratch, version="2.13.0+vendor", files=changed)
        result = self.run_command("wheel", given=given)
        self.assert_one_error(result, f"{OURS} is not the release's; {OUR_NEW_FILE} is")
        self.assertIn(f"{OUR_NEW_FILE} is no file of the release, by", result[2])
        self.assertEqual([*self.root.glob("build/dist/*vendor*")], [])
        # Nor where that wheel is the release that set-up unpacked
        self.set_up(given)
        os.environ.pop("TORCH_WHEEL")
        self.assertEqual(self.run_command("wheel")[::2], result[::2])

    def test_what_a_vendor_removed_is_told(self):
        self.record(**{OUR_NEW_FILE: "origin = 'release'\n"})
        result = self.run_command("wheel", given=self.wheel)
        self.assert_one_error(result, f"{OUR_NEW_FILE} is missing, and the release")

    def test_vendors_changes_beside_ours_are_told_and_kept(self):
        self.record()
        changed = {THEIRS: "origin = 'vendor'\n"}
        given = make_wheel(self.scratch, version="2.13.0+vendor", files=changed)
        status, stdout, _ = self.run_command("wheel", given=given)
        self.assertEqual(status, 0)
        self.assertIn(f"note: {THEIRS} is not the release's, and ours are", stdout)
        (path,) = self.root.glob("build/dist/*vendor*")
        with zipfile.ZipFile(path) as archive:
            self.assertEqual(archive.read(THEIRS).decode(), changed[THEIRS])

    def test_altered_after_set_up(self):
        self.set_up(self.wheel)
        whole = self.wheel.read_bytes()
        self.wheel.write_bytes(whole[:-40])
        self.assert_one_error(self.run_command("wheel"), "is damaged")
        self.wheel.write_bytes(whole)
        damage(self.wheel)
        self.assert_one_error(self.run_command("wheel"), "is damaged")
        make_wheel(self.scratch, files={"torch/extra.py": ""})
        self.assert_one_error(
            self.run_command("wheel"), "is not the wheel that build/2.13.0/base was"
        )
        self.wheel.write_bytes(whole)
        self.assemble()

    @parametrize("text", ["", "__version__ = '1'\n__version__ = '2'\n"])
    def test_version_that_cannot_be_set(self, text: str):
        given = make_wheel(self.scratch, files={"torch/version.py": text})
        result = self.run_command("wheel", given=given)
        self.assert_one_error(result, "does not set __version__ once")

    def test_draft_is_not_left_out_silently(self):
        self.put("torch/draft.py", "")
        result = self.run_command("wheel", given=self.wheel)
        self.assert_one_error(result, "git does not track torch/draft.py")

    def test_missing_wheel(self):
        result = self.run_command("wheel", given=self.scratch / "none.whl")
        self.assert_one_error(result, "there is no wheel at")


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
