"""docs/HARDENING.md: what is tried to break the program, each with the tests that try it.

`PYTHONPATH=tests .venv/bin/python -m lab.hardening` writes it; a test holds it against the tests:
each named one exists, and how many examples it plays is read from its source.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "HARDENING.md"
_HYPOTHESIS_EXAMPLES = 100  # of one that says no other number


@dataclass(frozen=True, slots=True)
class Row:
    """`what` happens, what then `holds`, and the tests: `folder/module.test`, without `test_`."""

    what: str
    holds: str
    tests: tuple[str, ...]


BAD_INPUT = (
    Row(
        "A recording with flipped bits, also in the log that a killed recorder left",
        "an error that names the file, or reports that sum; no export or comparison fails",
        (
            "unit/recording.a_flipped_bit_is_an_error_or_a_wrong_value",
            "unit/recording.flipped_bits_in_a_leftover_log_are_survived",
            "unit/damaged.flipped_bits_are_an_error_or_exact_reports",
        ),
    ),
    Row(
        "A recording cut at every kilobyte, or with any kilobyte in another's place",
        "an error with the next step (`.recover`), or exact sums",
        (
            "unit/recording.cut_anywhere_it_is_an_error",
            "unit/damaged.every_kilobyte_swapped_with_another_is_survived",
        ),
    ),
    Row(
        "A recording made to harm its reader: bombs, views for tables, wrong layouts, deep JSON",
        "an error; memory is bounded by what the layout says",
        (
            "unit/recording.hostile_contents_are_an_error",
            "unit/recording.arbitrary_bytes_are_an_array_or_an_error",
        ),
    ),
    Row(
        "HTTP: any bytes, any cut, any order, gaps, bombs, endless heads",
        "no exception, every exchange makes sense, memory is bounded",
        (
            "unit/http.nothing_raises_and_every_exchange_makes_sense",
            "unit/http.random_splits_give_the_same_facts",
            "unit/http.a_zip_bomb_is_given_up",
            "unit/http.memory_is_bounded_by_what_is_fed",
            "unit/requests_tap.no_order_of_pieces_makes_it_stumble",
            "unit/requests_tap.what_many_connections_hold_is_bounded",
            "kernel/http_tap.rubbish_does_no_harm",
        ),
    ),
    Row(
        "ELF files of a hostile target, cut and damaged",
        "no exception, and no symbol but those that were asked for",
        (
            "unit/libraries.a_library_cut_short_does_no_harm",
            "unit/libraries.a_damaged_library_does_no_harm",
        ),
    ),
    Row(
        "Weights whose GGUF or safetensors header claims 2^63 tensors",
        "not a byte of weights is read, so there is no header to be fooled by",
        ("kernel/chaos.no_byte_of_weights_is_read_whatever_their_headers_claim",),
    ),
    Row(
        "mountinfo, mountstats, the SMB client's counters, /sys of devices, DRM's fdinfo",
        "what makes no sense is left out",
        (
            "unit/mounts_processes.any_text_is_some_list_of_mounts",
            "unit/mountstats.nothing_makes_the_parsers_fail",
            "unit/mountstats.no_bytes_do_either",
            "unit/stack.any_text_is_parsed_to_something",
            "unit/stack.any_bytes_in_the_files_of_a_device",
            "unit/gpu_drm.damaged_fdinfo_is_nothing",
        ),
    ),
    Row(
        "Log lines, pages of metrics, command lines, output of py-spy",
        "of a line only numbers and a short name are kept, of a command line no secret",
        (
            "unit/engines.no_bytes_make_it_stumble",
            "unit/engines.of_a_line_only_numbers_and_a_short_name_are_kept",
            "unit/metrics.no_page_makes_it_stumble",
            "unit/command_line.no_value_of_a_secret_option_is_shown",
            "unit/python_stacks_source.output_in_any_pieces",
        ),
    ),
    Row(
        "Names of models, files and processes that are markup, or escape sequences",
        "text, in the terminal, HTML, Markdown and every export",
        (
            "unit/report_terminal.hostile_names_are_harmless",
            "unit/html.a_hostile_name_adds_no_element_and_no_invisible_character",
            "unit/export_tables.hostile_names_stay_text_in_markdown",
            "unit/export_traces.names_of_lanes_parts_and_code_are_harmless_in_every_export",
        ),
    ),
)
SUMS = (
    Row(
        "Any interleaving of events, rows and facts",
        "phases follow each other without gap or overlap and sum to the wait, so do activities",
        (
            "unit/analysis.any_facts_give_exact_partitions",
            "unit/analysis.a_real_switch_stays_exact_among_any_other_facts",
            "unit/analysis.the_order_in_which_facts_were_written_does_not_matter",
            "unit/activities.any_threads_give_a_partition",
            "unit/activities.two_halves_are_the_whole",
            "unit/remote.any_records_give_sums_that_hold",
        ),
    ),
)
FAULTS = (
    Row(
        "ttftprof is killed (-9)",
        "what was recorded until 0.2 s before is there, and what had been lost; no probe stays",
        (
            "kernel/faults.kill_9_leaves_a_recording_and_no_probe",
            "kernel/faults.kill_9_leaves_word_of_what_was_lost",
            "unit/experiment_resume.killed_again_and_again_no_run_is_lost_or_doubled",
        ),
    ),
    Row(
        "The disk is full, before or while it records",
        "nothing, or all until then; the server is not touched",
        (
            "kernel/faults.a_full_disk_ends_the_recording_and_keeps_it",
            "kernel/faults.a_disk_full_before_it_is_armed_leaves_nothing",
        ),
    ),
    Row(
        "The ring overruns",
        "kept and lost add up to what happened; the loss stands first in the report",
        (
            "kernel/faults.a_ring_too_small_loses_events_and_says_how_many",
            "kernel/cost.a_ring_too_small_says_what_it_lost",
        ),
    ),
    Row(
        "The target is killed, also as it answers, or starts 10,000 children",
        "the recording ends complete, the request is incomplete; every child is there",
        (
            "kernel/faults.it_ends_with_its_target_and_has_all_of_it",
            "kernel/chaos.a_server_that_is_killed_as_it_answers_leaves_what_was_seen",
            "kernel/faults.10_000_children_are_all_there_and_memory_stays_bounded",
        ),
    ),
    Row(
        "Somebody detaches the probes, or kills the recorder's helpers",
        "the kernel refuses the one, even to root; the other costs only what they were for",
        (
            "kernel/chaos.nobody_else_can_detach_a_probe",
            "kernel/chaos.its_helpers_may_be_killed",
        ),
    ),
    Row(
        "The machine is suspended, its wall clock is set",
        "no phase changes, the report says when and how much; reads are seen after it",
        (
            "vm/suspend.each_suspend_is_told_with_its_length",
            "vm/suspend.no_time_of_the_recording_counts_it",
            "vm/suspend.reads_go_on_after_each",
            "kernel/chaos.a_suspend_and_a_set_clock_are_told_and_cost_nothing",
            "vm/network.a_wall_clock_that_was_set_is_told",
            "unit/clock.a_suspend_is_told_from_a_set_wall_clock",
            "unit/analysis.what_happened_to_the_machines_clocks_is_told_and_changes_no_phase",
        ),
    ),
    Row(
        "A CPU comes on, goes off, comes on again, by itself or for a suspend",
        "it is looked at from then on, and the source says since when",
        (
            "vm/suspend.a_cpu_that_came_back_is_looked_at",
            "kernel/chaos.a_cpu_that_comes_on_is_looked_at_from_then_on",
        ),
    ),
    Row(
        "A call into NVML hangs, a GPU is lost",
        "its samples end, and the report says since when",
        (
            "kernel/gpu_sampling.a_gpu_that_is_lost_and_a_driver_that_hangs_cost_only_their_samples",
            "kernel/gpu_sampling.a_driver_that_does_not_start_is_said_and_waited_for_by_nobody",
        ),
    ),
    Row(
        "py-spy is missing, refuses, or does not end",
        "the rest is recorded, with the next step",
        (
            "kernel/chaos.without_py_spy_all_else_is_recorded",
            "unit/python_stacks_source.refusals_are_told_once_they_stay",
            "unit/python_stacks_source.one_that_does_not_end_is_ended_by_force",
        ),
    ),
    Row(
        "The module of a file system is loaded while it is recorded, by either loader",
        "its reads are the kernel's own, and the source says since when they are looked at",
        (
            "vm/both_loaders.either_follows_a_module_that_comes_while_it_records",
            "vm/both_loaders.either_counts_smb_requests_as_the_kernel",
        ),
    ),
    Row(
        "A file server falls silent while reads wait for it",
        "the reads that were never answered are in the recording",
        ("vm/network.a_server_gone_silent_leaves_reads_unanswered",),
    ),
)
PRIVILEGE = (
    Row(
        "What root was needed for is done",
        "four capabilities stay, under sudo as the caller, and there is no way back",
        (
            "kernel/privilege.under_sudo_it_goes_on_as_the_caller",
            "kernel/privilege.a_recorder_is_root_no_more",
        ),
    ),
    Row(
        "It is started setuid or setgid",
        "it refuses to do anything",
        ("kernel/chaos.with_borrowed_rights_it_does_nothing",),
    ),
    Row(
        "Names and paths that a shell would take for commands",
        "no shell is started",
        ("unit/no_shell.no_shell_is_started",),
    ),
    Row(
        "Links that another user planted where it writes",
        "they are not followed; a recording is the caller's, of mode 0600",
        (
            "unit/recording.a_link_at_the_output_is_not_followed",
            "unit/report_command.a_link_that_another_user_planted_is_not_followed",
            "kernel/faults.a_ready_file_that_is_no_file_of_yours_is_left_alone",
        ),
    ),
    Row(
        "A process id is given to another process; a file is replaced while it is open",
        "the stranger is not followed, and the two files are two",
        (
            "kernel/faults.a_stranger_that_gets_a_targets_number_is_not_followed",
            "unit/timeline.a_moment_tells_the_lives_of_a_reused_pid_apart",
            "kernel/storage_files.a_file_replaced_while_open_is_two_files_of_one_name",
        ),
    ),
    Row(
        "A capability is missing; seccomp, SELinux, AppArmor or lockdown forbids the probes",
        "it is named, with the remedy; without probes /proc is looked at",
        (
            "vm/adverse.a_profile_that_forbids_probes_is_named_with_the_remedy",
            "vm/adverse.what_it_names_instead_works",
            "vm/adverse.under_lockdown_confidentiality_it_goes_on_without_probes",
            "kernel/faults.a_root_without_a_capability_is_told_which",
            "kernel/chaos.a_filter_that_forbids_bpf_is_named",
            "unit/doctor.who_forbids_the_probes_is_named_with_the_remedy",
            "kernel/without_probes.it_goes_on_with_less_and_says_so",
        ),
    ),
    Row(
        "A hardened machine: lockdown=integrity, no unprivileged BPF, no perf events, no addresses "
        "of the kernel, no ptrace",
        "all is recorded; what the kernel gives to CAP_SYS_ADMIN alone, a helper opens",
        (
            "vm/adverse.a_hardened_machine_under_lockdown_integrity_gives_all",
            "vm/adverse.a_library_that_is_mapped_after_root_was_given_up_is_marked",
            "kernel/perf_events.calls_of_a_library_that_comes_late_are_seen",
            "kernel/perf_events.the_helper_says_what_it_was_refused_and_holds_nothing",
        ),
    ),
    Row(
        "A profile lets it load probes, but not look at the server or at its libraries",
        "what may not be read is named, not said to be absent",
        (
            "vm/adverse.a_profile_that_forbids_looking_costs_the_calls_and_says_so",
            "unit/libraries.what_may_not_be_looked_at_is_not_said_to_have_nothing",
        ),
    ),
    Row(
        "The server is in a container, also a rootless one",
        "it is found by id or name, its files are those that it sees",
        (
            "kernel/chaos.a_rootless_container_is_recorded_from_outside",
            "kernel/restart.a_container_is_found_by_the_id_in_its_control_group",
            "kernel/storage_mounts.the_own_layer_of_a_container",
        ),
    ),
)
SECTIONS = {
    "Bad input": BAD_INPUT,
    "Sums": SUMS,
    "Faults": FAULTS,
    "Rights": PRIVILEGE,
}
_HEAD = """# What was tried to break it

