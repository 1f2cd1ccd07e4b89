# Owner(s): ["oncall: distributed"]
"""
What a precision policy says of each parameter, and what it refuses. Needs no
device and no process group: policies are asked directly.
"""

import ast
import copy
import dataclasses
import gc
import itertools
import pickle
import re
import sys
import weakref
from typing import Any
from unittest import mock

import pytest

from fsdp_common.comms import BF16, FP8, FP16, FP32, FP64
from fsdp_common.release_rules import reduce_dtype
from fsdp_common.utils import DeviceFreeTest, run_python
from fsdp_composition.contract import parameters_of

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.fsdp._fully_shard import _fsdp_policies as policies
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.quick

FP8_FNUZ = torch.float8_e4m3fnuz
by_name = MixedPrecisionPolicy.by_name


def param(dtype: torch.dtype = FP32) -> nn.Parameter:
    data = torch.zeros(2, dtype=dtype)
    return nn.Parameter(data, requires_grad=dtype.is_floating_point)


def resolve(
    policy: MixedPrecisionPolicy,
    of: nn.Parameter,
    fqn: str = "layers.0.gate",
) -> tuple[torch.dtype | None, torch.dtype | None]:
    resolved = policies.resolve(policy, of, fqn)
    return resolved.param_dtype, resolved.reduce_dtype


def returning(**dtypes: Any) -> MixedPrecisionPolicy:
    """Returns a policy whose overrides return these for every parameter."""
    overrides = {
        f"{name}_override_fn": lambda _, dtype=dtype: dtype
        for name, dtype in dtypes.items()
    }
    return MixedPrecisionPolicy(BF16, FP32, **overrides)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4))
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    """Its head and its embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def dtypes_of(
    model: nn.Module, policy: MixedPrecisionPolicy
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
    params = [param() for _ in fqns]
    resolved = policies.resolve_all(policy, params, fqns, is_named)
    return [of.param_dtype for of in resolved]


class TestPolicy(DeviceFreeTest):
    def test_positional_construction_is_as_in_the_release(self) -> None:
        policy = MixedPrecisionPolicy(BF16, FP32, FP16, False)
        fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        values = [getattr(policy, name) for name in fields]
        self.assertEqual(values, [BF16, FP32, FP16, False])
        code = """
