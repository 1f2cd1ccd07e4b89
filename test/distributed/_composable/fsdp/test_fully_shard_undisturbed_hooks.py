# Owner(s): ["oncall: distributed"]

"""
Modules with a mesh for each parameter have several parameter groups, whose
post-backwards need not come in one order. In every order gradients are right, and no
more reduce-scatter inputs are held than ``set_reduce_scatter_max_input_buffers``
allows beside those of the module's own groups.

The release drops inputs only when a module's last group comes. Where that one
comes late it holds those of all modules before, and where it comes after others of its
module it waits for these too.

What is run is in ``fsdp_undisturbed/hook_orders.py``, under both torches.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fsdp_common.run_both import Results, run_on_both
from fsdp_common.utils import DeviceFreeTest
from fsdp_undisturbed.hook_orders import (
    BLOCKS,
    GROUPS,
    mixed_orders,
    Order,
    orders,
    STEPS,
)

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


UNIFORM, MIXED = [*orders()], [*mixed_orders()]
UNITS = BLOCKS + 1
# Of one post-backward: unit, group, inputs held after it
Ran = tuple["str | None", int, int]


def by_name(orders: Sequence[Order]) -> Any:
    """Gives each test the order that it is about, and a name without signs."""
    names = ["_".join("".join(filter(_is_word, str(o))).split()) for o in orders]
    return parametrize(
        "number", [*range(len(orders))], name_fn=lambda number: names[number]
    )


def _is_word(sign: str) -> bool:
    return sign.isalnum() or sign == " "


def held_of(ran: list[Ran]) -> list[int]:
    return [held for _, _, held in ran]


def bits_of(record: dict[str, Any]) -> dict[str, Any]:
    return {name: bits for name, bits in record.items() if not name.endswith(" ran")}


@instantiate_parametrized_tests
class TestUndisturbedHooks(DeviceFreeTest):
    """Each order under the release and under this branch."""

    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        script, mixed = "fsdp_undisturbed.hook_orders", ("--mixed",)
        cls.release, cls.branch = run_on_both(script, only_branch=mixed)

    def of(self, results: Results, order: Order) -> list[dict[str, Any]]:
        """Returns what each rank found, which did not fail."""
        records = [by_order[str(order)] for by_order in results]
        self.assertEqual([r["error"] for r in records if "error" in r], [])
        return records

    def check_bits(self, order: Order, expected: Results) -> None:
        sides = self.of(self.branch, order), self.of(expected, order.natural)
        for actual, natural in zip(*sides, strict=True):
            self.assertGreater(len(bits_of(natural)), 0)
            self.assertEqual(bits_of(actual), bits_of(natural), order)

    def check_held(self, order: Order, release: Results | None) -> None:
        for rank, record in enumerate(self.of(self.branch, order)):
            for step in range(STEPS):
                held = held_of(record[f"{step} ran"])
                beside = ""
                if release is not None:
                    of_release = self.of(release, order)[rank][f"{step} ran"]
                    beside = f", the release {held_of(of_release)}"
                text = f"{order}: held {held}{beside}"
                self.assertEqual(len(held), UNITS * GROUPS, text)
                self.assertLessEqual(max(held), order.most_held, text)

    @by_name(UNIFORM)
    def test_gradients_are_right(self, number: int) -> None:
        """Those of the release, whose hooks come as autograd brings them."""
        self.check_bits(UNIFORM[number], self.release)

    @by_name(MIXED)
    def test_gradients_of_mixed_units_are_right(self, number: int) -> None:
        self.check_bits(MIXED[number], self.branch)

    @by_name(UNIFORM)
    def test_no_more_inputs_are_held_than_allowed(self, number: int) -> None:
        self.check_held(UNIFORM[number], self.release)

    @by_name(MIXED)
    def test_no_more_inputs_of_mixed_units_are_held(self, number: int) -> None:
        self.check_held(MIXED[number], None)

    @by_name([o for o in UNIFORM if o.permutation and o.unused is None])
    def test_a_module_waits_for_no_reduction_of_its_own(self, number: int) -> None:
        """As many inputs are held after each hook as in the order of autograd."""
        order = [o for o in UNIFORM if o.permutation and o.unused is None][number]
        sides = self.of(self.branch, order), self.of(self.release, order.natural)
        for rank, (record, natural) in enumerate(zip(*sides, strict=True)):
            of_release = self.of(self.release, order)[rank]
            for step in range(STEPS):
                key = f"{step} ran"
                held, wanted = held_of(record[key]), held_of(natural[key])
                beside = f"{order}: the release {held_of(of_release[key])}"
                self.assertEqual(held, wanted, beside)

    # Whether the orders are what they are meant to be #

    def orders(self, is_one: Callable[[Order], Any]) -> list[Order]:
        found = [order for order in UNIFORM if is_one(order)]
        self.assertGreater(len(found), 0)
        return found

    def test_hooks_come_in_the_order(self) -> None:
        for order in self.orders(lambda o: o.permutation):
            for record in (*self.of(self.release, order), *self.of(self.branch, order)):
                groups = [group for _, group, _ in record["0 ran"]]
                self.assertEqual(groups, [*order.permutation] * UNITS)

    def test_autograd_comes_to_the_last_group_first(self) -> None:
        for order in self.orders(lambda o: o.is_natural):
            for record in self.of(self.release, order):
                groups = [group for _, group, _ in record["0 ran"]]
                self.assertEqual(groups, [*reversed(range(GROUPS))] * UNITS)
                self.assertLessEqual(
                    max(held_of(record["0 ran"])), order.input_buffers - 1 + GROUPS
                )

    def test_the_release_holds_more_where_the_last_group_comes_late(self) -> None:
        """So that what is tested here does not hold of itself."""
        of_last = self.orders(lambda o: o.late == GROUPS - 1 and o.unused is None)
        for order in of_last:
            for record in self.of(self.release, order):
                self.assertGreater(max(held_of(record["0 ran"])), order.most_held)

    def test_a_late_group_comes_after_all_others(self) -> None:
        for order in self.orders(lambda o: o.late is not None):
            for record in (*self.of(self.release, order), *self.of(self.branch, order)):
                late = [group == order.late for _, group, _ in record["0 ran"]]
                self.assertEqual(late, sorted(late))


if __name__ == "__main__":
    run_tests()