Made by `PYTHONPATH=tests .venv/bin/python -m lab.hardening`. CI runs every test named here, and
fails if one is gone. In brackets: how many generated inputs a test plays in each run.
"""
_SOAK = """
## Soak

`sudo scripts/soak` records a real llama-server that switches its model every 10 s, for an hour:
361 switches, memory 79.9 → 83.5 MiB, descriptors 135 → 135, every first token there, nothing lost.
CI runs it for 15 switches, one a second: `kernel/soak.many_switches_leave_the_recorder_as_it_was`.

## Not tried

SELinux is played by its files: a policy that boots Debian and confines one program is more than a
test should carry. Seccomp, AppArmor and lockdown are real. A suspend is real in a VM without disks
or GPUs (the kernel's own test of one, then ACPI S3 with an alarm); this machine's would take it
from everyone. A CPU that goes off and comes on within a second, and not for a suspend, is not
noticed.
"""


def document() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, rows in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| what | what holds | tests |\n|---|---|---|\n")
        parts += [f"| {row.what} | {row.holds} | {_shown(row.tests)} |\n" for row in rows]
    return "".join([*parts, _SOAK])


def _shown(tests: tuple[str, ...]) -> str:
    return ", ".join(f"`{test}`{_number(examples(test))}" for test in tests)


def _number(count: int) -> str:
    return f" ({count:,})" if count else ""


def named() -> set[str]:
    """Every test on the page."""
    return {test for rows in SECTIONS.values() for row in rows for test in row.tests} | set(
        re.findall(r"`(\w+/\w+\.\w+)`", _SOAK)
    )


def examples(test: str) -> int:
    """How many generated inputs a test plays; 0 if it names its own. Raises `LookupError` if there
    is no such test."""
    where, _, name = test.partition(".")
    folder, _, module = where.rpartition("/")
    path = TESTS / ("lab/vm" if folder == "vm" else folder) / f"test_{module}.py"
    functions, numbers = _read(path)
    if name not in functions:
        raise LookupError(f"{path.name} has no test_{name}")
    function = functions[name]
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    if "given(" in decorators:
        for alias in re.findall(r"\b\w+\b", decorators):
            decorators += numbers.get(f"{alias} settings", "")
        found = re.search(r"max_examples=(\d+)", decorators)
        return int(found[1]) if found else _HYPOTHESIS_EXAMPLES
    played = re.findall(r"range\(([A-Z_]+)\)", ast.unparse(function))
    times = re.search(r"range\((\d+)\)", decorators)
    rounds = sum(int(numbers.get(constant, 0)) for constant in played)
    return rounds * (int(times[1]) if times else 1)


@cache
def _read(path: Path) -> tuple[dict[str, ast.FunctionDef], dict[str, str]]:
    """(the tests of a module, its constants and aliases of settings, as source)."""
    tree = ast.parse(path.read_text())
    functions = {
        node.name.removeprefix("test_"): node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    numbers = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            key = f"{name} settings" if value.startswith("settings(") else name
            numbers[key] = value if key != name or value.isdigit() else "0"
    return functions, numbers


if __name__ == "__main__":
    DOCUMENT.write_text(document())
