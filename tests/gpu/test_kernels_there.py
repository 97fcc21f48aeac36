"""The Triton kernels on the device."""

from unit.test_paged_kernel import (
    test_a_row_of_nans_leaves_the_others_as_they_are,  # noqa: F401
    test_a_step_reads_pages_where_it_decodes_and_gathers_the_rest,  # noqa: F401
    test_each_row_attends_to_its_own_keys,  # noqa: F401
)
