"""Makes the series in a tree: as commits of a git checkout, elsewhere in place.

All anchors of all changes are found in memory before a byte is written.  In place, what
the series replaces is kept in a journal in the tree, which is written first.  A run that
is cut off is finished by the next one, or undone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers import tree
from tools.setup_helpers.files import PARTIAL, write_whole
from tools.setup_helpers.report import SetupError
from tools.setup_helpers.wheel import record_row
from tools.upstream.edits import apply_edit


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tools.upstream.edits import Change


BRANCH = "fsdp2-series"
JOURNAL = "torch/.fsdp2_series.json"


def apply_series(
    folder: Path,
    root: Path,
    changes: Sequence[Change],
    *,
    only_check: bool = False,
    undo: bool = False,
) -> None:
    """Makes the changes in the tree at ``folder``, or only says whether they fit."""
    if not (folder / "torch").is_dir():
        raise SetupError(f"{folder} has no folder torch/")
    is_checkout = tree.has_git(folder)
    journal = Journal(folder)
    if undo and is_checkout:
        what = f"{folder} is a git checkout: remove its branch {BRANCH} instead"
        raise SetupError(what)
    journal.check()
    if undo:
        if not only_check:
            journal.undo()
        done = "would be" if only_check else "are"
        print(f"{folder}: {len(journal.before)} files {done} as they were")
        return
    if is_checkout:
        check_checkout(folder)
    plan = plan_series(changes, journal.read, root)
    if not is_checkout:
        plan = [{p: f[p] for p in f if _has_place(folder, p)} for f in plan]
    if not only_check and is_checkout:
        commit_series(folder, changes, plan)
    elif not only_check:
        journal.put(plan)
    for number, (change, files) in enumerate(zip(changes, plan), 1):
        print(f"  {number}  {len(files):2} files  {change.title}")
    done = f"on branch {BRANCH}" if is_checkout else "in place; --undo takes them back"
    print(f"{folder}: {len(plan)} changes {'fit' if only_check else done}")


def _has_place(folder: Path, path: str) -> bool:
    """Whether a tree that is not a checkout takes a file: what is installed has no tests."""
    return path.startswith("torch/") or (folder / "test/distributed").is_dir()


def plan_series(
    changes: Sequence[Change], read: Callable[[str], bytes | None], root: Path
) -> list[dict[str, bytes]]:
    """Returns, for each change, the contents of the files that it edits or adds.

    Args:
        read: returns a file of the tree as it was, None where there is none.
        root: where our own files are.
    """
    now: dict[str, str] = {}
    plan = []
    for change in changes:
        written = []
        for number, edit in enumerate(change.edits, 1):
            try:
                if edit.file not in now:
                    now[edit.file] = _demand(read(edit.file)).decode()
                now[edit.file] = apply_edit(now[edit.file], edit)
            except (SetupError, SyntaxError, ValueError) as error:
                where = f"{edit.file}, in {edit.scope or 'the module'}"
                what = f"{change.title}: edit {number} ({edit.do}) of {where}"
                raise SetupError(f"{what}: {error}") from None
            written.append(edit.file)
        for path, ours in change.files:
            if path not in now and read(path) is not None:
                raise SetupError(f"{change.title}: {path} is there already")
            now[path] = (root / ours).read_text()
            written.append(path)
        plan.append({path: now[path].encode() for path in written})
    return plan


def _demand(data: bytes | None) -> bytes:
    if data is None:
        raise SetupError("there is no such file")
    return data


def read_in(folder: Path, path: str) -> bytes | None:
    """Returns a file of the tree; None where there is none."""
    for place in (path, *tree.parents_of([path])):
        if (folder / place).is_symlink():
            raise SetupError(f"{path} would go through a link, {folder / place}")
    target = folder / path
    return target.read_bytes() if target.is_file() else None


def check_checkout(checkout: Path) -> None:
    if tree.run_git(checkout, "rev-parse", "--verify", f"refs/heads/{BRANCH}"):
        raise SetupError(f"{checkout} has a branch {BRANCH}: rename or remove it")
    asked = ("status", "--porcelain", "--untracked-files=no")
    if tree.demand_git(checkout, "tell what is changed", *asked):
        raise SetupError(f"{checkout} has changes that are not committed")


def commit_series(
    checkout: Path, changes: Sequence[Change], plan: Sequence[Mapping[str, bytes]]
) -> None:
    """Makes a commit of each change, on a branch of its own, and goes there."""

    def git(task: str, *arguments: str, given: str | None = None) -> str:
        return tree.demand_git(checkout, task, *arguments, given=given).strip()

    who = git("tell who commits", "var", "GIT_COMMITTER_IDENT")
    start = f"from {git('tell where it is', 'rev-parse', 'HEAD')}\n"
    stream = []
    for change, files in zip(changes, plan):
        message = f"{change.title}\n\n{change.message.strip()}\n"
        stream += [f"commit refs/heads/{BRANCH}\ncommitter {who}\n", _data(message)]
        stream.append(start)
        for path, data in files.items():
            mode = "100755" if os.access(checkout / path, os.X_OK) else "100644"
            stream += [f"M {mode} inline {path}\n", _data(data.decode())]
        start = ""
    # All commits come into being at once
    git("make the commits", "fast-import", "--quiet", given="".join(stream))
    git(f"go to {BRANCH}", "switch", "--quiet", BRANCH)


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"


class Journal:
    """What the series replaced in a tree that is edited in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / JOURNAL
        self.before: dict[str, bytes | None] = {}
        """What was there before, None where nothing was."""
        self._digests: dict[str, list[str]] = {}
        self._folders: list[str] = []
        if self.path.is_file():
            kept = json.loads(self.path.read_text())
            self._digests, self._folders = kept["digests"], kept["folders"]
            for path, text in kept["before"].items():
                self.before[path] = None if text is None else text.encode("latin-1")

    def read(self, path: str) -> bytes | None:
        """Returns a file as it was before the series."""
        return self.before[path] if path in self.before else read_in(self.folder, path)

    def check(self) -> None:
        """Refuses to go on where a file was changed since."""
        for path, data in self.before.items():
            found = read_in(self.folder, path)
            if found != data and _digest(found) not in self._digests[path]:
                what = f"{self.folder / path} was changed after the series was applied"
                raise SetupError(f"{what}: undo that change, or remove {self.path}")

    def put(self, plan: Sequence[Mapping[str, bytes]]) -> None:
        """Writes all files as the last change leaves them; twice is once."""
        after: dict[str, bytes | None] = dict(self.before)
        for files in plan:
            after |= files
        record = next(self.folder.glob("torch-*.dist-info/RECORD"), None)
        if record is not None:
            path = record.relative_to(self.folder).as_posix()
            after |= {path: self._record(path, after)}
        for path, data in after.items():
            self.before.setdefault(path, read_in(self.folder, path))
            known = self._digests.setdefault(path, [])
            if (digest := _digest(data)) not in known:
                known.append(digest)
        lacking = {p for p in tree.parents_of(after) if not (self.folder / p).exists()}
        self._folders = sorted({*self._folders, *lacking})
        self._write_journal()
        self._write(after)

    def undo(self) -> None:
        self._write(self.before)
        for path in reversed(self._folders):
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder / path / "__pycache__", ignore_errors=True)
                (self.folder / path).rmdir()
        self.path.unlink(missing_ok=True)

    def _record(self, path: str, after: Mapping[str, bytes | None]) -> bytes:
        """Returns pip's RECORD, with what is in the tree once the series is."""
        lines = (self.read(path) or b"").decode().split("\n")
        end = "\r" if lines[0].endswith("\r") else ""
        rows = {JOURNAL: f"{JOURNAL},,{end}"}
        for changed, data in after.items():
            if data is not None and changed != path and data != self.read(changed):
                row = record_row(hashlib.sha256(data).digest(), len(data))
                rows[changed] = ",".join([changed, *row]) + end
        lines = [rows.pop(line.partition(",")[0], line) for line in lines]
        return "\n".join([*lines[:-1], *rows.values(), lines[-1]]).encode()

    def _write_journal(self) -> None:
        before = {
            path: None if data is None else data.decode("latin-1")
            for path, data in self.before.items()
        }
        kept = {"before": before, "digests": self._digests, "folders": self._folders}
        write_whole(self.path, json.dumps(kept).encode())

    def _write(self, files: Mapping[str, bytes | None]) -> None:
        for path in (JOURNAL, *files):  # what a run that was killed left
            (self.folder / (path + PARTIAL)).unlink(missing_ok=True)
        for path, data in files.items():
            target = self.folder / path
            if data is None:
                target.unlink(missing_ok=True)
            elif read_in(self.folder, path) != data:
                target.parent.mkdir(parents=True, exist_ok=True)
                mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
                write_whole(target, data, mode)


def _digest(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()
