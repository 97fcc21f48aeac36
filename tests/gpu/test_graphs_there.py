"""Decode steps in CUDA graphs, on the device."""

from unit.test_decode_graphs import (
    run_one_program,  # noqa: F401
    shape,  # noqa: F401 - a fixture
    test_adapters_of_two_layouts_share_a_graph_beside_prompts,  # noqa: F401
    test_prompts_leave_decoding_rows_in_their_graph,  # noqa: F401
    test_rows_of_several_adapters_are_what_they_are_without_graphs,  # noqa: F401
    test_weights_that_moved_are_found_again,  # noqa: F401
)
