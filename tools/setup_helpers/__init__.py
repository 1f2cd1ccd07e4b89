"""In-place build: the base release under the fork's tree.

``python3 -m tools.setup_helpers setup`` is what ``make setup`` runs, and
``setup.py`` calls the same functions.  Nothing here needs more than the
standard library, because it runs before anything is installed.

    cli.py          the commands: setup, clean, fork, wheel
    releases.py     the releases that the branch fits, in one table
    inplace.py      the order of the steps, and undoing them
    mirror.py       the same for another release, in a tree of its own
    environment.py  .venv, its pip, its path file
    wheel.py        the base wheel: checking it, unpacking it
    assemble.py     our wheel: the base's, with our files in it
    rawzip.py       an archive out of another one's members, as they are
    files.py        writing a file whole or not at all
    links.py        where the links into build/base go, and laying them
    tree.py         which files are ours, and what git must not pick up
    report.py       what the user sees: phases, a progress bar, one-line errors
    editable.py     the same for setup.py, without .venv
"""
