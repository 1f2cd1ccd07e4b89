# Owner(s): ["oncall: distributed"]

"""
Modules with a mesh for each parameter have several parameter groups, whose
post-backwards need not come in one order. In every order gradients are right, and no
more reduce-scatter inputs are held than ``set_reduce_scatter_max_input_buffers``
allows beside those of the module's own groups.

The release drops inputs only when a module's last group comes. Where that one
comes late it holds those of all modules before, and where it comes after others of its
module it waits for these too.

What is run is in ``fsdp_composition/several_groups.py``, under both torches.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

import pytest

from fsdp_common.parity_layers import Record
from fsdp_common.run_both import Results
from fsdp_common.scenario_test import ScenarioTest
from fsdp_composition.several_groups import BLOCKS, GROUPS, Order, ORDERS, Ran

from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.timeout(600)


UNITS = BLOCKS + 1
UNIFORM = [order for order in ORDERS if not order.is_mixed]


def held_of(ran: list[Ran]) -> list[int]:
    return [held for _, _, held in ran]


class TestSeveralGroups(ScenarioTest):
    script = "fsdp_composition.several_groups"

    def of(self, results: Results, order: Order) -> list[Record]:
        return self.records_of(results, str(order))

    def of_both(self, order: Order) -> list[Record]:
        return [*self.of(self.release, order), *self.of(self.branch, order)]

    def test_gradients_are_right(self) -> None:
        """Those of the release, or of mixed units, as autograd brings the hooks."""
        for order in ORDERS:
            expected = self.branch if order.is_mixed else self.release
            sides = self.of(self.branch, order), self.of(expected, order.natural)
            for actual, natural in zip(*sides, strict=True):
                self.check_same(str(order), actual["bits"], natural["bits"])

    def test_no_more_inputs_are_held_than_allowed(self) -> None:
        for order in ORDERS:
            for record in self.of(self.branch, order):
                for held in map(held_of, record["ran"]):
                    self.assertEqual(len(held), UNITS * GROUPS, order)
                    self.assertLessEqual(max(held), order.most_held, (order, held))

    def test_a_module_waits_for_no_reduction_of_its_own(self) -> None:
        """As many inputs are held after each hook as in the order of autograd."""
        for order in UNIFORM:
            if not order.permutation or order.unused:
                continue
            sides = self.of(self.branch, order), self.of(self.release, order.natural)
            for record, natural in zip(*sides, strict=True):
                held, wanted = (map(held_of, each["ran"]) for each in (record, natural))
                self.assertEqual([*held], [*wanted], order)

    # Whether the orders are what they are meant to be #

    def test_hooks_come_in_the_order(self) -> None:
        for order in UNIFORM:
            for record in self.of_both(order):
                groups = [group for _, group, _ in record["ran"][0]]
                late = [group == order.late for group in groups]
                self.assertEqual(late, sorted(late))
                if order.permutation:
                    self.assertEqual(groups, [*order.permutation] * UNITS)

    def test_the_release_holds_more_where_the_last_group_comes_late(self) -> None:
        """So that what is tested here does not hold of itself."""
        for order in (Order(late=GROUPS - 1), Order(late=GROUPS - 1, input_buffers=2)):
            for record in self.of(self.release, order):
                self.assertGreater(max(held_of(record["ran"][0])), order.most_held)


if __name__ == "__main__":
    run_tests()
