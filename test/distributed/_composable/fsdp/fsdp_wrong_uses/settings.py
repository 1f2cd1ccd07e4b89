"""Wrong uses that are found when a unit is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_wrong_uses.run import Case, Errors, FP64, Run

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, set_reduce_bucket_cap
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


SETTING = Errors()


def setting(method: str, value: Any, **kwargs: Any) -> Case:
    """Of the second unit of a model that has run."""

    def case(run: Run) -> Callable[[], object]:
        run.trained(**kwargs)
        run.undo = lambda: None
        return lambda: getattr(run.blocks[1], method)(value)

    return case


class OwnReduction(ReduceScatter):
    allocate = DefaultReduceScatter.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return DefaultReduceScatter()(*args, **kwargs)


class Uncallable:
    allocate = DefaultAllGather.allocate


SETTING.add(
    TypeError,
    "set_custom_all_gather of unit '1' got …pass an object with the methods of AllGather",
    gather_is_a_class=setting("set_custom_all_gather", DefaultAllGather),
    gather_is_not_callable=setting("set_custom_all_gather", Uncallable()),
    gather_cannot_allocate=setting("set_custom_all_gather", print),
    gather_is_a_scatter=setting("set_custom_all_gather", DefaultReduceScatter()),
)
SETTING.add(
    TypeError,
    "set_custom_reduce_scatter of unit '1' got …pass an object with the methods of "
    "ReduceScatter",
    scatter_is_a_gather=setting("set_custom_reduce_scatter", DefaultAllGather()),
)
SETTING.add(
    ValueError,
    "OwnReduction of unit '1' cannot reduce 1.weight, whose grad_comm_dtype is …Add a "
    "method exchange(output_tensor, input_tensor, group)",
    scatter_cannot_exchange=setting(
        "set_custom_reduce_scatter",
        OwnReduction(),
        mp_policy=MixedPrecisionPolicy(grad_comm_dtype=FP64, reduce_dtype=FP64),
    ),
)
SETTING.add(
    TypeError,
    "set_all_reduce_hook of unit '1' got 'all_reduce': pass a function of a buffer",
    hook_is_text=setting("set_all_reduce_hook", "all_reduce"),
)
for _kind, _what, _factor in (
    (ValueError, "zero", 0),
    (ValueError, "nan", float("nan")),
    (TypeError, "text", "2"),
    (TypeError, "a_vector", torch.ones(2)),
):
    SETTING.add(
        _kind,
        "set_gradient_divide_factor of unit '1' got …pass a finite number other than 0",
        **{f"divide_factor_is_{_what}": setting("set_gradient_divide_factor", _factor)},
    )


def capping(**sizes: Any) -> Case:
    def case(run: Run) -> Callable[[], object]:
        model = run.trained()
        run.undo = lambda: None
        return lambda: set_reduce_bucket_cap(model, **sizes)

    return case


SETTING.add(
    ValueError,
    "bucket_cap_mb=…small_kb=…must be finite and > 0",
    reduce_bucket_cap_of_0=capping(bucket_cap_mb=0),
    reduce_bucket_cap_of_nothing_small=capping(small_kb=0),
    reduce_bucket_cap_without_end=capping(bucket_cap_mb=float("inf")),
    reduce_bucket_cap_too_large=capping(small_kb=1e305),
    reduce_bucket_cap_of_nan=capping(bucket_cap_mb=float("nan")),
    reduce_bucket_cap_is_text=capping(bucket_cap_mb="1"),
)
