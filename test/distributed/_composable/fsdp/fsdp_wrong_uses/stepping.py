"""Wrong uses of dtypes, collectives and extensions, which are found in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_parity.waves import Extended
from fsdp_wrong_uses.rows import (
    add_each,
    BF16,
    Case,
    FP64,
    Run,
    Scaled,
    STEPPING,
    wrong,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


# Dtypes #


@wrong(
    STEPPING,
    "a module is cast after it ran",
    "next forward",
    RuntimeError,
    "1.weight was gathered in torch.bfloat16 before, but is now torch.float64",
    "only before its first forward",
    "1.weight",
)
def cast_between_steps(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.blocks[1].to(FP64)
    return lambda: model(run.input())


@wrong(
    STEPPING,
    "another dtype of the same width is loaded with `assign=True` after a step",
    "next forward",
    RuntimeError,
    "1.weight was gathered in torch.bfloat16 before, but is now torch.float16",
    "only before its first forward",
    "1.weight",
)
def loads_another_dtype(run: Run) -> Callable[[], object]:
    model = run.trained()
    state = dict(model.state_dict())
    state["1.weight"] = state["1.weight"].to(torch.float16)
    model.load_state_dict(state, assign=True)
    return lambda: model(run.input())


@wrong(
    STEPPING,
    "a parameter's `data` is cast after a step",
    "backward",
    RuntimeError,
    "1.gain is torch.bfloat16 now, but its gradients are torch.float32",
    "cast a model before its first forward, not between steps",
    "1.gain",
)
def cast_data(run: Run) -> Callable[[], object]:
    model = run.trained()
    gain = run.blocks[1].gain
    gain.data = gain.data.to(BF16)
    return lambda: run.step(model)


@wrong(
    STEPPING,
    "a parameter's `data` is cast after a step, and its gradient stays",
    "backward",
    RuntimeError,
    "1.gain is torch.bfloat16 now, but its shard is torch.float32",
    "cast a model before its first forward, not between steps",
    "1.gain",
)
def cast_data_beside_grad(run: Run) -> Callable[[], object]:
    model = run.trained()
    run.step(model)
    gain = run.blocks[1].gain
    gain.data = gain.data.to(BF16)
    return lambda: run.step(model)


# Collectives #


def allocating(kind: type, allocate: Callable[..., Any], **kwargs: Any) -> Case:
    """Of a step in which a custom collective allocates something else."""

    class Custom(kind):  # type: ignore[misc, valid-type]
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
            return allocate(size[0], dtype, device)

    def case(run: Run) -> Callable[[], object]:
        model = run.trained(**kwargs)
        setter = run.blocks[1].set_custom_reduce_scatter
        if kind is DefaultAllGather:
            setter = run.blocks[1].set_custom_all_gather
        setter(Custom())
        run.mend = lambda: setter(kind())
        return lambda: run.step(model)

    return case


ALLOCATES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "nothing": ("`None`", lambda n, dtype, device: None, "a NoneType"),
    "too_little": (
        "too small a buffer",
        lambda n, dtype, device: torch.empty(n - 1, dtype=dtype, device=device),
        "",
    ),
    "too_much": (
        "too large a buffer",
        lambda n, dtype, device: torch.empty(n + 1, dtype=dtype, device=device),
        "",
    ),
    "with_gaps": (
        "a buffer with gaps",
        lambda n, dtype, device: torch.empty(2 * n, dtype=dtype, device=device)[::2],
        "a tensor that is not contiguous",
    ),
    "on_meta": (
        "a buffer on the meta device",
        lambda n, dtype, device: torch.empty(n, dtype=dtype, device="meta"),
        "a tensor on the meta device",
    ),
}
for _kind, _setter, _found in (
    (DefaultAllGather, "set_custom_all_gather", "next forward"),
    (DefaultReduceScatter, "set_custom_reduce_scatter", "backward"),
):
    _what = "all-gather" if _kind is DefaultAllGather else "reduce-scatter"
    add_each(
        STEPPING,
        [
            (
                f"{_what.replace('-', '_')}_allocates_{name}",
                f"a custom {_what} allocates {shown}",
                allocating(_kind, allocate),
                ValueError,
                f"Custom.allocate, from {_setter}, returned {returned}".rstrip(),
            )
            for name, (shown, allocate, returned) in ALLOCATES.items()
        ],
        found=_found,
        do="return a contiguous tensor of the size, dtype and device that it is asked",
        about=_setter,
    )
add_each(
    STEPPING,
    [
        (
            "all_gather_allocates_floats",
            "a custom all-gather allocates another dtype",
            allocating(
                DefaultAllGather,
                lambda n, dtype, device: torch.empty(n, dtype=FP64, device=device),
            ),
            ValueError,
            "Custom.allocate, from set_custom_all_gather, returned one of torch.float64",
        )
    ],
    found="next forward",
    do="return a contiguous tensor of the size, dtype and device that it is asked",
    about="set_custom_all_gather",
)
add_each(
    STEPPING,
    [
        (
            "reduce_scatter_allocates_unaligned",
            "a custom reduce-scatter allocates a buffer that is not aligned for the "
            "dtypes that are sent together",
            allocating(
                DefaultReduceScatter,
                lambda n, dtype, device: torch.empty(n + 1, dtype=dtype, device=device)[
                    1:
                ],
                mp_policy=MixedPrecisionPolicy(
                    grad_comm_dtype_override_fn=lambda param: param.dtype
                ),
            ),
            ValueError,
            "Custom.allocate returned a buffer that starts at byte 1 of its storage",
        )
    ],
    found="backward",
    do="return one that starts at a multiple of that",
)


# Extensions #


def extension(
    pre: Callable[[torch.Tensor], Any] | None = None,
    post: Callable[[torch.Tensor], Any] | None = None,
) -> Case:
    """Of a first step with a tensor whose extension returns something else."""

    class Wrong(Extended):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            whole = self.whole_shard()
            return ((whole,), type(self).__name__) if pre is None else pre(whole)

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None
        ) -> Any:
            (values,) = outputs
            if out is None:
                return (values, (values,)) if post is None else post(values)
            return None

    def case(run: Run) -> Callable[[], object]:
        block = Scaled().to(run.device)
        block.gain = nn.Parameter(Wrong(block.gain.detach()))
        model = run.fully_shard(nn.Sequential(run.fully_shard(block)))
        return lambda: run.step(model)

    return case


add_each(
    STEPPING,
    [
        (
            f"pre_all_gather_returns_{name}",
            f"`fsdp_pre_all_gather` returns {shown}",
            extension(pre=pre),
            kind,
            begins,
        )
        for name, shown, pre, kind, begins in (
            (
                "none",
                "`None`",
                lambda whole: None,
                TypeError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
            (
                "three",
                "three values",
                lambda whole: ((whole,), None, None),
                ValueError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
            (
                "numbers",
                "numbers",
                lambda whole: ((1, 2), None),
                AttributeError,
                "fsdp_pre_all_gather of 0.gain failed, or did not return",
            ),
        )
    ],
    found="first forward",
    do="((contiguous tensor, ...), metadata)",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            "pre_all_gather_returns_nothing",
            "`fsdp_pre_all_gather` returns no tensor",
            extension(pre=lambda whole: ((), None)),
            ValueError,
            "fsdp_pre_all_gather of 0.gain returned no tensor to gather",
        )
    ],
    found="first forward",
    do="return ((tensor, ...), metadata)",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            "pre_all_gather_returns_meta",
            "`fsdp_pre_all_gather` returns a tensor on another device",
            extension(pre=lambda whole: ((whole.to("meta"),), None)),
            RuntimeError,
            "fsdp_pre_all_gather of 0.gain failed, or did not return tensors on",
        )
    ],
    found="first forward",
    do="return tensors on",
    about="0.gain",
)
add_each(
    STEPPING,
    [
        (
            f"post_all_gather_returns_{name}",
            f"`fsdp_post_all_gather` returns {shown}",
            extension(post=post),
            kind,
            "fsdp_post_all_gather of 0.gain failed, or did not return",
        )
        for name, shown, post, kind in (
            ("none", "`None`", lambda values: None, TypeError),
            ("one", "a tensor alone", lambda values: values, ValueError),
            (
                "too_little",
                "too small a tensor",
                lambda values: (values[:1].clone(), (values,)),
                RuntimeError,
            ),
            (
                "meta",
                "a tensor on another device",
                lambda values: (values.to("meta"), (values,)),
                ValueError,
            ),
            (
                "nothing_to_free",
                "`None` for the tensors to free",
                lambda values: (values, None),
                TypeError,
            ),
        )
    ],
    found="first forward",
    do="(tensor, (tensor to free, ...))",
    about="0.gain",
)


class Unable(DefaultReduceScatter):
    """Of a backend that has no all-to-all."""

    def exchange(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Backend mpi does not support alltoall_base")


def cannot_exchange(run: Run) -> Callable[[], object]:
    policy = MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64)
    model = run.model(mp_policy=policy)
    for block in run.blocks:
        block.set_custom_reduce_scatter(Unable())

    def mend() -> None:
        for block in run.blocks:
            block.set_custom_reduce_scatter(DefaultReduceScatter())

    run.mend = mend
    return lambda: run.step(model)


add_each(
    STEPPING,
    [
        (
            "backend_cannot_exchange",
            "`grad_comm_dtype` on a backend without `all_to_all_single`",
            cannot_exchange,
            RuntimeError,
            "The gradients of 1.",
        )
    ],
    found="first backward",
    do="If the backend lacks it for",
    about="1.weight",
)
