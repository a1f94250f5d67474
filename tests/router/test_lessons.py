"""What operators of other routers suffered from, and the tests that keep this one from it.

The table is the review of the public issue trackers of SGLang's routers, Dynamo, llm-d, vLLM's
production stack and others; each lesson names the tests that fail if it is unlearnt.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

LESSONS: dict[str, list[str]] = {
    "a cache miss goes where it is cheap, never to whoever has the smallest index": [
        "router/core/test_early_binding.py::test_a_prompt_without_blocks_is_placed_by_load_alone",
    ],
    "affinity is one term of one continuous cost, with no mode that drops it": [
        "router/core/test_early_binding.py::"
        "test_a_long_queue_makes_j_leave_the_worker_that_holds_the_prefix",
        "router/core/test_early_binding.py::test_j_by_hand",
    ],
    "every route reserves, under every policy": [
        "router/io/test_every_route.py::test_load_is_reserved_and_spread",
        "router/core/test_early_binding.py::test_reservations_count_at_once",
    ],
    "a long prompt weighs more than a count of requests says": [
        "router/core/test_early_binding.py::test_one_long_prompt_weighs_more_than_some_short_ones",
        "router/core/test_membership.py::test_load_is_as_last_reported_and_unknown_before",
    ],
    "under saturation the owner of a prefix still wins, by cost": [
        "router/core/test_late_binding.py::"
        "test_a_request_waits_for_a_busy_worker_that_holds_its_prefix",
    ],
    "equal workers are drawn, and reserved at once, so that nobody herds": [
        "router/core/test_early_binding.py::"
        "test_near_equal_candidates_are_drawn_by_request_not_by_order",
        "router/core/test_early_binding.py::test_reservations_count_at_once",
    ],
    "the index gives its nodes back, under one cap in bytes": [
        "router/core/test_trie.py::test_leaves_that_came_and_went_take_no_memory",
        "router/core/test_trie.py::test_the_cap_is_in_bytes",
    ],
    "a restarted router knows the caches before it is ready, or a deadline has passed": [
        "router/io/test_pool_link.py::test_a_router_that_restarts_knows_it_too",
        "router/io/test_pool_link.py::test_readiness_waits_for_the_index_but_not_for_ever",
        "router/io/test_snapshots.py::test_a_late_joiner_is_ready_when_it_has_the_snapshot",
    ],
    "gaps in the events are counted, replayed first and given up last": [
        "router/io/test_event_stream.py::test_a_gap_is_replayed_and_nothing_is_reset",
        "router/io/test_event_stream.py::test_a_hole_that_never_fills_is_given_up",
        "router/io/test_event_stream.py::test_whatever_is_lost_the_index_ends_as_the_publishers",
        "router/io/test_pool_link.py::test_a_wrapped_buffer_resets_the_index",
    ],
    "a field that is too large to be read is skipped, never its batch": [
        "router/io/test_kv_batch.py::test_token_ids_are_not_read",
        "router/io/test_kv_batch.py::test_an_unknown_event_is_skipped_and_its_neighbours_stay",
    ],
    "other hashes than those predicted are noticed: what cannot agree is refused at start, and "
    "predicted stands beside actual": [
        "test_preflight.py::test_as_written_on_a_command_line",
        "router/io/test_pool_link.py::test_reports_reach_the_metrics",
        "router/io/test_sglang_agrees.py::test_block_hashes",
    ],
    "what a restarted worker had counts for nothing": [
        "router/io/test_pool_link.py::"
        "test_a_new_incarnation_forgets_first_and_then_reads_the_new_life",
        "router/core/test_lifecycle.py::test_a_restarted_worker_starts_without_the_old_ones_work",
        "router/core/test_breakers.py::test_another_life_of_the_worker_starts_anew",
    ],
    "4xx is neutral, 429 and 503 are backpressure, neither opens a breaker": [
        "router/core/test_breakers.py::test_what_is_no_fault_of_the_worker_opens_nothing",
        "router/core/test_breakers.py::test_where_all_are_full_requests_wait_at_the_router",
        "router/io/test_fault_matrix.py::"
        "test_a_worker_that_is_full_is_not_asked_again_before_its_time",
    ],
    "breakers never take the whole fleet out": [
        "router/core/test_breakers.py::"
        "test_where_nobody_else_is_left_the_breaker_does_not_count_and_that_is_seen",
        "router/io/test_fault_matrix.py::"
        "test_a_breaker_that_opens_is_seen_and_its_worker_left_alone",
    ],
    "legs race: when one fails or hangs, the other one is aborted by our own request id": [
        "router/io/test_pair_failures.py::"
        "test_a_leg_that_fails_first_ends_the_other_one_and_both_are_tried_again",
        "router/io/test_pair_failures.py::test_every_request_ends_once_whatever_the_legs_do",
        "router/io/test_stalls.py::test_a_pair_of_which_one_leg_hangs_is_ended_on_both_sides",
    ],
    "a client that leaves is noticed in every phase, and its request aborted": [
        "router/io/test_disconnect.py::test_while_the_body_is_being_sent",
        "router/io/test_disconnect.py::test_while_queued_at_the_router",
        "router/io/test_disconnect.py::test_while_the_connection_to_the_front_is_being_made",
        "router/io/test_disconnect.py::test_before_the_first_byte",
        "router/io/test_disconnect.py::test_in_the_middle_of_the_stream",
        "router/io/test_disconnect.py::test_while_its_connection_is_full_and_it_does_not_read",
        "router/io/test_pull.py::test_a_client_that_leaves_during_the_pull_is_gone_at_once",
        "router/io/test_pair_failures.py::test_a_client_that_leaves_ends_both_legs",
    ],
    "nothing is tried again after the first byte, nor at a worker that was tried": [
        "router/io/test_fault_matrix.py::test_one_clean_ending",
        "router/io/test_attempts.py::test_nothing_is_repeated_after_the_first_byte",
        "router/io/test_attempts.py::test_attempts_run_out",
    ],
    "retries do not multiply the load of an outage": [
        "router/core/test_breakers.py::test_when_everything_fails_only_a_share_is_tried_again",
    ],
    "stale state fails open, visibly": [
        "router/io/test_pool_link.py::"
        "test_a_pool_of_which_no_rank_is_heard_serves_on_as_it_was_and_that_is_seen",
        "router/io/test_pool_link.py::test_a_front_that_hangs_while_its_ranks_report_stays",
    ],
    "tokenisation has a deadline, and is done without after it": [
        "router/io/test_prompt.py::test_a_late_prompt_is_estimated_and_served",
    ],
    "a body is let go when it cannot be needed again": [
        "router/io/test_attempts.py::test_the_body_is_let_go_with_the_first_byte",
    ],
    "metrics have no labels that a client can write": [
        "router/io/test_admin.py::test_metrics_parse_and_their_labels_are_bounded",
    ],
    "no limit of a library's stands in the way; those of the system are raised, or told of": [
        "router/io/test_upstream.py::test_connections_are_kept_and_grow_with_the_calls",
        "router/io/test_server.py::test_the_limit_of_open_files_is_raised_as_far_as_it_goes",
    ],
    "short prompts do not pay for a degree that only long ones gain from": [
        "router/core/test_early_binding.py::"
        "test_short_prompts_go_to_the_small_degree_long_ones_to_the_large",
    ],
}


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_has_tests(lesson: str) -> None:
    assert LESSONS[lesson]
    for named in LESSONS[lesson]:
        path, _, function = named.partition("::")
        assert function in functions_of(TESTS / path), f"{named}: there is no such test (any more)"
