"""Compares a case with its gradients, see [Note: Given gradients] in ``cases.py``."""

from fsdp_helpers.random import cases
from fsdp_helpers.random.cases import Case, local_of, Model

import torch
import torch.distributed as dist


def check_case(case: Case, device: str) -> None:
    """Runs the case on this rank; raises AssertionError if a step is not right."""
    model = cases.shard_model(case, device)
    for number, step in enumerate(case.steps):
        cases.fill(model, number)
        for batch in range(len(step.microbatches)):
            cases.run_microbatch(model, number, batch)
            _check_seen(model, number, batch)
        _check_gradients(model, number)
        model.zero_grad()
    _check_nothing_is_left(model)


def _check_seen(model: Model, step: int, batch: int) -> None:
    case, blocks = model.case, model.all_blocks()
    microbatch = case.microbatches(step, dist.get_rank())[batch]
    for block, i, param in case.params():
        if microbatch.uses(block, i):
            values = cases.values_of(case, step, block, i)
            expected = values.to(case.compute_dtype(param))
            seen = blocks[block].seen[i].cpu()
            assert seen.dtype == expected.dtype, f"{block}.p{i} is in {seen.dtype}"
            assert torch.equal(seen, expected), f"{block}.p{i} is {seen}"


def _check_gradients(model: Model, step: int) -> None:
    case, blocks = model.case, model.all_blocks()
    for block, i, param in case.params():
        name = f"block {block}, parameter {i}"
        sharded = getattr(blocks[block], f"p{i}")
        grad = sharded.grad
        is_used = any(m.uses(block, i) for m in case.steps[step].microbatches)
        if not (is_used and param.is_trained):
            assert grad is None, f"{name} got a gradient from nowhere"
            continue
        assert grad is not None, f"{name} lost its gradient"
        expected = param.grad_dtype or param.dtype
        assert grad.dtype == expected, f"{name}: the gradient is {grad.dtype}"
        exact, bound = _exact_gradient(case, step, block, i)
        error = (grad.to_local().double() - local_of(exact, sharded)).abs()
        # A NaN is not below the bound
        is_right = bool((error <= local_of(bound, sharded)).all())
        assert is_right, f"{name}: {error} over {bound}, got {grad.to_local()}"


def _exact_gradient(
    case: Case, step: int, block: int, i: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the exact gradient and how far from it the reduced one may be.

    Each cast, addition and division rounds by at most half an eps of a partial
    sum, which is at most the sum of magnitudes: one addition for each rank and
    up to two for each microbatch, and few casts and divisions. fp16 also has
    subnormals, into which the division before the sum may lead.
    """
    param = case.blocks[block][i]
    by_rank = [case.microbatches(step, rank) for rank in range(case.ranks)]
    is_used = torch.tensor([[m.uses(block, i) for m in mine] for mine in by_rank])
    names = 2 if param.has_two_names else 1
    given = names * cases.weights_of(case, step, block, i).double()[is_used]
    divisor = case.divide_factor or case.ranks
    dtypes = {param.dtype, case.compute_dtype(param), case.reduce_dtype_of(param)}
    dtypes.add(param.grad_dtype or param.dtype)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    roundings = case.ranks + 2 * len(by_rank[0]) + 5
    subnormals = roundings * 2.0**-24 if cases.FP16 in dtypes else 0.0
    bound = roundings * eps / 2 * given.abs().sum(0) + subnormals * case.ranks
    return given.sum(0) / divisor, bound / divisor + subnormals


def _check_nothing_is_left(model: Model) -> None:
    for block in model.all_blocks():
        for group in block._get_fsdp_state()._fsdp_param_groups:
            assert not group._partial_reduces
            assert not group.comm_ctx.all_reduce_states
            assert not group.comm_ctx.reduce_scatter_states
            assert not group.comm_ctx.joined_reductions
            assert group._all_gather_result is None
            assert not group.is_unsharded