from fsdp_composition.contract import parameters_of
from torch.distributed.fsdp import MixedPrecisionPolicy
print(parameters_of(MixedPrecisionPolicy))
"""
        of_release = ast.literal_eval(run_python("-c", code, on_release=True))
        ours = parameters_of(MixedPrecisionPolicy)
        positional, by_keyword = ours[: len(fields)], ours[len(fields) :]
        self.assertEqual(positional, of_release[: len(fields)])
        self.assertLessEqual({*of_release}, {*ours})
        names = ["param_dtype_override_fn", "reduce_dtype_override_fn"]
        names += ["grad_comm_dtype", "grad_comm_dtype_override_fn"]
        expected = [(name, "KEYWORD_ONLY", "None") for name in names]
        self.assertEqual(by_keyword, expected)

    def test_overrides_must_be_callable(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "grad_comm_dtype"):
            wrong: Any = {(name := f"{name}_override_fn"): FP32}
            with self.assertRaisesRegex(TypeError, f"{name}.*torch.float32"):
                MixedPrecisionPolicy(**wrong)


class TestResolve(DeviceFreeTest):
    def test_none_is_the_default_and_a_dtype_takes_its_place(self) -> None:
        none = returning(param_dtype=None, reduce_dtype=None)
        self.assertEqual(resolve(none, param()), (BF16, FP32))
        self.assertEqual(resolve(returning(param_dtype=FP16), param()), (FP16, FP32))
        self.assertEqual(resolve(returning(reduce_dtype=BF16), param()), (BF16, BF16))
        both = returning(param_dtype=FP32, reduce_dtype=FP16)
        self.assertEqual(resolve(both, param()), (FP32, FP16))

    def test_all_other_fields_stay_and_no_override_is_left(self) -> None:
        policy = MixedPrecisionPolicy(
            BF16, FP32, FP16, False, param_dtype_override_fn=lambda _: FP64
        )
        resolved = policies.resolve(policy, param(), "gate")
        self.assertEqual(resolved, MixedPrecisionPolicy(FP64, FP32, FP16, False))

    def test_which_dtypes_fit(self) -> None:
        floats, own = (FP64, FP32, FP16, BF16), (torch.int8, torch.complex64, FP64)
        pairs = [*((FP32, dtype) for dtype in floats), *zip(own, own)]
        for stored, dtype in pairs:
            reduces = returning(reduce_dtype=dtype)
            self.assertEqual(resolve(reduces, param(stored)), (BF16, dtype))
        for stored, dtype in [*pairs, (FP8, FP8), (FP32, FP8), (FP32, FP8_FNUZ)]:
            computes = returning(param_dtype=dtype)
            self.assertEqual(resolve(computes, param(stored)), (dtype, FP32))

    def test_which_dtypes_are_refused(self) -> None:
        wrong = [
            (FP32, torch.int8, "Return a floating-point"),
            (FP32, torch.complex64, "Return a floating-point"),
            (torch.int8, FP32, "Return its own dtype"),
            (torch.complex64, FP32, "Return its own dtype"),
            (torch.int8, torch.uint8, "Return its own dtype"),
            (FP32, torch.float4_e2m1fn_x2, "not packed"),
        ]
        for name in ("param_dtype", "reduce_dtype"):
            for stored, dtype, text in wrong:
                text = f"{name}_override_fn returned {dtype} for .* {stored}.*{text}"
                with self.assertRaisesRegex(ValueError, text):
                    resolve(returning(**{name: dtype}), param(stored))

    def test_no_gradient_is_reduced_in_float8(self) -> None:
        """But a frozen parameter has none."""
        for dtype in (FP8, torch.float8_e5m2, FP8_FNUZ):
            text = f"layers.0.gate cannot be reduced in {dtype}. Set reduce_dtype to"
            plain = MixedPrecisionPolicy(BF16, dtype)
            for given in (plain, returning(reduce_dtype=dtype)):
                for stored in (FP32, dtype):
                    with self.assertRaisesRegex(ValueError, text):
                        resolve(given, param(stored))
                    frozen = param(stored).requires_grad_(False)
                    self.assertEqual(resolve(given, frozen), (BF16, dtype))

    def test_what_is_reduced_in_by_default_must_be_reducible(self) -> None:
        for computed, stored in itertools.product((FP8, BF16), (FP8, FP32)):
            policy = MixedPrecisionPolicy(
                param_dtype_override_fn=lambda _, dtype=computed: dtype
            )
            trained, frozen = param(stored), param(stored).requires_grad_(False)
            if reduce_dtype(MixedPrecisionPolicy(computed), stored) == FP8:
                text = f"layers.0.gate cannot be reduced in {FP8}. Set reduce_dtype"
                with self.assertRaisesRegex(ValueError, text):
                    resolve(policy, trained)
            else:
                self.assertEqual(resolve(policy, trained), (computed, None))
            self.assertEqual(resolve(policy, frozen), (computed, None))
            both = dataclasses.replace(policy, reduce_dtype_override_fn=lambda _: BF16)
            self.assertEqual(resolve(both, trained), (computed, BF16))
            default = dataclasses.replace(policy, reduce_dtype=FP32)
            self.assertEqual(resolve(default, trained), (computed, FP32))

    def test_a_grad_dtype_is_reduced_in_by_default(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda _: FP8)
        of, by_default = param(), reduce_dtype(MixedPrecisionPolicy(FP8), FP32)
        for grad_dtype in (BF16, None):
            of.grad_dtype = grad_dtype
            # Anything there is, if None: so what forward computes in
            if by_default == FP8 or grad_dtype is None:
                with self.assertRaisesRegex(ValueError, "in torch.float8_e4m3fn"):
                    resolve(policy, of)
            else:
                self.assertEqual(resolve(policy, of), (FP8, None))

    def test_an_exception_in_an_override_names_the_parameter(self) -> None:
        for raised, expected in [
            (KeyError("x"), RuntimeError),
            (ValueError("x"), ValueError),
        ]:
            override = mock.Mock(side_effect=raised)
            policy = MixedPrecisionPolicy(reduce_dtype_override_fn=override)
            text = "reduce_dtype_override_fn failed for parameter layers.0.gate: .*x"
            with self.assertRaisesRegex(expected, text) as caught:
                resolve(policy, param())
            self.assertIs(type(caught.exception), expected)
            self.assertIs(caught.exception.__cause__, raised)


class TestByName(DeviceFreeTest):
    def test_patterns_set_what_they_name_and_leave_the_rest(self) -> None:
        model = Model()
        patterns = {
            "layers.[!0].?_log": {"param_dtype": FP32},
            "*norm*": {"param_dtype": FP32, "reduce_dtype": FP64},
            "embed.*": {"reduce_dtype": BF16},
        }
        policy = by_name(
            model,
            patterns,
            param_dtype=BF16,
            reduce_dtype=FP32,
            output_dtype=FP16,
            cast_forward_inputs=False,
        )
        expected: dict[str, Any] = {"embed.weight": (BF16, BF16)}
        for i in range(2):
            expected |= {
                f"layers.{i}.A_log": (FP32 if i else BF16, FP32),
                f"layers.{i}.norm.weight": (FP32, FP64),
                f"layers.{i}.norm.bias": (FP32, FP64),
                f"layers.{i}.proj.weight": (BF16, FP32),
            }
        self.assertEqual(dtypes_of(model, policy), expected)
        resolved = policies.resolve(policy, model.embed.weight, "embed.weight")
        self.assertEqual(resolved, MixedPrecisionPolicy(BF16, BF16, FP16, False))

    def test_a_policy_sets_the_dtypes_that_it_has(self) -> None:
        model = Model()
        patterns = {
            "*.A_log": MixedPrecisionPolicy(param_dtype=FP32),
            "*.norm.*": MixedPrecisionPolicy(FP32),
            "*.norm.??????": {"reduce_dtype": FP64},
            "*.proj.*": MixedPrecisionPolicy(),
            "embed.*": MixedPrecisionPolicy(grad_comm_dtype=BF16),
        }
        policy = by_name(model, patterns, param_dtype=BF16, reduce_dtype=BF16)
        as_dicts = {
            "*.A_log": {"param_dtype": FP32},
            "*.norm.*": {"param_dtype": FP32},
            "*.norm.weight": {"reduce_dtype": FP64},
            "embed.*": {"grad_comm_dtype": BF16, "reduce_dtype": FP32},
        }
        expected = by_name(model, as_dicts, param_dtype=BF16, reduce_dtype=BF16)
        for fqn, p in model.named_parameters():
            resolved = [policies.resolve(x, p, fqn) for x in (policy, expected)]
            self.assertEqual(*resolved, fqn)
        self.assertEqual(dtypes_of(model, policy)["layers.0.A_log"], (FP32, BF16))
        contradicting = {**patterns, "layers.1.A_log": {"param_dtype": BF16}}
        with self.assertRaisesRegex(ValueError, r"'\*.A_log' and 'layers.1.A_log' set"):
            by_name(model, contradicting)

    def test_what_is_of_modules_cannot_differ_within_a_unit(self) -> None:
        for name, value in {"output_dtype": FP32, "cast_forward_inputs": False}.items():
            one: Any = {name: value}
            for given in (MixedPrecisionPolicy(**one), one):
                text = rf"'\*.A_log' sets {name}: set only param_dtype"
                with self.assertRaisesRegex(ValueError, text):
                    by_name(Model(), {"*.A_log": given}, param_dtype=BF16)
        # The same as the unit's, or nothing, is no difference
        fields: Any = {"output_dtype": FP16, "cast_forward_inputs": False}
        for given in (MixedPrecisionPolicy(**fields), MixedPrecisionPolicy(FP32)):
            policy = by_name(Model(), {"*.A_log": given}, **fields)
            self.assertEqual(policy.output_dtype, FP16)
            self.assertFalse(policy.cast_forward_inputs)

    def test_what_no_pattern_sets_has_no_override(self) -> None:
        policy = by_name(Model(), {"*.A_log": {"reduce_dtype": FP32}})
        self.assertIsNone(policy.param_dtype_override_fn)
        with self.assertRaisesRegex(TypeError, "by_name is asked by name"):
            policy.reduce_dtype_override_fn(nn.Parameter(torch.ones(1)))
        self.assertEqual(by_name(Model(), {}, param_dtype=BF16).param_dtype, BF16)
        self.assertEqual(by_name(Model(), {}), MixedPrecisionPolicy())

    def test_none_is_the_default(self) -> None:
        model = Model()
        policy = by_name(model, {"*.A_log": {"param_dtype": None}}, param_dtype=BF16)
        resolved = resolve(policy, model.layers[0].A_log, "layers.0.A_log")
        self.assertEqual(resolved, (BF16, None))
        patterns = {
            "*.A_log": {"param_dtype": None},
            "layers.0.*": {"param_dtype": FP32},
        }
        with self.assertRaisesRegex(ValueError, "layers.0.A_log to None and"):
            by_name(model, patterns)

    def test_contradiction_names_both_patterns_and_the_parameter(self) -> None:
        """Also of one that has several names."""
        model = Model()
        model.last = model.layers[1]
        for first, second, names in [
            ("*.norm.*", "layers.1.*", ["layers.1.norm.weight"]),
            ("head.*", "embed.*", ["embed.weight alias head.weight"]),
            ("last.A_log", "*.1.*", ["layers.1.A_log alias last.A_log"]),
        ]:
            given = {first: {"param_dtype": FP32}, second: {"param_dtype": BF16}}
            for patterns in (given, dict(reversed(given.items()))):
                with self.assertRaises(ValueError) as caught:
                    by_name(model, patterns)
                message = str(caught.exception)
                patterns = f"{first!r} and {second!r}", f"{second!r} and {first!r}"
                self.assertTrue(any(both in message for both in patterns))
                for part in ("param_dtype", *names):
                    self.assertIn(part, message)
                self.assertNotIn("layers.0", message)

    def test_a_shared_parameter_has_all_of_its_names(self) -> None:
        model = Model()
        model.last = model.layers[1]
        for pattern, fqns in {
            "head.*": ("head.weight", "embed.weight"),
            "last.A_log": ("last.A_log", "layers.1.A_log"),
        }.items():
            found = computed({pattern: FP32}, *fqns, model=model)
            self.assertEqual(found, [FP32, FP32])

    def test_a_pattern_that_matches_nothing(self) -> None:
        for pattern in ("norm.weight", "*.NORM.weight"):
            text = re.escape(f"Pattern {pattern!r} matches no parameter of Model")
            with self.assertRaisesRegex(ValueError, text):
                by_name(Model(), {pattern: {"param_dtype": FP32}})

    def test_unknown_fields_and_wrong_values(self) -> None:
        with self.assertRaisesRegex(ValueError, r"'\*.A_log' sets dtype: set"):
            by_name(Model(), {"*.A_log": {"dtype": FP32}})
        wrong: Any
        for wrong in (FP32, None, "float32"):
            with self.assertRaisesRegex(TypeError, r"'\*.A_log' is set to"):
                by_name(Model(), {"*.A_log": wrong})
        for wrong in ("float32", 32):
            with self.assertRaisesRegex(TypeError, r"'\*.A_log' sets param_dtype to"):
                by_name(Model(), {"*.A_log": {"param_dtype": wrong}})

    def test_repr_names_the_patterns_and_no_parameter(self) -> None:
        policy = by_name(Model(), {"*.A_log": {"param_dtype": FP32}})
        self.assertIn("patterns={'*.A_log': torch.float32}", repr(policy))
        self.assertNotIn("layers.0", repr(policy))

    def test_names_are_clean_of_wrappers(self) -> None:
        model = Model()
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        model.layers[1].norm = torch.compile(model.layers[1].norm)
        whole = torch.compile(model)
        patterns = {"layers.0.A_log": FP32, "layers.?.norm.weight": FP64}
        fqns = [fqn for fqn, _ in whole.named_parameters() if "norm" in fqn]
        found = computed(patterns, "layers.0.A_log", *fqns, model=whole)
        self.assertEqual(found, [FP32, *[FP64, BF16] * 2])
        # Also if wrapped afterwards
        wrapped = "layers.0._checkpoint_wrapped_module.A_log"
        self.assertEqual(computed({"layers.0.A_log": FP32}, wrapped), [FP32])

    def test_the_end_of_a_name_is_enough_where_it_decides(self) -> None:
        patterns = {"*.A_log": FP32, "layers.0.norm.*": FP64}
        ends = ("A_log", "norm.weight", "proj.weight")
        within = [f"{end} of Block" for end in ends]
        # A norm of which nobody knows yet in which layer it is gets the default
        found = computed(patterns, *within, is_named=None)
        self.assertEqual(found, [FP32, BF16, BF16])
        # The root may be above the model and below
        for above in ("layers.", "model.layers.", ""):
            for layer, dtype in ((0, FP64), (1, BF16)):
                fqns = [f"{above}{layer}.{end}" for end in ends]
                self.assertEqual(computed(patterns, *fqns), [FP32, dtype, BF16])

    def test_a_whole_name_comes_before_ends_of_others(self) -> None:
        model = Model()
        model.norm = nn.LayerNorm(2)
        found = computed({"norm.*": FP32}, "norm.weight", "norm.bias", model=model)
        self.assertEqual(found, [FP32, FP32])
        # But not if the others of the unit are of a part of the model
        text = "norm.weight may be layers.0.norm.weight or norm.weight of Model"
        with self.assertRaisesRegex(ValueError, text):
            computed({"norm.*": FP32}, "norm.weight", "proj.weight", model=model)

    def test_what_a_name_leaves_open_is_refused_in_the_end(self) -> None:
        text = "A_log may be layers.0.A_log or layers.1.A_log of .* Call by_name"
        for is_named in (False, True):
            with self.assertRaisesRegex(ValueError, text):
                computed({"layers.0.A_log": FP32}, "A_log", is_named=is_named)

    def test_a_name_that_the_model_had_not_is_refused(self) -> None:
        text = "called on a Model, which has no parameter layers.0.D: call it on the"
        with self.assertRaisesRegex(ValueError, text):
            computed({"*.A_log": FP32}, "layers.0.D")

    def test_copies_and_pickles_are_equal_and_do_the_same(self) -> None:
        patterns = {"*.A_log": {"param_dtype": FP32}, "layers.1.*": {}}
        policy = by_name(Model(), patterns, param_dtype=BF16)
        self.assertIs(type(policy), MixedPrecisionPolicy)
        changed = dataclasses.replace(policy, output_dtype=FP32)
        self.assertEqual(resolve(changed, param(), "layers.1.A_log"), (FP32, None))
        copies = (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)))
        for used in (False, True):
            for other in copies:
                self.assertEqual((other, hash(other)), (policy, hash(policy)))
                resolved = resolve(other, param(), "layers.1.A_log")
                self.assertEqual(resolved, (FP32, None), used)
        self.assertEqual(pickle.loads(pickle.dumps(copies[0])), policy)

    def test_looks_at_each_name_once_whatever_the_size(self) -> None:
        def calls(size: int) -> int:
            model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(size)))
            policy = by_name(model, {"*.bias": {"param_dtype": FP32}})
            fqns, params = zip(*model.named_parameters())
            count = 0

            def profile(frame: Any, event: str, arg: Any) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            sys.setprofile(profile)
            try:
                policies.resolve_all(policy, params, fqns, True)
            finally:
                sys.setprofile(None)
            return count

        self.assertLess(calls(400), 2.1 * calls(200))

    def test_keeps_nothing_alive(self) -> None:
        model = Model()
        policy = by_name(model, {"*.A_log": {"param_dtype": FP32}})
        references = weakref.ref(model.layers[0].A_log), weakref.ref(model)
        del model
        gc.collect()
        self.assertEqual([reference() for reference in references], [None, None])
        self.assertEqual(resolve(policy, param(), "layers.0.A_log"), (FP32, None))

    def test_the_releases_own_class_is_a_policy(self) -> None:
        """It is the default of ``fully_shard``, and what some import."""
        released = _fsdp_api.MixedPrecisionPolicy(BF16, reduce_dtype=FP32)
        self.assertIsInstance(MixedPrecisionPolicy(), type(released))
        self.assertEqual(resolve(released, nn.Parameter(torch.ones(2))), (BF16, FP32))
        by_pattern = by_name(Model(), {"*.A_log": released})
        self.assertEqual(dtypes_of(Model(), by_pattern)["layers.0.A_log"], (BF16, FP32))


if __name__ == "__main__":
    run_tests()
