"""Every case that CI compiles, in a small shape, equals its reference and moves what it should."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.cases import FAMILIES, all_cases
from lowbit.kernels.cases.case import Case, Maker
from lowbit.kernels.cases.check import check_case

pytestmark = pytest.mark.usefixtures("nan_outputs")
CASES = {c.name: c for c in all_cases("small") if c.ci}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_its_reference_and_rows_do_not_depend_on_the_batch(kernel_device, name):
    assert check_case(CASES[name], str(kernel_device)) == []


def test_names_are_unique_and_both_sizes_have_the_same():
    for family in FAMILIES:
        small = [c.label.rpartition(" M=")[2] for c in all_cases("small", family)]
        real: list[Case] = list(all_cases("real", family))
        assert len({c.name for c in real}) == len(real) == len(small)


def test_operands_on_meta_take_no_memory():
    for case in CASES.values():
        assert all(t is None or t.device == torch.device("meta")
                   for t in case.make(Maker("meta")).values())  # fmt: skip
