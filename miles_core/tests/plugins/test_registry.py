"""Discovery: every way a plugin can fail is a state with a reason, and harms nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.capability import State
from miles_core.errors import PluginError
from miles_core.registry import Plugin, Registry, discover, load_target

GOOD = """
from miles_core.plugin import Capability, hookimpl
MILES_API = 1

@hookimpl
def miles_rewards():
    return [Capability(name="{name}", summary="for a test", load="math:sqrt")]
"""


def good(name: str) -> str:
    return GOOD.format(name=name)


def only(registry: Registry, distribution: str) -> Plugin:
    (plugin,) = [each for each in registry.plugins if each.distribution == distribution]
    return plugin


def test_a_sound_plugin_is_listed_and_can_be_picked(install, entry_points):
    install("good", good("short"))
    registry = discover(entry_points=entry_points())
    entry = registry.get("reward", "short")
    assert (entry.owner, entry.state, entry.kind) == ("good 1.0", State.OK, "reward")
    assert registry.entries("loss") == ()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("MILES_API = 1\nimport bar_cuda", "ModuleNotFoundError: No module named 'bar_cuda'"),
        ("MILES_API = 1\nimport sys; sys.exit(3)", "calls sys.exit(3) while it is imported"),
        ("MILES_API = 1\nraise BaseException('odd')", "BaseException: odd"),
        ("MILES_API = 1\ndef f(:", "SyntaxError"),
        ("MILES_API = 1\n", "declares no hook"),
        (good("short").replace("miles_rewards", "miles_reward"), "unknown hook `miles_reward`"),
        (good("short").replace("@hookimpl", ""), "`miles_rewards` is not marked"),
        (good("short").replace("@hookimpl", "@hookimpl(tryfirst=True)"), "asks for an order"),
        (good("short").replace("():", "(config):"), "Plugin 'bad:bad-entry' for hook 'miles_rewards'"),
        (good("short").replace("return [", "raise ValueError('no GPU') or ["), "ValueError: no GPU"),
        (good("short").replace("return [", "None and ["), "returned NoneType"),
        (good("short").replace("return [", "return [42, "), "returned a int among its capabilities"),
        (good("Short_Name"), "'Short_Name' is not kebab-case"),
        (good("short").replace("for a test", "x" * 81), "81 found"),
        (good("short").replace("math:sqrt", "math.sqrt"), "'math.sqrt', not module:attribute"),
        (good("short").replace("load=", "needs=('>>1',), load="), "'>>1', which is not a requirement"),
        (good("short").replace("load=", "expects=(('a.b', 'x'),), load="), "not the name of a top-level module"),
    ],
)
def test_a_broken_plugin_says_why_and_leaves_the_others_usable(install, entry_points, source, reason):
    install("bad", source)
    install("good", good("short"))
    registry = discover(entry_points=entry_points())
    plugin = only(registry, "bad")
    assert plugin.state is State.BROKEN
    assert reason in plugin.reason
    assert registry.get("reward", "short").distribution == "good"
    assert [entry.distribution for entry in registry.entries()] == ["good"]


def test_a_wrapper_is_refused_before_it_can_replace_answers(install, entry_points):
    install("bad", good("short").replace("@hookimpl", "@hookimpl(wrapper=True)").replace("return [", "yield; return ["))
    install("good", good("long"))
    registry = discover(entry_points=entry_points())
    assert "is a wrapper" in only(registry, "bad").reason
    assert [entry.name for entry in registry.entries()] == ["long"]


def test_a_misspelt_hook_gets_a_suggestion(install, entry_points):
    install("bad", good("short").replace("miles_rewards", "miles_reward"))
    assert only(discover(entry_points=entry_points()), "bad").do == "did you mean `miles_rewards`?"


def test_specname_is_held_to_the_same_rules(install, entry_points):
    install("bad", good("short").replace("@hookimpl", "@hookimpl(specname='miles_rewardz')"))
    install(
        "good",
        good("long").replace("miles_rewards", "mine").replace("@hookimpl", "@hookimpl(specname='miles_rewards')"),
    )
    registry = discover(entry_points=entry_points())
    assert "unknown hook `miles_rewardz`" in only(registry, "bad").reason
    assert [entry.name for entry in registry.entries("reward")] == ["long"]


def test_keyboard_interrupt_is_not_swallowed(install, entry_points):
    install("bad", "MILES_API = 1\nraise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover(entry_points=entry_points())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("MILES_API = 2", "plugin API 2"),
        ("", "does not say which plugin API"),
        ("from miles_core.capability import API as core_api\nMILES_API = core_api", "not a literal number"),
        ("MILES_API = True", "not a literal number"),
    ],
)
def test_another_api_version_is_incompatible_without_being_imported(install, entry_points, line, reason):
    install("other", line + "\nimport something_only_that_core_has")
    plugin = only(discover(entry_points=entry_points()), "other")
    assert plugin.state is State.INCOMPATIBLE
    assert reason in plugin.reason
    assert "other_plugin" not in sys.modules


def test_a_requirement_that_excludes_this_core_is_incompatible_without_import(install, entry_points):
    install("other", good("short"), requires=("numpy", "miles-core>=9,<10"))
    plugin = only(discover(entry_points=entry_points()), "other")
    assert plugin.state is State.INCOMPATIBLE
    assert "miles-core<10,>=9" in plugin.reason
    assert "other_plugin" not in sys.modules


def test_a_requirement_that_allows_this_core_is_fine(install, entry_points):
    install("good", good("short"), requires=("Miles_Core>=0.1,<0.2",))
    assert only(discover(entry_points=entry_points()), "good").state is State.OK


@pytest.mark.parametrize("name", ["unwanted", "unwanted-entry", "Unwanted_Entry"])
def test_a_disabled_plugin_is_never_imported(install, entry_points, monkeypatch, name):
    install("unwanted", "raise SystemExit")
    monkeypatch.setenv("MILES_DISABLE_PLUGINS", f" , {name}")
    registry = discover(entry_points=entry_points())
    assert only(registry, "unwanted").state is State.DISABLED
    assert only(discover([name], entry_points()), "unwanted").state is State.DISABLED
    assert registry.warnings == ()
    assert "unwanted_plugin" not in sys.modules


def test_disabling_what_is_not_there_is_said(entry_points):
    assert "miles-fo" in discover(["miles-fo"], entry_points()).warnings[0]


@pytest.mark.parametrize("name", ["miles-core", "builtin"])
def test_core_cannot_be_disabled(name):
    registry = discover([name])
    assert registry.get("advantage", "grpo").state is State.OK
    assert "core's own plugin cannot be disabled" in registry.warnings[0]


def test_two_claims_to_one_name_are_both_conflicts_and_name_the_way_out(install, entry_points):
    install("first", good("short"))
    install("second", good("short"))
    registry = discover(entry_points=entry_points())
    one, two = registry.entries()
    assert (one.state, two.state) == (State.CONFLICT, State.CONFLICT)
    assert one.reason == "also claimed by second"
    assert two.do == "MILES_DISABLE_PLUGINS=first keeps the one of second"
    with pytest.raises(PluginError, match="also claimed by second"):
        registry.get("reward", "short")
    kept = discover(["first"], entry_points())
    assert kept.get("reward", "short").distribution == "second"


def test_an_architecture_of_ours_stands_back_for_a_plugins_own(install, entry_points):
    table = good("acme-for-causal-lm").replace("miles_rewards", "miles_architectures")
    install("miles-megatron", table)
    install("acme", table)
    registry = discover(entry_points=entry_points())
    theirs, ours = registry.entries("architecture")
    assert (theirs.state, ours.state) == (State.OK, State.DISABLED)
    assert ours.reason == "that of acme goes before it"
    assert registry.get("architecture", "acme-for-causal-lm").distribution == "acme"


def test_a_claim_to_a_name_of_core_never_advises_to_disable_core(install, entry_points):
    install("usurper", good("http"))
    from importlib.metadata import entry_points as installed

    core = [
        each for each in installed(group="miles.plugins") if each.dist and each.dist.metadata["Name"] == "miles-core"
    ]
    registry = discover(entry_points=[*entry_points(), *core])
    claims = [entry for entry in registry.entries("reward") if entry.name == "http"]
    assert {entry.do for entry in claims} == {"MILES_DISABLE_PLUGINS=usurper keeps the one of miles-core"}


def test_one_name_may_be_used_by_two_kinds(install, entry_points):
    install("good", good("short") + good("short").split("MILES_API = 1")[1].replace("miles_rewards", "miles_filters"))
    assert [entry.state for entry in discover(entry_points=entry_points()).entries()] == [State.OK, State.OK]


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("no-such-package>=2", "needs no-such-package>=2, which is not installed"),
        ("numpy>=999", "needs numpy>=999, and "),
    ],
)
def test_a_missing_need_makes_it_unavailable_with_the_pip_line(install, entry_points, need, reason):
    install("good", good("short").replace("load=", f"needs=({need!r},), load="))
    (entry,) = discover(entry_points=entry_points()).entries()
    assert entry.state is State.UNAVAILABLE
    assert entry.reason.startswith(reason)
    assert entry.do == f"pip install '{need}'"


def test_the_pip_line_names_the_extra_that_brings_the_need(install, entry_points):
    install(
        "good",
        good("short").replace("load=", "needs=('no-such-package>=2',), load="),
        requires=("no-such-package>=2; extra == 'engine'",),
        extras=("engine",),
    )
    (entry,) = discover(entry_points=entry_points()).entries()
    assert entry.do == "pip install 'good[engine]'"


def test_no_distribution_of_ours_is_given_to_pip_by_name(install, entry_points):
    source = good("short").replace("load=", "needs=('no-such-package>=2',), load=")
    install("miles-ray", source, requires=("no-such-package>=2; extra == 'engine'",), extras=("engine",))
    (entry,) = discover(entry_points=entry_points()).entries()
    assert entry.do == "pip install 'no-such-package>=2'"


def test_a_need_for_another_platform_does_not_count(install, entry_points):
    install("good", good("short").replace("load=", "needs=('nope; sys_platform == \"other\"',), load="))
    assert discover(entry_points=entry_points()).get("reward", "short").state is State.OK


def test_an_unknown_name_gets_a_suggestion_and_the_plugins_that_did_not_load(install, entry_points):
    install("good", good("shortness"))
    install("bad", "raise ValueError")
    with pytest.raises(PluginError) as caught:
        discover(entry_points=entry_points()).get("reward", "shortnes")
    assert caught.value.do == "did you mean `shortness`?"
    assert caught.value.found == "not loaded: bad 1.0 (incompatible)"
    assert caught.value.exit_code == 2


def test_an_uninstalled_first_party_name_says_where_it_lives(entry_points):
    with pytest.raises(PluginError, match="no transport is named `broadcast`") as caught:
        discover(entry_points=entry_points()).get("transport", "broadcast")
    assert (
        caught.value.do
        == "`broadcast` is in miles-transports: pip install ./miles_transports from the Miles repository"
    )


def test_a_first_party_name_of_a_disabled_distribution_says_so(install, entry_points):
    install("miles-transports", "")
    with pytest.raises(PluginError, match="miles-transports, which brings it, is disabled"):
        discover(["miles-transports"], entry_points()).get("transport", "broadcast")


def test_an_unknown_kind_gets_a_suggestion(entry_points):
    with pytest.raises(PluginError) as caught:
        discover(entry_points=entry_points()).get("transports", "ring")
    assert caught.value.do == "did you mean `transport`?"


def test_what_a_plugin_prints_does_not_reach_stdout(install, entry_points, capsys):
    install("chatty", "print('hello')\n" + good("short") + "\nprint('bye')")
    discover(entry_points=entry_points())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\nbye\n"


def test_the_order_is_that_of_names_and_not_of_the_path(install, entry_points):
    install("zeta", good("alpha"))
    install("beta", good("omega"))
    registry = discover(entry_points=list(reversed(entry_points())))
    assert [plugin.distribution for plugin in registry.plugins] == ["beta", "zeta"]
    assert [entry.name for entry in registry.entries()] == ["alpha", "omega"]


class TestUsersOwnFunctions:
    """A run-file may name a function where the kind is one."""

    def test_a_file_is_relative_to_the_run_file(self, tmp_path: Path):
        (tmp_path / "mine.py").write_text("def score(scored):\n    return 0.25\n")
        entry = Registry((), ()).resolve("reward", "mine.py:score", tmp_path)
        assert load_target(entry.capability.load)(None) == 0.25
        assert Path(entry.capability.load.rpartition(":")[0]).is_absolute()

    def test_two_files_of_one_name_are_two_modules(self, tmp_path: Path):
        for folder, value in (("a", 1), ("b", 2)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "mine.py").write_text(f"def score(scored):\n    return {value}\n")
        loads = [Registry((), ()).resolve("reward", f"{f}/mine.py:score", tmp_path).capability.load for f in "ab"]
        assert [load_target(load)(None) for load in loads] == [1, 2]

    def test_a_module_is_named_as_in_an_import(self):
        entry = Registry((), ()).resolve("filter", "os.path:exists")
        assert load_target(entry.capability.load)("/") is True

    def test_kinds_that_need_a_class_refuse(self):
        with pytest.raises(PluginError, match="transport is not a kind that can be one"):
            Registry((), ()).resolve("transport", "mine.py:Ring")

    def test_a_missing_file_is_said(self, tmp_path: Path):
        with pytest.raises(PluginError, match="does not exist"):
            Registry((), ()).resolve("reward", "mine.py:score", tmp_path)

    def test_a_file_that_raises_or_exits_is_said_and_not_kept(self, tmp_path: Path):
        for line, said in (("1 / 0", "ZeroDivisionError"), ("raise SystemExit(1)", "SystemExit")):
            (tmp_path / "mine.py").write_text(line)
            with pytest.raises(PluginError, match=said):
                load_target(f"{tmp_path}/mine.py:score")
        (tmp_path / "mine.py").write_text("score = 3\n# longer, so that no stale bytecode is taken for it")
        assert load_target(f"{tmp_path}/mine.py:score") == 3


def test_load_target_names_what_is_missing():
    with pytest.raises(PluginError, match="cannot be imported: ModuleNotFoundError"):
        load_target("no_such_module:x")
    with pytest.raises(PluginError) as caught:
        load_target("math:sqrtt")
    assert caught.value.do == "did you mean `sqrt`?"


def test_discovery_imports_no_heavy_module():
    code = (
        "import sys; from miles_core.registry import discover; discover();"
        "print(sorted({'torch', 'ray', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
