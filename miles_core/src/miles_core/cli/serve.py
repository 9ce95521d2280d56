"""miles serve: sessions over HTTP for agents, without training."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import click


@click.command("serve")
@click.argument("run_file", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of RUN_FILE.")
@click.option("--model", help="Hugging Face folder to serve, instead of RUN_FILE.")
@click.option("--engine", default="local", show_default=True, help="With --model: an installed engine, or `scripted`.")
@click.option("--script", type=click.Path(path_type=Path), help="With --engine scripted: one JSON string per line.")
@click.option("--family", help="With --model: token family; left out, the one that claims the checkpoint.")
@click.option("--matcher", default="strict", show_default=True, help="With --model: how replays are compared.")
@click.option("--history", type=click.Choice(["linear", "branching"]), default="linear", show_default=True)
@click.option("--context-length", type=click.IntRange(min=2), help="With --model: tokens of prompt plus output.")
@click.option(
    "--leaves", default="drop-retries", show_default=True, help="With --model: branches that are kept; or module:attr."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Of one turn.")
@click.option("--agent-sampling", type=click.Choice(["honour", "override"]), default="honour", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--journal", type=click.Path(path_type=Path), help="Folder that outlives a killed server.")
@click.option("--idle-timeout-s", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True)
@click.option("--memory-mib", type=click.IntRange(min=1), default=4096, show_default=True, help="Of all sessions.")
@click.option("--max-sessions", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--model-name", help="Name the policy is listed under; left out, the folder's.")
def command(run_file: Path | None, overrides: tuple[str, ...], model: str | None, **flags: Any) -> None:
    """Serve RUN_FILE's model, engine and session section, or those that the flags name. Ctrl-C stops."""
    if (run_file is None) == (model is None):
        raise click.UsageError("give a RUN_FILE or --model, and not both")
    _refuse_unread(run_file, overrides)
    from miles_core.driver import serve
    from miles_core.registry import discover
    from miles_core.session.serving.settings import MIB, ServerSettings

    settings = ServerSettings(
        agent_sampling=flags["agent_sampling"],
        picker=serve.picker_named(flags["leaves"]),
        idle_timeout_s=flags["idle_timeout_s"],
        max_bytes=flags["memory_mib"] * MIB,
        max_sessions=flags["max_sessions"],
    )
    settings = serve.with_sampling(settings, {"max_tokens": flags["max_tokens"]})

    def listen(folder: str) -> serve.Listen:
        named = replace(settings, model=flags["model_name"] or Path(folder).resolve().name)
        return serve.Listen(host=flags["host"], port=flags["port"], settings=named, journal=flags["journal"])

    if run_file is None:
        assert model is not None
        names = ("engine", "family", "matcher", "history", "context_length", "script")
        quick = serve.Quick(model=model, **{name: flags[name] for name in names})
        work = serve.serve_quick(quick, discover(()), listen(model), click.echo)
    else:
        from miles_core.config.load import load
        from miles_core.config.resolve import resolve

        source = load(run_file, overrides)
        registry = discover(source.disabled_plugins())
        resolved = resolve(source, registry, unread=serve.UNREAD)
        work = serve.serve_run(resolved, registry, listen(resolved.spec.model.path), click.echo)
    asyncio.run(work)


def _refuse_unread(run_file: Path | None, overrides: tuple[str, ...]) -> None:
    """Refuse flags that nothing would read."""
    ctx = click.get_current_context()
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if run_file is None and overrides:
        raise click.UsageError("--set overrides a RUN_FILE, and there is none")
    unread = given & {"engine", "family", "matcher", "history", "context_length", "script", "leaves"}
    if run_file is not None and unread:
        flag = min(unread).replace("_", "-")
        raise click.UsageError(f"--{flag} goes with --model; the RUN_FILE says it here, and --set changes it")
