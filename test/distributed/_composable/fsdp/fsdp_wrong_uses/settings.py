"""Wrong uses that are found when a unit is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_wrong_uses.rows import add_each, Case, FP64, Run, SETTING

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, set_reduce_bucket_cap
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


def setting(method: str, *args: Any, mp_policy: Any = None, **kwargs: Any) -> Case:
    """Of the second unit of a model that has run."""

    def case(run: Run) -> Callable[[], object]:
        run.trained(**({"mp_policy": mp_policy} if mp_policy else {}))
        run.mend = lambda: None
        return lambda: getattr(run.blocks[1], method)(*args, **kwargs)

    return case


class OwnReduction(ReduceScatter):
    allocate = DefaultReduceScatter.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return DefaultReduceScatter()(*args, **kwargs)


class Uncallable:
    allocate = DefaultAllGather.allocate


add_each(
    SETTING,
    [
        (
            f"gather_is_{what}",
            f"a custom all-gather is {shown}",
            setting("set_custom_all_gather", comm),
            TypeError,
            "set_custom_all_gather of unit '1' got",
        )
        for what, shown, comm in (
            ("a_class", "a class, not an object of it", DefaultAllGather),
            ("none", "`None`", None),
            ("not_callable", "an object without `__call__`", Uncallable()),
            ("a_scatter", "a `ReduceScatter`", DefaultReduceScatter()),
        )
    ],
    found="`set_custom_all_gather`",
    do="pass an object with the methods of AllGather",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"scatter_is_{what}",
            f"a custom reduce-scatter is {shown}",
            setting("set_custom_reduce_scatter", comm),
            TypeError,
            "set_custom_reduce_scatter of unit '1' got",
        )
        for what, shown, comm in (
            ("a_number", "a number", 3),
            ("a_gather", "an `AllGather`", DefaultAllGather()),
        )
    ],
    found="`set_custom_reduce_scatter`",
    do="pass an object with the methods of ReduceScatter",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            "scatter_cannot_exchange",
            "a custom reduce-scatter where `grad_comm_dtype` is set",
            setting(
                "set_custom_reduce_scatter",
                OwnReduction(),
                mp_policy=MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64),
            ),
            ValueError,
            "OwnReduction of unit '1' cannot reduce 1.weight, which is sent in",
        )
    ],
    found="`set_custom_reduce_scatter`",
    do="give it a method exchange(output_tensor, input_tensor, group)",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            "hook_is_text",
            "an all-reduce hook cannot be called",
            setting("set_all_reduce_hook", "all_reduce"),
            TypeError,
            "set_all_reduce_hook of unit '1' got 'all_reduce'",
        )
    ],
    found="`set_all_reduce_hook`",
    do="pass a function of the buffer",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"divide_factor_is_{what}",
            f"a divide factor of {factor}",
            setting("set_gradient_divide_factor", factor),
            ValueError,
            f"set_gradient_divide_factor of unit '1' got {factor}",
        )
        for what, factor in (("0", 0), ("nan", float("nan")), ("inf", float("inf")))
    ],
    found="`set_gradient_divide_factor`",
    do="pass a finite number other than 0",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"divide_factor_is_{what}",
            f"a divide factor that is a {what}",
            setting("set_gradient_divide_factor", factor),
            TypeError,
            "set_gradient_divide_factor of unit '1' got",
        )
        for what, factor in (("string", "2"), ("vector", torch.ones(2)))
    ],
    found="`set_gradient_divide_factor`",
    do="pass a finite number other than 0",
    about="unit '1'",
)
add_each(
    SETTING,
    [
        (
            f"input_buffers_are_{shown}".lower(),
            f"`set_reduce_scatter_max_input_buffers({shown})`",
            setting("set_reduce_scatter_max_input_buffers", value),
            kind,
            begins,
        )
        for shown, value, kind, begins in (
            ("0", 0, ValueError, "max_input_buffers must be a positive int, got 0"),
            ("True", True, TypeError, "max_input_buffers must be an int, got bool"),
        )
    ],
    found="the setter",
    do="pass 1 or more",
    is_ours=False,
)
add_each(
    SETTING,
    [
        (
            "prefetch_of_no_unit",
            "prefetching a module that is no unit",
            setting("set_modules_to_forward_prefetch", [nn.Linear(2, 2)]),
            ValueError,
            "Expects FSDPModule but got",
        ),
    ],
    found="`set_modules_to_forward_prefetch`",
    do="pass modules that `fully_shard` was called on",
    about="Linear",
    is_ours=False,
)
add_each(
    SETTING,
    [
        (
            "reshard_later_to_two",
            "`set_reshard_after_forward(2)`",
            setting("set_reshard_after_forward", 2),
            ValueError,
            "reshard_after_forward should be a bool",
        ),
    ],
    found="the setter",
    do="pass a bool; a number of ranks is for `fully_shard`",
    is_ours=False,
)


def capping(*args: Any, whole: bool = True, **kwargs: Any) -> Case:
    """Of a model that has run, or of a module without units."""

    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        run.mend = lambda: None
        module = model if whole else nn.Linear(2, 2)
        return lambda: set_reduce_bucket_cap(module, *args, **kwargs)

    return case


add_each(
    SETTING,
    [
        (
            f"reduce_bucket_cap_{what}",
            f"`set_reduce_bucket_cap` with {shown}",
            capping(*args, **kwargs),
            ValueError,
            "set_reduce_bucket_cap expects sizes above 0",
        )
        for what, shown, args, kwargs in (
            ("of_0", "`bucket_cap_mb=0`", (0,), {}),
            ("of_nothing_small", "`small_kb=0`", (), {"small_kb": 0}),
        )
    ],
    found="`set_reduce_bucket_cap`",
    do="bucket_cap_mb=None to join no reductions",
)
add_each(
    SETTING,
    [
        (
            "reduce_bucket_cap_of_no_unit",
            "`set_reduce_bucket_cap` of a module without units",
            capping(whole=False),
            ValueError,
            "set_reduce_bucket_cap found no unit in Linear",
        )
    ],
    found="`set_reduce_bucket_cap`",
    do="call fully_shard first",
    about="Linear",
)
