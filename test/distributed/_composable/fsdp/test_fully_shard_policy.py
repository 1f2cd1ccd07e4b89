# Owner(s): ["oncall: distributed"]
"""What a policy, or a ``grad_dtype``, says of each parameter, and what it refuses."""

import copy
import dataclasses
import inspect
import pickle
import re
from functools import partial
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common import utils
from fsdp_helpers.common.comms import (
    backward,
    BF16,
    FP8,
    FP16,
    FP32,
    FP64,
    GivenGrads,
    group_of,
)
from fsdp_helpers.common.release_rules import IS_2_15, reduce_dtype
from fsdp_helpers.common.utils import DeviceFreeTest

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard, layout_summary
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.fsdp._fully_shard import _fsdp_policies as policies
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.quick

INT8, PACKED = torch.int8, torch.float4_e2m1fn_x2
by_name = Policy.by_name


def param(dtype: torch.dtype = FP32) -> nn.Parameter:
    data = torch.zeros(2, dtype=dtype)
    return nn.Parameter(data, requires_grad=dtype.is_floating_point)


def resolve(
    policy: Policy, of: nn.Parameter, fqn: str = "layers.0.gate"
) -> tuple[torch.dtype | None, torch.dtype | None]:
    resolved = policies.resolve(policy, of, fqn, None)
    return resolved.param_dtype, resolved.reduce_dtype


def returning(**dtypes: Any) -> Policy:
    """Returns a policy whose overrides return these for every parameter."""
    overrides = {
        f"{name}_override_fn": lambda _, dtype=dtype: dtype
        for name, dtype in dtypes.items()
    }
    return Policy(BF16, FP32, **overrides)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4))
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def as_compiled(module: nn.Module) -> nn.Module:
    """Registers a module as ``torch.compile`` does, without the compiler's import."""
    return nn.ModuleDict({"_orig_mod": module})


