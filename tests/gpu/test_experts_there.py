"""The kernels between experts' grouped products on the device."""

from unit.test_expert_kernels import (
    dtype,  # noqa: F401 - a fixture
    test_a_block_table_covers_each_pair_once,  # noqa: F401
    test_adapters_with_some_projections_train_these,  # noqa: F401
    test_backward_without_a_gradient_of_rows_or_adapters,  # noqa: F401
    test_gradients_of_neighbours_in_one_buffer_stay_apart,  # noqa: F401
    test_non_finite_numbers_stay_in_their_rows_and_their_adapter,  # noqa: F401
    test_products_of_groups_are_those_of_the_loop,  # noqa: F401
    test_results_and_gradients_are_those_of_float64,  # noqa: F401
)
