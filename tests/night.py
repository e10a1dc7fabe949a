"""Tests and rows of tables that ``make nightly ONLY=rows`` runs and CI does not, each with what shows its fact in CI.

One fact is tested once in CI, at the cheapest level that can show it: longer ways, further layouts and combinations of
facts wait for the night. A test that is slow for another reason has ``@pytest.mark.long`` itself, or its rows have
(:func:`tests.rows.some_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["AT_NIGHT", "is_at_night", "mark_tests_of_the_night"]

HERE = Path(__file__).parent

AT_NIGHT: dict[str, dict[str, str]] = {
    "cluster/test_diloco.py": {
        **dict.fromkeys(
            (
                "test_bytes_on_the_link_are_those_of_rounds_and_of_gradients",
                "test_all_ranks_of_a_shard_end_with_the_same_weights",
                "test_all_learn_and_synchronous_steps_most",
            ),
            "test_wan.py for bytes on a link, ranks/test_diloco.py for what it computes",
        ),
    },
    "cluster/test_exec_mpi.py": {
        **dict.fromkeys(
            (
                "test_isolated_cells[mpich]",
                "test_what_does_not_fit[mpich]",
                "test_what_ends_a_rank_is_told_where_its_output_goes_to_a_file[mpich]",
                "test_a_session_that_loses_a_rank[mpich]",
                "test_a_module[mpich]",
                "test_ranks_that_fail_alike_end_mpi_together[mpich]",
                "test_whose_error_it_is[mpich]",
            ),
            "its row of Open MPI; MPICH starts ranks, and ends them with a code, in other rows",
        ),
    },
    "cluster/test_exec_slurm.py": {
        "test_a_batch_script_with_uneven_nodes": "test_slurm.py::test_uneven_step, test_submit.py for batch scripts",
        "test_a_configuration": "test_arguments_and_folder_survive, ranks/test_exec_config.py for configurations",
        **dict.fromkeys(
            (
                "test_a_failing_rank_ends_the_step[exit-17-exited with code 17]",
                "test_signals_reach_the_ranks[USR2-leave-75]",
                "test_nodes_as_isolated_cells[start_by1]",
                "test_trainers_of_frameworks_on_nodes_as_cells[lightning]",
            ),
            "its other rows",
        ),
        "test_two_jobs_at_once_on_one_node": "test_submit.py::test_a_sweep_runs_at_once_on_one_node_...",
        "test_replica_groups_are_steps_of_a_job": (
            "test_the_cells_of_an_elastic_run_are_steps, ranks/test_fault_tolerance.py for groups"
        ),
        "test_whose_error_it_is": "test_a_failing_rank_ends_the_step, test_exec_mpi.py::test_whose_error_it_is",
        "test_a_module_and_a_stream": "test_exec_mpi.py::test_a_module, test_logs_and_the_merged_stream",
    },
    "cluster/test_exec_ssh.py": {
        **dict.fromkeys(
            (
                "test_a_failing_rank_ends_the_ranks_on_all_hosts[exit-17-exited with code 17]",
                "test_signals_reach_the_ranks[USR2-leave-75]",
            ),
            "its other rows",
        ),
        "test_a_session_that_loses_a_rank": "test_exec_slurm.py has it, too; a failing rank here",
        "test_the_time_limit": "ranks/test_exec.py::test_the_time_limit, and the signals here, by which it ends ranks",
        "test_two_jobs_at_once": "unit/test_run_folders.py for jobs that start at once",
    },
    "cluster/test_facilities.py": {
        "test_two_facilities_without_a_route_between_them": (
            "test_local_facilities_and_cwltool for rounds over files, test_workflows.py for facilities by ssh"
        ),
    },
    "cluster/test_overlap.py": {
        **dict.fromkeys(
            (
                "test_a_round_that_is_waited_for_costs_its_time",
                "test_a_round_behind_steps_costs_little",
                "test_both_move_the_same_bytes",
            ),
            "test_wan.py for bytes and seconds of a round, ranks/test_overlap.py for rounds behind steps",
        ),
    },
    "cluster/test_partition.py": {
        "test_rounds_on_a_network_that_breaks[link down-15]": "its row of a host that is gone",
        "test_rounds_on_a_network_that_breaks[a tenth-0]": "its row of a host that is gone",
    },
    "cluster/test_report_browser.py": {
        "test_the_browser_shows_all_and_fetches_nothing[two]": "its other rows, unit/test_run_report.py",
        "test_an_elastic_run_whose_cell_was_killed_is_one_page": "unit/test_elastic_report.py",
    },
    "cluster/test_submit.py": {
        "test_a_task_of_an_array_goes_back_alone": (
            "test_a_job_at_its_time_limit_goes_on_later_with_the_same_result, unit/test_submit.py for tasks"
        ),
        **dict.fromkeys(
            (
                "test_sbatch_takes_a_jobs_name_as_it_is[# a  b #c]",
                "test_sbatch_takes_a_jobs_name_as_it_is[%x %j]",
                "test_sbatch_takes_a_jobs_name_as_it_is[a:b=c]",
            ),
            "its other rows",
        ),
    },
    "cluster/test_two_hosts.py": {
        **dict.fromkeys(
            (
                "test_places_over_two_hosts[openmpi-ranks0]",
                "test_places_over_two_hosts[mpich-ranks0]",
                "test_places_in_an_allocation_of_two_hosts[openmpi-ranks0]",
                "test_places_in_an_allocation_of_two_hosts[mpich-ranks0]",
            ),
            "its rows of unequal hosts",
        ),
    },
    "cluster/test_unmet.py": {
        **dict.fromkeys(
            ("test_mpirun[mpich-a script]", "test_mpirun[mpich-a backend]", "test_mpirun[mpich-an address]"),
            "its rows of Open MPI, and that of MPICH's shape",
        ),
    },
    "cluster/test_workflows.py": {
        "test_mpi_in_an_allocation[mpich]": "its other row",
        "test_mpi_hands_on_what_is_hostile[mpich]": "its other row",
        "test_mpi_ends_with_the_exit_code_of_a_failure[mpich]": "its other row",
    },
    "ranks/test_agreed.py": {
        "test_codecs_go_with_servers_and_combiners[(2, 4, 2)-2]": "the row of three cells without replicas",
    },
    "ranks/test_algorithms.py": {
        "test_ten_rounds_equal_the_dense_algorithm[(4, 2)-2]": "the row of unequal cells without replicas",
    },
    "ranks/test_bench.py": {
        "test_other_layouts[(4, 4)-2-['federation', 'shard', 'replica', 'federated']-['rails']]": "its other row",
    },
    "ranks/test_callbacks.py": {
        "test_norms_and_averages_equal_those_of_whole_weights[4]": "its other rows",
    },
    "ranks/test_cells_command.py": {
        "test_watch_shows_it_again_until_ctrl_c": "test_cells_tells_who_is_there_and_where_without_any_effect",
    },
    "ranks/test_checkpoint_async.py": {
        "test_a_run_that_is_killed_again_and_again_goes_on[True]": "its other row",
    },
    "ranks/test_clients.py": {
        "test_clients_and_fednova_are_those_of_dense_cells[(4, 2)-None]": "its other rows",
        "test_resuming_in_the_middle_equals_never_having_stopped": "test_resume.py[error feedback], test_federate.py",
    },
    "ranks/test_clip.py": {
        "test_a_clipped_step_is_that_of_a_plain_computation[(4, 2)-2]": "its other rows",
        "test_a_clipped_step_is_that_of_a_plain_computation[(3, 1, 2)-None]": "its other rows",
    },
    "ranks/test_context_parallel.py": {
        "test_with_fsdp_and_tensor_parallel_they_are_a_single_process": (
            "test_two_ranks_are_a_single_process, and test_strategies.py trains the axes together"
        ),
    },
    "ranks/test_deepspeed.py": {
        "test_rounds_are_weighted_means[cells1-stages1]": "its other row",
        "test_windows_equal_large_clipped_batches": (
            "test_strategy_steps.py for windows, test_every_stage_trains_like_one_process for stages"
        ),
        "test_offloaded_optimizers_train_alike": "test_every_stage_trains_like_one_process",
    },
    "ranks/test_diloco.py": {
        "test_streaming_in_one_piece_without_delay_is_diloco": "test_streaming_is_the_dense_algorithm",
        "test_resuming_is_never_having_stopped[sizes0-None-2]": "its other row",
    },
    "ranks/test_draws.py": {
        "test_rounds_are_those_that_numpy_computes[((1, 1, 1, 1), None)]": "its row of three cells of one rank",
        "test_rounds_are_those_that_numpy_computes[((2, 1, 2), 1)]": "its row of two cells of replicas",
        "test_rounds_are_those_that_numpy_computes[((3, 1), None)]": "its other row of unequal cells",
    },
    "ranks/test_elastic.py": {
        "test_a_cell_of_another_exchange_format_is_refused_alone": (
            "unit/test_roster.py for the record of such a cell, test_mixed.py for cells of one job"
        ),
        "test_a_cell_that_comes_back_after_the_end_does_not_wait_for_it": (
            "test_a_cell_that_starts_again_knows_who_has_finished"
        ),
        "test_fragments_in_turn_behind_local_steps_outlive_a_cell": "test_a_delayed_round_that_breaks_is_put_back",
        "test_replicas_do_not_wait_for_a_cell_that_was_lost": "test_who_is_left_goes_on_where_a_rank_is_killed",
        "test_no_part_of_the_server_is_lost_with_a_cell[told]": (
            "test_after_an_outage_of_all_cells_the_newest_checkpoint_counts"
        ),
        **{
            f"test_who_is_left_goes_on_where_a_rank_is_killed[{phase}]": (
                "its rows exchange, told and agreed; unit/test_journal_rule.py plays losses at all points"
            )
            for phase in ("meet", "open", "opened", "close")
        },
        "test_a_late_cell_takes_all_of_it_from_another_one_where_the_giving_cell_is_lost": (
            "test_a_late_cell_of_another_size_takes_over_the_model_and_the_server, and a round in doubt below"
        ),
        "test_a_cell_that_has_waited_for_long_cuts_no_slower_one": (
            "test_cells_whose_steps_take_unlike_times_lose_no_round"
        ),
        "test_a_late_cell_that_takes_over_for_long_breaks_no_round": (
            "test_a_late_cell_of_another_size_takes_over_the_model_and_the_server"
        ),
        "test_a_late_cell_with_another_model_is_refused_alone": (
            "test_elastic_settings.py::test_a_cell_that_comes_back_with_other_settings_ends_and_the_others_go_on[model]"
        ),
        "test_a_lighthouse_that_moves_divides_nobody": (
            "test_a_lighthouse_that_a_file_names_may_be_another_one_at_any_time and ..._started_again_divides_nobody"
        ),
        "test_a_cell_that_cannot_use_the_journal_is_left_out_until_it_can[write]": "its row read",
        "test_a_late_cell_counts_what_privacy_has_cost_before_it_came": (
            "test_where_no_cell_has_anything_to_give_those_behind_take_the_model_over[sizes3-None-names3]"
        ),
        **{
            f"test_where_no_cell_has_anything_to_give_those_behind_take_the_model_over[{row}]": (
                "its other rows; servers and codecs that are handed over: test_elastic_state.py"
            )
            for row in ("sizes1-1-names1", "sizes2-None-names2")
        },
        "test_of_two_cells_one_goes_on_where_the_other_is_killed[half]": "its row told",
        "test_a_cell_that_is_lost_before_its_ranks_have_connected_is_not_waited_for[1]": "its row 0",
        "test_a_lost_cell_is_not_waited_for_again_where_the_next_try_loses_another_one": (
            "test_of_three_cells_of_which_two_die_one_after_the_other_the_last_one_goes_on"
        ),
    },
    "ranks/test_elastic_alone.py": {
        "test_a_rank_that_fails_alone_on_entering_ends_its_cell_and_no_other[stages]": "its other row",
    },
    "ranks/test_elastic_join.py": {
        "test_cells_take_over_what_no_round_moves[fragments]": "its row plain",
        "test_steps_with_gradients_of_the_model_before_change_nothing_and_others_count[scaler]": "its row closure",
        "test_steps_with_gradients_of_the_model_before_change_nothing_and_others_count[in turn]": "its row closure",
    },
    "ranks/test_elastic_leaving.py": {
        "test_a_round_after_one_that_was_left_is_counted_from_its_own_beginning": (
            "test_a_cell_that_is_asked_to_stop_leaves_its_block_and_nobody_waits_for_it"
        ),
    },
    "ranks/test_elastic_outcomes.py": {
        "test_schedules_by_time_outlive_a_round_in_doubt[schedule1]": "its other row",
    },
    "ranks/test_elastic_settings.py": {
        "test_a_cell_that_comes_back_with_other_settings_ends_and_the_others_go_on[server]": "its row model",
    },
    "ranks/test_elastic_trainer.py": {
        "test_a_cell_that_comes_back_goes_on_in_its_data[saved]": (
            "test_elastic.py::test_a_cell_that_is_killed_comes_back; test_changed_cells.py for its place in the data"
        ),
        "test_two_of_three_cells_that_leave_in_order_go_on_when_they_are_back": (
            "test_elastic_leaving.py for cells that leave, unit/test_cells_journal.py for who is waited for"
        ),
    },
    "ranks/test_examples.py": {
        "test_an_example_runs[02_cnn]": "its other rows",
    },
    "ranks/test_exec.py": {
        "test_a_preempted_cell_comes_back_but_in_a_job_that_has_to_leave": (
            "test_a_cell_that_fails_comes_back_while_the_others_go_on, test_ranks_may_leave_..."
        ),
        "test_a_job_runs_the_lighthouse_until_it_ends_and_then_another_one_does": (
            "unit/test_shared_lighthouse.py::test_another_job_takes_over_after_a_silence"
        ),
    },
    "ranks/test_exec_config.py": {
        "test_two_ranks_get_what_was_typed_and_one_that_fails_is_told_once": (
            "test_ranks_that_a_launcher_started, test_exec.py for words and failures"
        ),
    },
    "ranks/test_exec_round.py": {
        "test_a_rank_that_fails_in_mid_round_ends_the_job_with_its_own_story": (
            "test_exec.py::test_a_failing_rank_is_shown_once_and_ends_the_job, and test_round_votes.py for the round"
        ),
    },
    "ranks/test_expert_parallel.py": {
        "test_experts_on_other_ranks_train_as_in_one_process[olmoe, ep 2]": "its row of mixtral",
    },
    "ranks/test_exports.py": {
        "test_a_server_optimizer_goes_on_from_round_to_round[fedadam:lr=0.03-sizes0-dtype0]": "its other rows",
        "test_what_an_export_weighs_and_what_a_round_of_them_takes": "test_a_round_over_files_has_the_bits_of_one_...",
    },
    "ranks/test_fault_tolerance.py": {
        "test_a_trainer_takes_no_step_before_there_are_enough_groups": "test_a_trainers_group_takes_all_over",
        "test_kills_at_random_and_a_lighthouse_that_is_gone_for_a_while": "test_a_group_is_killed_and_comes_back[fsdp]",
        "test_groups_go_on_from_their_checkpoints": (
            "test_a_trainers_group_takes_all_over, and its row [checkpoint-...] of test_groups_that_do_not_go_together"
        ),
    },
    "ranks/test_golden.py": {
        "test_rounds_give_the_bits_that_they_always_gave[6]": "its other rows",
    },
    "ranks/test_inner_optimizers.py": {
        "test_muon_on_shards_steps_as_in_one_process[4]": "its other rows",
    },
    "ranks/test_levels.py": {
        "test_each_level_has_a_codec_of_its_own": "test_each_level_has_a_combiner_a_form_and_rails_of_its_own",
        "test_many_rounds_equal_the_dense_means_of_means[(4, 2, 2)-2-((2, 1),)]": "its other rows",
    },
    "ranks/test_lighthouse_journal.py": {
        "test_an_empty_journal_may_take_the_place_of_a_lost_one": (
            "test_elastic_state.py::test_a_run_goes_on_with_a_journal_that_takes_the_place_of_a_lost_one"
        ),
        "test_a_cell_with_another_token_than_the_journal_is_not_started_again": (
            "test_elastic.py::test_a_cell_with_another_token_is_refused_alone, and test_exec.py for what is not started"
        ),
    },
    "ranks/test_lightning.py": {
        "test_a_lost_cell_of_an_elastic_run_comes_back_and_contributes": "the test of this name in test_federate.py",
    },
    "ranks/test_link_backend.py": {
        "test_results_are_the_same_that_are_handed_round_from_other_memory[(1, 3, 2)]": "its row of equal cells",
        "test_results_are_the_same_that_are_handed_round_from_other_memory[(4, 2)]": "its row of equal cells",
    },
    "ranks/test_many_ranks.py": {
        "test_a_rank_that_is_killed_while_ranks_connect_is_noticed_after_one_timeout[4-False]": "its other rows",
        "test_a_rank_that_comes_late_is_waited_for_as_long_as_the_timeout_says[4-False]": "its other rows",
    },
    "ranks/test_pipeline_parallel.py": {
        "test_data_parallel_stages[ddp]": "its other row",
    },
    "ranks/test_preemption.py": {
        "test_a_run_that_left_goes_on_as_if_nothing_had_happened[fsdp, accumulating, saving in the background]": (
            "its other rows, test_checkpoint_async.py"
        ),
        "test_a_cell_without_rounds_waits_for_the_others": "test_signals_at_all_times",
        "test_a_run_that_left_goes_on_as_if_nothing_had_happened[rounds that are always under way]": "its other rows",
    },
    "ranks/test_protected.py": {
        "test_a_secure_mean_is_the_mean[(2, 2, 4)-2]": "its other rows",
        "test_updates_are_clipped_and_noised_as_wholes[(4, 4)-2]": "its other rows",
    },
    "ranks/test_resume.py": {
        "test_a_killed_run_goes_on_as_if_nothing_had_happened[fragments with momentum]": (
            "test_federate.py::test_rounds_of_all_kinds_go_on_to_the_same_bits"
        ),
        "test_a_killed_run_goes_on_as_if_nothing_had_happened[scaffold]": (
            "test_federate.py::test_rounds_of_all_kinds_go_on_to_the_same_bits"
        ),
    },
    "ranks/test_round.py": {
        "test_a_round_is_the_weighted_mean[(2, 4, 2)-2]": "its other rows",
    },
    "ranks/test_round_codecs.py": {
        "test_all_ranks_hold_the_same_bits[(3, 1)-None-False]": "its other row",
        "test_all_ranks_hold_the_same_bits[(4, 2)-2-False]": "its other row",
    },
    "ranks/test_round_forms.py": {
        "test_every_way_gives_the_same_bits[(2, 4)-2]": "its other rows",
        "test_every_way_gives_the_same_bits[(1, 2, 1)-None]": "its other rows",
    },
    "ranks/test_round_mesh.py": {
        "test_rounds_are_the_dense_mean[(4, 4)-{'dp_replicate': 1, 'dp_shard': 2, 'tp': 2}]": "its other rows",
        "test_rounds_are_the_dense_mean[(4, 4)-{'dp_replicate': 2, 'tp': 2}]": "its other rows",
        "test_algorithms[server-(4, 4)-{'dp_replicate': 1, 'dp_shard': 2, 'tp': 2}]": "its other rows",
    },
    "ranks/test_round_mesh_edges.py": {
        "test_training_and_levels": "test_round_mesh.py for meshes, test_levels.py for levels",
    },
    "ranks/test_session.py": {
        "test_processes_exit_with_their_own_code[cells-0]": "test_set_up_and_clean_up, and its row raise",
        "test_an_error_of_all_ranks_after_their_session_is_one_line[words0]": "its row of xffl exec",
    },
    "ranks/test_storm.py": {
        "test_cells_that_are_killed_come_back_and_leave_nothing_behind": (
            "test_elastic.py::test_a_cell_that_is_killed_comes_back, test_exec.py for what is left behind"
        ),
    },
    "ranks/test_strategies.py": {
        "test_strategies_train_like_one_process[8]": "its rows of two and four ranks",
        "test_rounds_of_strategies_are_weighted_means[4]": "its rows of two and three ranks in a cell",
    },
    "ranks/test_strategy_steps.py": {
        "test_windows_equal_large_batches[hsdp]": "its other rows",
    },
    "ranks/test_tensor_parallel.py": {
        "test_fsdp_and_tensor_parallel_are_a_single_process": (
            "test_two_ranks_are_a_single_process, and test_strategies.py trains the axes together"
        ),
    },
    "ranks/test_watch.py": {
        "test_without_a_session_the_end_of_the_process_tells_of_rounds_that_were_never_entered[-True]": "its other row",
    },
    "unit/test_configuration.py": {
        "test_to_read_a_project_takes_no_slow_imports[language_model]": "its other row",
    },
    "unit/test_loggers.py": {
        "test_everything_is_closed_whatever_a_logger_raises[None]": "its other row",
    },
}
"""By file, the tests, or rows of one, that CI leaves out, and where CI tests what they show."""


def is_at_night(file: str, name: str) -> bool:
    """Whether CI leaves out a whole test.

    :param file: Path below ``tests/``.
    :param name: Of the function.
    """
    return name in AT_NIGHT.get(file, {})


def mark_tests_of_the_night(items: Sequence[pytest.Item], *, are_all: bool) -> None:
    """Mark the tests of :data:`AT_NIGHT`.

    :param items: What was collected.
    :param are_all: Whether they are all tests of their files, so that each entry must be the name of one.
    :raises pytest.UsageError: if an entry names no test.
    """
    unused = {file: set(names) for file, names in AT_NIGHT.items()}
    collected = set()
    for item in items:
        if HERE not in item.path.parents:
            continue
        file = item.path.relative_to(HERE).as_posix()
        collected.add(file)
        for name in (item.name, item.name.partition("[")[0]):
            if name in AT_NIGHT.get(file, {}):
                item.add_marker(pytest.mark.long)
                unused[file].discard(name)
    wrong = sorted(f"{file}::{name}" for file in collected & unused.keys() for name in unused[file])
    if are_all and wrong:
        raise pytest.UsageError(f"tests/night.py names tests that do not exist: {', '.join(wrong)}")
