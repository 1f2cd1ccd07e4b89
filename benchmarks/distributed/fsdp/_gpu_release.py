"""Finds the release that the branch was laid over, to compare with."""

from pathlib import Path

from _sides import REPO_ROOT

from tools.links import lay_links, plan_links
from tools.releases import files_under


# Where an overlay keeps the files that it replaced, from the folder that holds torch/
KEPT = "torch/.mixed_dtype/release"
MADE = REPO_ROOT / "build" / "gpu" / "release"


def find_release(given: Path | None, tree_root: Path) -> Path | None:
    """
    Returns a folder with the release's ``torch/``: the one that is given, the one that
    set-up keeps, or one of links in which an overlay's files are the release's again.
    """
    if given is not None:
        return given if (given / "torch").is_dir() else None
    if (tree_root.parent / "base" / "torch").is_dir():
        return tree_root.parent / "base"
    if (tree_root / KEPT / "torch").is_dir():
        return _lay_release(tree_root)
    return None


def _lay_release(tree_root: Path) -> Path:
    kept = tree_root / KEPT
    own = files_under(kept, "torch")
    planned = plan_links(tree_root, kept, own)
    links = {path: to for path, to in planned.items() if path.startswith("torch/")}
    lay_links(MADE, links)
    return MADE
