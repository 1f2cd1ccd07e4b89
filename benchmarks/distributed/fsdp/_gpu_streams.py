"""Compares schedules whose kernels are late with the same in order."""

from _gpu_part import Ask, BRANCH, Case, Figure, Found, Part, Where


RANKS = 4


def _figures(found: Found) -> list[Figure]:
    branch = found[BRANCH]
    detail = f"of {branch['tensors']} tensors a rank"
    if branch["staged"]:
        detail += f"; over the host: {', '.join(branch['staged'])}"
    return [
        Figure(f"late_{name}_differ", count, detail)
        for name, count in branch["differ"].items()
    ]


def _cases() -> list[Case]:
    try:
        from _gpu_schedules import names
    except ModuleNotFoundError as missing:  # of the tests, which need more than torch
        reason = f"there is no package {missing.name}: pip install it"
        return [Case("all", {}, _figures, reason)]
    cases = []
    for name, kind in names():
        asks = {BRANCH: Ask(BRANCH, {"schedule": name, "kind": kind})}
        label = "".join(c for c in kind.replace(" ", "_") if c.isalnum() or c == "_")
        cases.append(Case(f"{name}_{label}", asks, _figures))
    return cases


def part(where: Where) -> Part:
    about = (
        f"Schedules on {RANKS} ranks of real streams, with kernels slowed down, "
        "beside the same with a wait after each operator."
    )
    return Part(
        "streams",
        about,
        "streams",
        _cases(),
        seconds=120,
        side={"backend": "gloo", "world_size": RANKS},
        not_run="" if where.is_cuda else "streams need CUDA",
    )
