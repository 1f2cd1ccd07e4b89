"""
Compares a case with what its gradients must be, see [Note: Given gradients] in
``cases.py``.
"""

from __future__ import annotations

from fsdp_random.cases import (
    Case,
    fill,
    FP16,
    FP64,
    local_of,
    Model,
    Param,
    run_microbatch,
    shard_model,
    values_of,
    weight_of,
)

import torch


def check_case(case: Case, rank: int, device: str) -> None:
    """Runs the case on this rank; raises AssertionError if a step is not right."""
    model = shard_model(case, device)
    for step in range(len(case.steps)):
        fill(case, model, step)
        for i in range(len(case.steps[step].microbatches)):
            run_microbatch(case, model, step, i, rank)
            _check_seen(case, model, step, i, rank)
        _check_gradients(case, model, step)
        model.zero_grad()
    _check_nothing_is_left(model)


def _check_seen(case: Case, model: Model, step: int, i: int, rank: int) -> None:
    blocks = model.all_blocks()
    for block, j, param in case.params():
        if case.microbatches(step, rank)[i].uses(block, j):
            values = values_of(step, block, j, param)
            expected = values.to(case.compute_dtype(param))
            seen = blocks[block].seen[j].cpu()
            assert seen.dtype == expected.dtype, f"{block}.p{j} is in {seen.dtype}"
            assert torch.equal(seen, expected), f"{block}.p{j} is {seen}"


def _check_gradients(case: Case, model: Model, step: int) -> None:
    blocks = model.all_blocks()
    for block, i, param in case.params():
        name = f"block {block}, parameter {i}"
        sharded = getattr(blocks[block], f"p{i}")
        grad = sharded.grad
        is_used = any(m.uses(block, i) for m in case.steps[step].microbatches)
        if not (is_used and param.is_trained):
            assert grad is None, f"{name} got a gradient from nowhere"
            continue
        assert grad is not None, f"{name} lost its gradient"
        assert grad.dtype == param.dtype, f"{name}: the gradient is {grad.dtype}"
        exact, bound = _exact_gradient(case, block, i, param, step)
        error = (grad.to_local().double() - local_of(exact, sharded)).abs()
        # A NaN is not below the bound
        is_right = bool((error <= local_of(bound, sharded)).all())
        assert is_right, f"{name}: {error} over {bound}, got {grad.to_local()}"


def _exact_gradient(
    case: Case, block: int, i: int, param: Param, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the exact gradient and how far from it the reduced one may be.

    Each cast, addition and division rounds by at most half an eps of a partial
    sum, which is at most the sum of magnitudes: one addition for each rank and
    up to two for each microbatch, and few casts and divisions. fp16 also has
    subnormals, into which the division before the sum may lead.
    """
    total = torch.zeros(param.shape, dtype=FP64)
    magnitude = torch.zeros(param.shape, dtype=FP64)
    names = 2 if param.has_two_names else 1
    for rank in range(case.ranks):
        for batch, microbatch in enumerate(case.microbatches(step, rank)):
            if microbatch.uses(block, i):
                weight = weight_of(
                    case, block, i, param, step=step, batch=batch, rank=rank
                )
                total += names * weight.double()
                magnitude += names * weight.double().abs()
    divisor = case.divide_factor or case.ranks
    dtypes = {param.dtype, case.compute_dtype(param), case.reduce_dtype_of(param)}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    roundings = case.ranks + 2 * len(case.steps[step].microbatches) + 5
    subnormals = roundings * 2.0**-24 if FP16 in dtypes else 0.0
    bound = (roundings * eps / 2 * magnitude + subnormals * case.ranks) / divisor
    return total / divisor, bound + (subnormals if FP16 in dtypes else 0.0)


def _check_nothing_is_left(model: Model) -> None:
    for block in model.all_blocks():
        for group in block._get_fsdp_state()._fsdp_param_groups:
            assert (
                not group._reducer.partial_reduces
                and not group.comm_ctx.all_reduce_states
            )
            assert not group.comm_ctx.reduce_scatter_states
            assert not group.comm_ctx.small_reductions
            assert group._all_gather_result is None
            assert not group.is_unsharded
