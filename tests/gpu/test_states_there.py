"""Steps on states in slots, on the device: their kernels, and decode steps in CUDA graphs."""

from unit.test_decode_graphs import (
    run_one_program,  # noqa: F401
    stateful,  # noqa: F401 - a fixture
    test_states_in_slots_are_what_they_are_without_graphs,  # noqa: F401
)
from unit.test_state_kernels import (
    test_a_convolution_continues_each_state,  # noqa: F401
    test_a_delta_rule_continues_each_state,  # noqa: F401
    test_a_nan_in_a_state_stays_with_the_rows_that_continue_it,  # noqa: F401
)