class Model(nn.Module):
    """Its head and its embedding are one parameter, and its last layer has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.last = self.layers[1]


def dtypes_of(
    model: nn.Module, policy: Policy
) -> dict[str, tuple[torch.dtype | None, torch.dtype | None]]:
    return {fqn: resolve(policy, p, fqn) for fqn, p in model.named_parameters()}


def computed(
    patterns: dict[str, torch.dtype],
    *fqns: str,
    model: nn.Module | None = None,
    is_named: bool | None = True,
) -> list[torch.dtype | None]:
    """Returns what the parameters of a unit compute in, by default in bf16."""
    fields = {pattern: {"param_dtype": dtype} for pattern, dtype in patterns.items()}
    model = Model() if model is None else model
    policy = by_name(model, fields, param_dtype=BF16)
    resolved = policies.resolve_all(policy, [param() for _ in fqns], fqns, is_named)
    return [of.param_dtype for of in resolved]


def failing(error: Exception) -> Policy:
    return Policy(reduce_dtype_override_fn=mock.Mock(side_effect=error))


def using(policy: Policy, stored: torch.dtype = FP32) -> Any:
    return partial(resolve, policy, param(stored))


def setting(pattern: str, value: Any, **others: Any) -> Any:
    return lambda: by_name(Model(), {pattern: value} | others)


# Text of the error, and the wrong use
WRONG_USES = [
    # Fields of another type
    ("reduce_dtype is 'half': give a torch.dtype", partial(Policy, None, "half")),
    ("output_dtype is 1: give a torch.dtype", partial(Policy, output_dtype=1)),
    (
        "grad_comm_dtype_override_fn is torch.float32: give a function",
        partial(Policy, grad_comm_dtype_override_fn=FP32),
    ),
    (
        "cast_forward_inputs is a dtype: give fields by keyword",
        partial(Policy, BF16, FP32, FP32, FP32),
    ),
    # Policies that a parameter cannot be trained with
    (
        f"returned {INT8} for parameter layers.0.gate",
        using(returning(param_dtype=INT8)),
    ),
    (
        "Return an unpacked floating-point dtype",
        using(returning(reduce_dtype=PACKED)),
    ),
    ("Return that dtype", using(returning(param_dtype=FP32), INT8)),
    ("reduce_dtype_override_fn failed for layers.0.gate", using(failing(ValueError()))),
    (f"reduced in {FP8}. Set reduce_dtype to", using(Policy(BF16, FP8))),
    (f"reduced in {FP8}. Set reduce_dtype to", using(returning(reduce_dtype=FP8), FP8)),
    ("Set grad_comm_dtype to one of", using(Policy(grad_comm_dtype=FP8))),
    (f"layers.0.gate trains in {INT8}: set a", using(Policy(INT8))),
    (f"trains in {PACKED}: set a floating-", using(Policy(PACKED))),
    (
        f"sent in {FP32} and added in {BF16}. Set a reduce_dtype",
        using(Policy(None, BF16, grad_comm_dtype=FP32)),
    ),
    # Patterns
    ("'norm.weight' matches nothing in Model", setting("norm.weight", {})),
    (
        "Patterns set param_dtype of layers.1.norm.weight alias last.norm.weight to two "
        "dtypes: (torch.float32, '*.norm.*') and (None, 'layers.1.*')",
        setting("*.norm.*", Policy(FP32), **{"layers.1.*": {"param_dtype": None}}),
    ),
    (
        "patterns is ['*.A_log']: give {pattern: dict(...)}",
        partial(by_name, Model(), ["*.A_log"]),
    ),
    ("sets dtype: set only ('param_dtype'", setting("*.A_log", {"dtype": FP32})),
    ("sets output_dtype: set only", setting("*.A_log", Policy(output_dtype=FP32))),
    ("sets torch.float32: give a dict", setting("*.A_log", FP32)),
    (
        "sets param_dtype='half': give a dtype",
        setting("*.A_log", {"param_dtype": "half"}),
    ),
    # Names that leave a dtype open
    (
        "A_log may be layers.0.A_log or layers.1.A_log of Model, which patterns",
        partial(computed, {"layers.0.A_log": FP32}, "A_log"),
    ),
    (
        "by_name: Model has no parameter layers.0.D: call it on the whole",
        partial(computed, {"*.A_log": FP32}, "layers.0.D"),
    ),
]


class TestWrongUses(DeviceFreeTest):
    def test_wrong_policy_is_told_what_to_do(self) -> None:
        for text, call in WRONG_USES:
            kind = TypeError if "give " in text else ValueError
            with self.subTest(text), self.assertRaisesRegex(kind, re.escape(text)):
                call()

    def test_overrides_that_cannot_be_asked(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"layers\.0\.gate: KeyError\(\)"):
            resolve(failing(KeyError()), param())
        policy = by_name(Model(), {"*.A_log": {"reduce_dtype": FP32}})
        with self.assertRaisesRegex(TypeError, "by_name is asked by name"):
            policy.reduce_dtype_override_fn(param())


class TestResolve(DeviceFreeTest):
    def test_releases_own_class_is_a_policy(self) -> None:
        """Plugins import it. The default of ``fully_shard`` equals the branch's."""
        default = inspect.signature(fully_shard).parameters["mp_policy"].default
        self.assertEqual(default, Policy())
        released = _fsdp_api.MixedPrecisionPolicy(BF16, reduce_dtype=FP32)
        self.assertIsInstance(Policy(), type(released))
        self.assertEqual(resolve(released, param()), (BF16, FP32))
        by_pattern = by_name(Model(), {"*.A_log": released})
        self.assertEqual(dtypes_of(Model(), by_pattern)["layers.0.A_log"], (BF16, FP32))

    def test_dtype_of_an_override_replaces_the_default(self) -> None:
        none = returning(param_dtype=None, reduce_dtype=None)
        self.assertEqual(resolve(none, param()), (BF16, FP32))
        both = returning(param_dtype=FP32, reduce_dtype=FP16)
        self.assertEqual(resolve(both, param()), (FP32, FP16))
        policy = Policy(BF16, FP32, FP16, False, param_dtype_override_fn=lambda _: FP64)
        # All other fields stay, and no override is left
        resolved = policies.resolve(policy, param(), "gate", None)
        self.assertEqual(resolved, Policy(FP64, FP32, FP16, False))

    def test_floats_take_any_float_and_others_their_own_dtype(self) -> None:
        pairs = [(FP32, dtype) for dtype in (FP64, FP32, FP16, BF16)]
        pairs += [(dtype, dtype) for dtype in (INT8, torch.complex64, FP64)]
        for stored, dtype in pairs:
            with self.subTest("reduces", stored=stored, dtype=dtype):
                reduces = returning(reduce_dtype=dtype)
                self.assertEqual(resolve(reduces, param(stored)), (BF16, dtype))
        for stored, dtype in [*pairs, (FP8, FP8), (FP32, FP8)]:
            with self.subTest("computes", stored=stored, dtype=dtype):
                computes = returning(param_dtype=dtype)
                self.assertEqual(resolve(computes, param(stored)), (dtype, FP32))

    def test_comm_dtype_adds_in_fp32_only_while_it_is_set(self):
        policy = Policy(BF16, grad_comm_dtype=BF16)
        self.assertEqual(resolve(policy, param()), (BF16, FP32))
        unset = dataclasses.replace(policy, grad_comm_dtype=None)
        self.assertEqual(resolve(unset, param()), (BF16, None))
        # A dtype of the whole unit is the release's, which refuses none
        self.assertEqual(resolve(Policy(FP8), param()), (FP8, None))

    def test_policy_classes_of_users_may_set_fields_themselves(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Fixed(_fsdp_api.MixedPrecisionPolicy):
            reduce_dtype: Any = dataclasses.field(init=False, default=None)

        @dataclasses.dataclass(frozen=True)
        class Sending(_fsdp_api.MixedPrecisionPolicy):
            grad_comm_dtype = BF16

        self.assertEqual(resolve(Fixed(BF16), param()), (BF16, None))
        self.assertEqual(resolve(Sending(BF16), param()), (BF16, FP32))

    def test_default_of_reduce_dtype_must_be_reducible(self) -> None:
        """It is the computed dtype, or since 2.15 the gradient's."""
        cases = [(FP8, FP8, FP8), (BF16, FP8, FP8)]
        for case in [*cases, *((FP8, FP32, grads) for grads in (FP32, BF16, None))]:
            computes, stored, grad_dtype = case
            trained, frozen = param(stored), param(stored).requires_grad_(False)
            trained.grad_dtype = grad_dtype
            of_all = Policy(computes)
            by_default = reduce_dtype(of_all, grad_dtype or computes)
            policy = Policy(param_dtype_override_fn=lambda _, dtype=computes: dtype)
            with self.subTest(case):
                # Without a gradient
                self.assertEqual(resolve(policy, frozen), (computes, None))
                if by_default == FP8:
                    with self.assertRaisesRegex(ValueError, f"reduced in {FP8}"):
                        resolve(policy, trained)
                else:
                    self.assertEqual(resolve(policy, trained), (computes, None))

    def test_names_that_are_known_later_change_nothing_of_integers(self) -> None:
        model = nn.ParameterDict({"w": param(), "q": param(torch.uint8)})
        policy = by_name(model, {"w": {"param_dtype": BF16}}, grad_comm_dtype=BF16)
        nothing = {"reduce_dtype_override_fn": lambda param: None}
        policy = dataclasses.replace(policy, **nothing)
        params = [*model.values()], [*model]
        resolved = policies.resolve_all(policy, *params)
        again = policies.resolve_all(policy, *params, True, resolved)
        named = [dataclasses.replace(p, param_dtype_override_fn=None) for p in resolved]
        self.assertEqual(again, named)


class TestByName(DeviceFreeTest):
    def test_patterns_set_what_they_name_and_leave_the_rest(self) -> None:
        """A policy as pattern sets those of its dtypes that are not the default."""
        model = Model()
        patterns = {
            "layers.[!0].?_log": {"param_dtype": FP32},
            "*norm*": {"param_dtype": FP32, "reduce_dtype": FP64},
            "embed.*": Policy(reduce_dtype=FP16),
            "layers.0.proj.*": Policy(),
            "layers.1.proj.*": Policy(grad_comm_dtype=BF16),
        }
        by_default: Any = {"output_dtype": FP16, "cast_forward_inputs": False}
        dtypes = {"param_dtype": BF16, "reduce_dtype": BF16}
        policy = by_name(model, patterns, **dtypes, **by_default)
        # What is sent in a narrower dtype is added in fp32
        expected: dict[str, Any] = {"embed.weight": (BF16, FP16)}
        for i in range(2):
            expected |= {
                f"layers.{i}.A_log": (FP32 if i else BF16, BF16),
                f"layers.{i}.norm.weight": (FP32, FP64),
                f"layers.{i}.norm.bias": (FP32, FP64),
                f"layers.{i}.proj.weight": (BF16, FP32 if i else BF16),
            }
        self.assertEqual(dtypes_of(model, policy), expected)
        of_projection = policies.resolve(policy, param(), "layers.1.proj.weight", True)
        sent_in_bf16 = Policy(BF16, FP32, FP16, False, grad_comm_dtype=BF16)
        self.assertEqual(of_projection, sent_in_bf16)
        # For whole modules a pattern may set the same as the policy, or nothing
        for given in (Policy(**by_default), Policy(FP32)):
            with self.subTest(given):
                by_name(model, {"*.A_log": given}, **by_default)

    def test_pattern_set_to_none_is_the_default(self) -> None:
        self.assertEqual(computed({"*.A_log": None}, "layers.0.A_log"), [BF16])
        policy = by_name(Model(), {"*.A_log": {"reduce_dtype": FP32}})
        self.assertIsNone(policy.param_dtype_override_fn)
        self.assertEqual(by_name(Model(), {}), Policy())

    def test_shared_parameter_has_all_of_its_names(self) -> None:
        for pattern, fqns in {
            "head.*": ("head.weight", "embed.weight"),
            "last.A_log": ("last.A_log", "layers.1.A_log"),
        }.items():
            with self.subTest(pattern):
                self.assertEqual(computed({pattern: FP32}, *fqns), [FP32, FP32])

    def test_names_are_clean_of_wrappers(self) -> None:
        model = Model()
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        model.layers[1].norm = as_compiled(model.layers[1].norm)
        whole = as_compiled(model)
        patterns = {"layers.0.A_log": FP32, "layers.?.norm.weight": FP64}
        fqns = [fqn for fqn, _ in whole.named_parameters() if "norm" in fqn]
        found = computed(patterns, "layers.0.A_log", *fqns, model=whole)
        self.assertEqual(found, [FP32, *[FP64, BF16] * 2])
        # Also if wrapped afterwards
        wrapped = "layers.0._checkpoint_wrapped_module.A_log"
        self.assertEqual(computed({"layers.0.A_log": FP32}, wrapped), [FP32])

    def test_a_name_may_begin_like_another_one_and_hold_spaces(self) -> None:
        names = ("gate", "gate of b", "up of b")
        model = nn.ParameterDict({name: param() for name in names})
        found = computed({"gate": FP32, "up*": FP64}, *names, model=model)
        self.assertEqual(found, [FP32, BF16, FP64])

    def test_end_of_a_name_is_enough_where_it_decides(self) -> None:
        patterns = {"*.A_log": FP32, "layers.0.norm.*": FP64}
        ends = ("A_log", "norm.weight", "proj.weight")
        # A norm of which nobody knows yet in which layer it is gets the default
        self.assertEqual(computed(patterns, *ends, is_named=None), [FP32, BF16, BF16])
        # The root may be above the model and below
        for above in ("layers.", "model.layers.", ""):
            for layer, dtype in ((0, FP64), (1, BF16)):
                fqns = [f"{above}{layer}.{end}" for end in ends]
                with self.subTest(fqns[0]):
                    self.assertEqual(computed(patterns, *fqns), [FP32, dtype, BF16])
        # Of several ends the longest
        part = nn.LayerNorm(2)
        part.inner = nn.LayerNorm(2)
        names = ("0.inner.weight", "0.weight")
        self.assertEqual(computed({"inner.*": FP32}, *names, model=part), [FP32, BF16])

    def test_whole_name_comes_before_ends_of_others(self) -> None:
        model = Model()
        model.norm = nn.LayerNorm(2)
        found = computed({"norm.*": FP32}, "norm.weight", "norm.bias", model=model)
        self.assertEqual(found, [FP32, FP32])
        # But not if the others of the unit are of a part of the model
        text = "norm.weight may be layers.0.norm.weight or norm.weight of Model"
        with self.assertRaisesRegex(ValueError, text):
            computed({"norm.*": FP32}, "norm.weight", "proj.weight", model=model)

    def test_copied_and_pickled_policies_do_the_same(self) -> None:
        patterns = {"*.A_log": {"param_dtype": FP32}, "layers.1.*": {}}
        policy = by_name(Model(), patterns, param_dtype=BF16)
        changed = dataclasses.replace(policy, output_dtype=FP32)
        self.assertEqual(resolve(changed, param(), "layers.1.A_log"), (FP32, None))
        pickled = pickle.loads(pickle.dumps(policy))
        for name, other in {"copy": copy.deepcopy(policy), "pickle": pickled}.items():
            with self.subTest(name):
                self.assertEqual((other, hash(other)), (policy, hash(policy)))
                found = resolve(other, param(), "layers.1.A_log")
                self.assertEqual(found, (FP32, None))
                # A lookup leaves nothing that could not be copied
                self.assertEqual(pickle.loads(pickle.dumps(other)), policy)


class TestUnits(utils.FSDPThreadTest):
    """
    What is gathered, computed, reduced and kept of units over two ranks. That overrides
    leave the bits of one unit of the release for each policy, over microbatches and
    replicas as well, is in ``test_fully_shard_parity.py``; offload and ``grad_dtype``
    with them in ``test_fully_shard_schedules.py``.
    """

    world_size = 2

    def module(self, **dtypes: torch.dtype) -> GivenGrads:
        """Returns parameters of four elements."""
        params = {name: torch.zeros(4, dtype=dtype) for name, dtype in dtypes.items()}
        return GivenGrads(**params).to(self.device)

    def backward(self, model: GivenGrads) -> list[tuple[torch.dtype, int]]:
        """Returns dtype and size of each. The mean is 128.5, in bf16 128."""
        names = [name for name, _ in model.named_parameters()]
        with utils.record_collectives() as recorder:
            backward(model, **dict.fromkeys(names, (256.0, 1.0)[self.rank]))
        return [(call.dtype, call.numel) for call in recorder.reduce_scatters]

    def check(self, param: nn.Parameter, dtype: torch.dtype, value: float) -> None:
        full, local = param.grad.full_tensor(), param.grad.to_local()
        self.assertEqual(full.tolist(), [value] * 4)
        kept_in = full.dtype, local.dtype, param.grad._spec.tensor_meta.dtype
        self.assertEqual(kept_in, (dtype,) * 3)

    def test_overrides_stay_when_the_sharded_parameters_are_cast(self) -> None:
        model = self.module(a=FP32, b=FP32)
        policy = by_name(model, {"a": {"param_dtype": FP32}})
        fully_shard(model, mp_policy=policy).bfloat16()
        # Since 2.15 in what they are stored in
        expected = [(BF16, 8)] if IS_2_15 else [(FP32, 4), (BF16, 4)]
        self.assertEqual(self.backward(model), expected)
        self.assertEqual(model.seen, {"a": FP32, "b": BF16})
        self.assertEqual({p.grad.dtype for p in model.parameters()}, {BF16})

    def test_a_refused_override_leaves_all_parameters_as_they_are(self) -> None:
        model = nn.Sequential(self.module(a=FP32), self.module(b=FP32))
        before = dict(model.named_parameters())

        def override(param: nn.Parameter) -> Any:
            return INT8 if param is before["1.b"] else BF16

        policy = Policy(param_dtype_override_fn=override)
        text = r"returned torch.int8 for parameter 1.b, which is torch.fl"
        with self.assertRaisesRegex(ValueError, text):
            fully_shard([nn.Linear(4, 4), model], mp_policy=policy)
        for name, param in model.named_parameters():
            self.assertIs(param, before[name])

    def test_functions_are_asked_once_with_the_users_parameter(self) -> None:
        """Also where another field of the policy waits for the root's names."""
        model, asked = nn.Sequential(self.module(w=BF16), self.module(w=BF16)), []
        indices = torch.zeros(4, device=self.device).long()
        model[0].indices = nn.Parameter(indices, requires_grad=False)

        def override(param: nn.Parameter) -> torch.dtype | None:
            asked.append(param)
            return FP32 if param is kept else None

        policy = by_name(model, {"0.w": {"param_dtype": FP32}}, param_dtype=BF16)
        overrides = {"reduce_dtype_override_fn": override, "reduce_dtype": FP16}
        policy, params = dataclasses.replace(policy, **overrides), [*model.parameters()]
        kept = model[1].w
        for unit in model:
            fully_shard(unit, mp_policy=policy)
        fully_shard(model)
        layout_summary(model)
        model(torch.zeros(1, device=self.device))
        self.assertEqual([*map(id, asked)], [*map(id, params)])
        found = [group_of(unit).fsdp_params[0].mp_policy for unit in model]
        pairs = [(each.param_dtype, each.reduce_dtype) for each in found]
        self.assertEqual(pairs, [(FP32, FP16), (BF16, FP32)])

    @parametrize("in_fp32", [True, False])
    def test_grad_dtype_none_is_what_the_reduction_gave(self, in_fp32: bool) -> None:
        model = self.module(a=BF16, b=BF16, c=FP32)
        model.a.grad_dtype = None
        fully_shard(model, mp_policy=Policy(None, FP32 if in_fp32 else None))
        self.backward(model)
        self.assertIsNone(model.a.grad_dtype)
        self.check(model.a, *((FP32, 128.5) if in_fp32 else (BF16, 128.0)))
        self.check(model.b, BF16, 128.0)

    def test_parameters_stored_alike_are_reduced_together(self) -> None:
        """As in the release, where they are one unit."""
        model = self.module(a=FP32, b=FP32, c=BF16)
        model.a.grad_dtype = BF16
        fully_shard(model)
        # Each is cast once
        self.assertEqual(self.backward(model), [(FP32, 8), (BF16, 4)])
        self.check(model.a, BF16, 128.0)
        self.check(model.b, FP32, 128.5)

    def test_grad_dtype_stays_when_the_parameter_is_cast(self) -> None:
        model = self.module(a=BF16, b=BF16, c=FP32)
        fully_shard(model, mp_policy=Policy(reduce_dtype=FP32))
        model.a.grad_dtype = FP64  # on the sharded parameter
        self.backward(model.float())
        self.check(model.a, FP64, 128.5)
        self.check(model.b, FP32, 128.5)


if __name__ == "__main__":
    run_tests()
