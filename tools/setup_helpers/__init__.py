"""In-place build: a release, and ours laid over it in a tree of links.

``python3 -m tools.setup_helpers setup`` is what ``make setup`` runs, and
``setup.py`` calls the same functions.  Nothing here needs more than the
standard library, because it runs before anything is installed.

    cli.py          the commands: setup, clean, wheel
    releases.py     the releases that the branch fits, in one table
    build.py        the order of the steps, and undoing them
    environment.py  .venv, its pip, its path file
    wheel.py        a release's wheel: checking it, unpacking it
    assemble.py     our wheel: the release's, with our files in it
    digests.py      whether files are a release's own
    files.py        writing a file whole or not at all
    tree.py         which files are ours, and the links to them and to the release
    report.py       what the user sees: phases, a progress bar, one-line errors
    editable.py     the same for setup.py, without .venv
"""
