"""`miles plugins list | show | check` as a person and a script see them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from miles_core.capability import KINDS
from miles_core.cli import COMMANDS, FIRST_FIVE, main, table
from miles_core.cli.lazy import LazyCommand, LazyGroup
from miles_core.errors import RunError
from miles_core.registry import discover

LIST_CPU_SECONDS = 0.4
REGISTRY = discover()
HEAVY = {"torch", "ray", "transformers", "tokenizers", "pydantic", "numpy", "yaml"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


class TestGroup:
    def test_bare_miles_prints_the_five_commands_people_need(self):
        result = run()
        assert re.findall(r"^  miles (\w+)", result.output, re.M) == list(FIRST_FIVE)
        assert result.exit_code == 0

    def test_help_lists_every_command_without_importing_any(self):
        code = (
            "import sys; from miles_core.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        *help_lines, modules = done.stdout.splitlines()
        assert all(any(line.split()[:1] == [name] for line in help_lines) for name in COMMANDS)
        assert not {name for name in modules.split() if name.split(".")[0] in HEAVY or name == "miles_core.registry"}

    def test_an_error_of_ours_is_a_message_and_its_exit_code(self):
        result = run("plugins", "show", "transport", "no-such-thing")
        assert result.exit_code == 2
        assert "no transport is named `no-such-thing`" in result.stderr
        assert "Traceback" not in result.output

    def test_a_command_whose_module_is_absent_does_not_break_the_group(self):
        group = LazyGroup("g", lazy={"gone": LazyCommand("miles_gone.cli:command", "Absent.")}, help="h")
        assert CliRunner().invoke(group, ["--help"]).exit_code == 0
        result = CliRunner().invoke(group, ["gone"])
        assert (result.exit_code, "pip install ./miles_gone" in result.stderr) == (2, True)

    @pytest.mark.parametrize(("error", "code"), [(RunError("stop"), 1), (KeyboardInterrupt(), 130)])
    def test_exit_codes(self, monkeypatch, error, code):
        def raising(**_):
            raise error

        monkeypatch.setattr("miles_core.cli.plugins.list_command.callback", raising)
        assert run("plugins", "list").exit_code == code

    def test_a_fault_of_ours_is_not_hidden(self, monkeypatch):
        def raising(**_):
            raise ZeroDivisionError

        monkeypatch.setattr("miles_core.cli.plugins.list_command.callback", raising)
        assert isinstance(run("plugins", "list").exception, ZeroDivisionError)


class TestList:
    def test_json_has_one_object_for_each_capability_and_failed_plugin(self):
        rows = json.loads(run("plugins", "list", "--json").stdout)
        registry = discover()
        failed = [plugin for plugin in registry.plugins if plugin.state != "ok"]
        assert len(rows) == len(registry.entries()) + len(failed)
        (row,) = [row for row in rows if (row["kind"], row["name"]) == ("loss", "gspo")]
        assert (row["distribution"], row["version"], row["state"]) == ("miles-core", "0.1.0", "ok")
        assert row["summary"]

    def test_the_table_has_the_same_rows(self):
        lines = run("plugins", "list").stdout.splitlines()
        assert lines[0].split() == ["KIND", "NAME", "FROM", "STATE", "SUMMARY"]
        assert len(lines) - 1 == len(json.loads(run("plugins", "list", "--json").stdout))
        assert any(line.split()[:5] == ["loss", "gspo", "miles-core", "0.1.0", "ok"] for line in lines)

    def test_what_runs_only_elsewhere_says_what_is_absent_here(self, monkeypatch):
        def rows():
            return {(row["kind"], row["name"]): row for row in json.loads(run("plugins", "list", "--json").stdout)}

        found = importlib.util.find_spec
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, *more: None if name == "mooncake" else found(name, *more)
        )
        p2p = rows()["transport", "p2p"]
        assert p2p["state"] == "ok"  # a run-file may pick it
        assert [each["module"] for each in p2p["absent"]] == ["mooncake"]
        (line,) = [line for line in run("plugins", "list").stdout.splitlines() if line.split()[1] == "p2p"]
        assert re.search(r"not here +no module mooncake: pip install './miles_transports\[p2p\]'", line)
        assert "not here   no module mooncake" in run("plugins", "show", "transport", "p2p").stdout
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, *more: found("json") if name == "mooncake" else found(name, *more)
        )
        assert rows()["transport", "p2p"]["absent"] == []
        (line,) = [line for line in run("plugins", "list").stdout.splitlines() if line.split()[1] == "p2p"]
        assert line.split()[4] == "ok"

    def test_one_kind_alone(self):
        rows = json.loads(run("plugins", "list", "--json", "--kind", "loss").stdout)
        assert {row["kind"] for row in rows} == {"loss"}

    def test_it_is_quick_and_imports_nothing_heavy(self):
        # Processor time of the child, so that a busy machine does not matter; the best of three, as the first may
        # have to write bytecode.
        code = (
            "import sys, time; from miles_core.cli import main; main(['plugins', 'list'], standalone_mode=False);"
            "print('TIME', time.process_time()); print('MODULES', *sys.modules)"
        )
        seconds = []
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            *_, timing, modules = done.stdout.splitlines()
            seconds.append(float(timing.split()[1]))
        assert not HEAVY & {name.split(".")[0] for name in modules.split()}
        assert min(seconds) < LIST_CPU_SECONDS


class TestShow:
    def test_options_have_types_defaults_and_descriptions(self):
        (facts,) = json.loads(run("plugins", "show", "loss", "ppo-clip", "--json").stdout)
        options = {option["name"]: option for option in facts["options"]}
        assert (options["low"]["type"], options["low"]["default"]) == ("number 0..1", 0.2)
        assert (options["high"]["type"], options["high"]["default"]) == ("number > 0 | null", None)
        assert options["low"]["description"].startswith("The ratio is clipped")

    def test_required_options_are_in_the_snippet(self):
        output = run("plugins", "show", "reward", "http").stdout
        assert "rewards: [{use: http, url: ...}]" in output
        assert re.search(r"url +string +required", output)

    def test_rules_and_tags_are_explained(self):
        output = run("plugins", "show", "advantage", "gae").stdout
        assert "gae-needs-critic   when always; needs backend:critic" in output
        assert "needs-values: reads a critic's values" in output

    def test_a_nested_section_is_shown_nested(self):
        assert "session:\n    matcher: strict" in run("plugins", "show", "matcher", "strict").stdout

    def test_hyphens_in_a_kind_are_accepted(self):
        assert run("plugins", "show", "tito-family", "default").exit_code == 0

    @pytest.mark.parametrize("entry", REGISTRY.entries(), ids=lambda each: f"{each.kind}-{each.name}")
    def test_everything_installed_can_be_explained(self, monkeypatch, entry):
        monkeypatch.setattr("miles_core.cli.plugin_show.discover", lambda: REGISTRY)
        result = run("plugins", "show", entry.kind, entry.name)
        assert result.exit_code == 0
        assert entry.capability.summary in result.stdout


class TestTable:
    def test_the_last_column_wraps_under_itself(self):
        text = table.render(("A", "B"), [("x", "one two three four five six seven")], width=30)
        assert text == "A  B\nx  one two three four five six\n   seven"

    def test_a_pipe_is_not_wrapped(self):
        assert table.render(("A", "B"), [("x", "word " * 50)]).count("\n") == 1


def test_kinds_of_the_command_are_those_of_core(monkeypatch):
    monkeypatch.setattr("miles_core.cli.plugins.discover", lambda: REGISTRY)
    assert run("plugins", "list", "--kind", "nonsense").exit_code == 2
    assert all(run("plugins", "list", "--kind", kind).exit_code == 0 for kind in KINDS)
